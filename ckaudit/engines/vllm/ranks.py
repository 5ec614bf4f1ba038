"""Ranks that a model is spread over, and a process group in which this process is one of them and alone: no port, no peers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple
from unittest.mock import patch


class Layout(NamedTuple):
    """How many ranks share a model, in vLLM's words: tensor-parallel and pipeline-parallel size, and whether experts are spread over the
    tensor-parallel ranks (expert parallel) instead of each being cut."""

    tp: int = 1
    pp: int = 1
    ep: bool = False

    @property
    def alone(self) -> bool:
        """Whether one rank holds all of the model."""
        return self.tp == self.pp == 1

    def ranks(self) -> tuple[int, ...]:
        """The ranks that have to be loaded: of each pipeline stage the first, and the others where they hold other experts.

        Tensor-parallel ranks that only cut the same tensors are alike.
        """
        return tuple(range(self.tp * self.pp)) if self.ep else tuple(range(0, self.tp * self.pp, self.tp))


PLAIN = Layout()
_grouped = False


def join(layout: Layout, rank: int, within: AbstractContextManager[Any]) -> None:
    """Be `rank` of the group of `layout`, `within` the context of a release's config.

    Anew for every model: which groups a release makes (for experts, say) depends on the model's config.
    """
    import torch.distributed as dist
    import vllm.distributed as distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global _grouped
    if _grouped:
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()
    if dist.is_initialized():
        dist.destroy_process_group()
    size = layout.tp * layout.pp
    dist.init_process_group(backend="fake", rank=rank, world_size=size, store=FakeStore())
    _grouped = True
    with within, _without_peers():
        distributed.init_distributed_environment(size, rank, "env://", 0, "fake")
        distributed.initialize_model_parallel(layout.tp, layout.pp)


@contextmanager
def _without_peers() -> Iterator[None]:
    """What asks for peers while groups are made is answered: groups are of the fake backend, whatever is asked for, nothing is sent, and
    every rank is on one node. The queue for messages between workers, which waits until they are there, is not made."""
    import torch.distributed as dist

    new_group = dist.new_group

    def fake(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    def together(group: Any, source_rank: int = 0) -> list[bool]:
        del source_rank
        return [True] * group.size()

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "new_group", fake))
        stack.enter_context(patch.object(dist, "broadcast_object_list", lambda *_, **__: None))
        with suppress(ImportError):
            state: Any = importlib.import_module("vllm.distributed.parallel_state")
            stack.enter_context(patch.object(state, "in_the_same_node_as", together))
            queues: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
            silent = staticmethod(lambda *_, **__: None)
            stack.enter_context(patch.object(queues.MessageQueue, "create_from_process_group", silent))
        yield
