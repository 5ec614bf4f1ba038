"""Ranks that a model is spread over, and a process group in which this process is one of them and alone: no port, no peers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple


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
    with within, _fake_groups():
        distributed.init_distributed_environment(size, rank, "env://", 0, "fake")
        distributed.initialize_model_parallel(layout.tp, layout.pp)


def _fake_groups() -> AbstractContextManager[Any]:
    """`torch.distributed.new_group` makes groups of the fake backend, whatever backend is asked for."""
    from unittest.mock import patch

    import torch.distributed as dist

    real = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "backend": "fake"})

    return patch.object(dist, "new_group", new_group)
