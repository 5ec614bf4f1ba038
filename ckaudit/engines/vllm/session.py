"""A release of vLLM brought up in this process: once, for many checkpoints. Runs in a worker."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from ckaudit.engines import EngineOptions
from ckaudit.engines.vllm import BESIDE, PLATFORM, TREE, platform, ranks, stubs
from ckaudit.engines.vllm.ranks import PLAIN, Layout

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
        self._uninspected: Exception | None = None
        self._inspect_here()
        _do_without_processors()
        # `_custom_ops` gives operators that are there a shape function, so it is imported while none is answered for.
        for name in (
            "vllm._custom_ops",
            "vllm.engine.arg_utils",
            "vllm.model_executor.model_loader",
            "vllm.distributed",
        ):
            importlib.import_module(name)
        # As a worker of the release does before it builds a model; some layers ask for room there.
        with suppress(ImportError):
            workspace: Any = importlib.import_module("vllm.v1.worker.workspace")
            workspace.init_workspace_manager(torch.device(self.machine.kind))

    def _inspect_here(self) -> None:
        """Classes are inspected in a subprocess of their own by a release; here they are imported in this one.

        The registry logs why a class cannot be imported and goes on without it; that reason is the one to tell.
        """
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")

        def inspect(held: Any) -> Any:
            try:
                with stubs.building():
                    return registry._ModelInfo.from_model_cls(held.load_model_cls())
            except Exception as error:
                self._uninspected = error
                raise

        registry._LazyRegisteredModel.inspect_model_cls = inspect

    def environment(self) -> dict[str, str]:
        """Versions of what took part, and the pretended machine."""
        out = {"platform": self.machine.text}
        for name in ("torch", "transformers", "compressed_tensors"):
            module = sys.modules.get(name)
            version = getattr(module, "__version__", None) if not stubs.is_stub(module) else None
            if isinstance(version, str):
                out[name] = str(version)  # torch has a class of its own for it
        return out

    def config(self, folder: Path, options: EngineOptions, layout: Layout = PLAIN, **more: Any) -> Any:
        """The release's `VllmConfig` for a checkpoint, with `more` arguments of its own. Raises what the release raises."""
        from vllm.engine.arg_utils import EngineArgs

        args: dict[str, Any] = {
            "model": str(folder), "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 512,
            "trust_remote_code": options.trust_remote_code,
        }  # fmt: skip
        args |= {k: v for k, v in options.vllm.items() if v is not None and k != "platform"} | more
        args |= {
            "tensor_parallel_size": layout.tp,
            "pipeline_parallel_size": layout.pp,
            "enable_expert_parallel": layout.ep,
        }
        if options.class_name is not None:
            args["hf_overrides"] = {**(args.get("hf_overrides") or {}), "architectures": [options.class_name]}
        if not layout.alone:
            args["distributed_executor_backend"] = "mp"
        self._uninspected = None
        try:
            return EngineArgs(**args).create_engine_config()
        except Exception as error:
            if self._uninspected is not None:
                raise self._uninspected from error
            raise

    def join(self, config: Any, layout: Layout = PLAIN, rank: int = 0) -> None:
        """Be one rank of a layout, for a model of this config."""
        with suppress(AttributeError):  # as a worker of the release is told
            config.parallel_config.rank = rank
        ranks.join(layout, rank, self.within(config))

    def within(self, config: Any) -> AbstractContextManager[Any]:
        """The context in which a release builds and loads a model."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(config)  # type: ignore[no-any-return]


def _do_without_processors() -> None:
    """Some configs and constructors ask the processor of a multimodal model for kinds of input or for means of pixels. Its files decide
    nothing about weights and are not among those that are read, so where it cannot be made a stub stands in."""

    def or_stub(real: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            try:
                return real(*args, **kwargs)
            except Exception:  # noqa: BLE001  (whatever it misses: a tokenizer, a file, a class)
                return stubs.Stub()

        return make

    with suppress(ImportError):
        module: Any = importlib.import_module("vllm.transformers_utils.processor")
        for kind in ("processor", "feature_extractor", "image_processor", "video_processor"):
            for name in (f"get_{kind}", f"cached_get_{kind}"):
                if hasattr(module, name):
                    setattr(module, name, or_stub(getattr(module, name)))


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
