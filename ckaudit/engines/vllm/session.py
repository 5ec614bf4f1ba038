"""A release of vLLM brought up in this process: once, for many checkpoints. Runs in a worker."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ckaudit.engines import EngineOptions
from ckaudit.engines.vllm import BESIDE, PLATFORM, TREE, platform, stubs

_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CONFIGURE_LOGGING": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "", "VLLM_USE_MODELSCOPE": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_DISABLE_COMPILE_CACHE": "1",
}  # fmt: skip


class Session:
    """The release, its pretended machine, and a fake process group. One a process."""

    def __init__(self) -> None:
        for name in [n for n in os.environ if n.startswith("VLLM_")]:
            del os.environ[name]  # the user's serving settings must not change a verdict
        os.environ.update(_QUIET)
        for folder in [*os.environ.get(BESIDE, "").split(os.pathsep), os.environ.get(TREE, "")]:
            if folder:
                sys.path.insert(0, folder)
        self.machine = platform.parse(os.environ.get(PLATFORM) or platform.DEFAULT)
        stubs.install()
        import torch

        stubs.answer_for_compiled_ops()
        _stand_in_metadata()
        platform.pretend(self.machine)
        self.torch = torch
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")
        # Classes are inspected in a subprocess of their own by a release; here they are imported in this one.
        registry._LazyRegisteredModel.inspect_model_cls = lambda held: registry._ModelInfo.from_model_cls(
            held.load_model_cls()
        )
        for name in ("vllm.engine.arg_utils", "vllm.model_executor.model_loader", "vllm.distributed"):
            importlib.import_module(name)
        self._grouped = False

    def environment(self) -> dict[str, str]:
        """Versions of what took part, and the pretended machine."""
        out = {"platform": self.machine.text}
        for name in ("torch", "transformers", "compressed_tensors"):
            module = sys.modules.get(name)
            version = getattr(module, "__version__", None) if not stubs.is_stub(module) else None
            if isinstance(version, str):
                out[name] = str(version)  # torch has a class of its own for it
        return out

    def config(self, folder: Path, options: EngineOptions, tp: int = 1) -> Any:
        """The release's `VllmConfig` for a checkpoint. Raises what the release raises."""
        from vllm.engine.arg_utils import EngineArgs

        args: dict[str, Any] = {
            "model": str(folder), "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 512,
            "trust_remote_code": options.trust_remote_code, "tensor_parallel_size": tp,
        }  # fmt: skip
        args |= {k: v for k, v in options.vllm.items() if v is not None and k != "platform"}
        if options.class_name is not None:
            args["hf_overrides"] = {**(args.get("hf_overrides") or {}), "architectures": [options.class_name]}
        if tp > 1:
            args["distributed_executor_backend"] = "mp"
        return EngineArgs(**args).create_engine_config()

    def group(self, config: Any, tp: int, pp: int = 1) -> None:
        """A process group of this size, of which this process is rank 0 and alone: no port, no peers.

        Anew for every model: which groups a release makes (for experts, say) depends on the model's config.
        """
        import torch.distributed as dist
        import vllm.distributed as distributed
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if self._grouped:
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(backend="fake", rank=0, world_size=tp * pp, store=FakeStore())
        self._grouped = True
        with self.within(config), _fake_groups():
            distributed.init_distributed_environment(tp * pp, 0, "env://", 0, "fake")
            distributed.initialize_model_parallel(tp, pp)

    def within(self, config: Any) -> AbstractContextManager[Any]:
        """The context in which a release builds and loads a model."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(config)  # type: ignore[no-any-return]


def _fake_groups() -> AbstractContextManager[Any]:
    """`torch.distributed.new_group` makes groups of the fake backend, whatever backend is asked for."""
    from unittest.mock import patch

    import torch.distributed as dist

    real = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "backend": "fake"})

    return patch.object(dist, "new_group", new_group)


def _stand_in_metadata() -> None:
    """`importlib.metadata.version("vllm")` has an answer for a source tree too, which carries no metadata."""
    import importlib.metadata as metadata

    real = metadata.version

    def version(distribution_name: str) -> str:
        try:
            return real(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name == "vllm":
                return "0.0.0"
            raise

    metadata.version = version


_session: Session | Exception | None = None


def session() -> Session:
    """The session of this process, brought up at the first call. Raises whatever the imports raise, again at every further call: half an
    import leaves a process that nothing can be judged in."""
    global _session
    if _session is None:
        try:
            _session = Session()
        except Exception as error:  # noqa: BLE001  (kept, and raised)
            _session = error
    if isinstance(_session, Exception):
        raise _session
    return _session
