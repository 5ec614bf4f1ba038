"""Imports that vLLM makes and loading does not need are answered by stubs, so that a release runs with nothing of it installed.

Only for callers inside vLLM and transformers' model files; `importlib.util.find_spec` keeps telling the truth, so vLLM's own
`has_x()` probes still say no. What decides loading (`compressed_tensors`, pydantic, msgspec …) is never stubbed: without it there is no
verdict. A stub absorbs whatever is done with it at import; an exception in whose frames one shows up is never the checkpoint's fault
(`touched`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, ClassVar

NOT_NEEDED = ("entrypoints", "renderers", "parser", "reasoning", "tool_parsers", "benchmarks", "profiler")
"""Parts of vLLM (under `vllm.`) that serve requests: stubs even though the files are there, for speed and for their imports."""

COMPILED = ("vllm._", "vllm.vllm_flash_attn", "vllm.third_party")
"""Parts of vLLM that are compiled, and so not among the Python files."""

REAL = {
    "torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "numpy", "compressed_tensors", "pydantic", "pydantic_core",
    "msgspec", "packaging", "yaml", "regex", "einops",
}  # fmt: skip
"""What decides loading, or what torch does: missing, it is missing."""

PROBED = {
    "flash_attn", "xformers", "apex", "amdsmi", "pynvml", "aiter", "habana_frameworks", "torch_xla", "libtpu", "zentorch",
    "intel_extension_for_pytorch", "vllm_xpu_kernels", "bitsandbytes", "torchao", "gguf", "deep_gemm", "flashinfer", "auto_round",
    "modelscope", "ray", "triton",
}  # fmt: skip
"""Packages whose absence vLLM asks about by importing them: a stub would be a lie about the machine."""


class _AnyMeta(type):
    """A class that takes any attribute, argument, base and subscript."""

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> Any:
        return type.__new__(mcs, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> None:
        pass

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else type.__call__(cls)

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __bool__(cls) -> bool:
        return False


class Stub(metaclass=_AnyMeta):
    """Stands for any class, function, decorator or value of a package that is not there."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __getitem__(self, item: Any) -> Any:
        return self

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


class StubModule(types.ModuleType):
    """A module whose every name is a stub."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__version__", "__file__"):
            return "0.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    made: ClassVar[set[str]] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if not self.answers(fullname):
            return None
        self.made.add(fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def answers(self, name: str) -> bool:
        raise NotImplementedError

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = StubModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _First(_Finder):
    """First in line: parts of vLLM that are there and that loading never needs."""

    def answers(self, name: str) -> bool:
        parts = name.split(".")
        return parts[0] == "vllm" and len(parts) > 1 and parts[1] in NOT_NEEDED


class _Kernels(_Finder):
    """Triton and the kernel libraries that a wheel brings along, as part of a pretended GPU: vLLM chooses backends by whether they are
    there, and refuses some layers without. Kernels are defined with them, never run.
    """

    def __init__(self, bundled: Collection[str]) -> None:
        self._heads = ("triton", *bundled)

    def answers(self, name: str) -> bool:
        held = any(name == head or name.startswith(f"{head}.") for head in self._heads)
        return held and _importer(probes=True).startswith(("vllm", "triton", __name__))

    def exec_module(self, module: types.ModuleType) -> None:
        members: dict[str, Any] = _TRITON.get(module.__name__, {})
        module.__dict__.update(members)


class KernelConfig:
    """triton.Config: what a list of tuning configurations is filtered by at import."""

    def __init__(self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 3, **rest: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages
        self.__dict__.update(rest)


_TRITON: dict[str, dict[str, Any]] = {
    "triton": {
        "__version__": "3.6.0",
        "Config": KernelConfig,
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
    },
    "triton.language": {"constexpr": lambda value: value},
    "triton.backends.nvidia.compiler": {"get_ptxas": lambda *_: types.SimpleNamespace(version="12.9.86")},
    "triton.backends": {
        "backends": {"nvidia": types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True))}
    },
}


class _Last(_Finder):
    """Last in line: packages that are not there, for those who may get a stub."""

    def answers(self, name: str) -> bool:
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in REAL:
            return False
        if top in PROBED and _importer().rpartition(".")[2] != top:
            return (
                False  # a module of vLLM that is named after the package is imported only where the package was found
            )
        if top == "vllm" and not name.startswith(COMPILED):
            return False
        if "." in name and top != "vllm" and not isinstance(sys.modules.get(top), StubModule):
            return False
        return _importer().startswith(("vllm", "transformers.models"))


def _importer(probes: bool = False) -> str:
    """The name of the module whose `import` statement is being run (empty for `find_spec`, which must see what is, unless `probes`)."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == "importlib.util" and not probes:
            return ""
        if not name.startswith(("importlib", "_frozen_importlib", __name__)):
            return name
        frame = frame.f_back
    return ""


def install() -> None:
    """Put the stubs in place, for the rest of this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _First())
        sys.meta_path.append(_Last())


def with_kernels(bundled: Collection[str] = ()) -> None:
    """From now on vLLM finds Triton, and the packages `bundled`."""
    if not any(isinstance(finder, _Kernels) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Kernels(bundled))


def bundled(files: Iterable[PurePath]) -> frozenset[str]:
    """The packages under `vllm.third_party` that have a compiled part, by the files that a wheel lists: on the machine that it was built
    for they can be imported, here not."""
    compiled = [path for path in files if path.suffix == ".so" and path.parts[:2] == ("vllm", "third_party")]
    return frozenset(".".join(path.parts[:3]) for path in compiled if len(path.parts) > 3)


def names() -> list[str]:
    """The top-level packages that are answered by stubs so far, sorted; parts of vLLM by two levels."""
    return sorted({".".join(n.split(".")[: 2 if n.startswith("vllm.") else 1]) for n in _Finder.made})


def is_stub(value: Any) -> bool:
    """Whether a value is a stub, or was made by one."""
    return isinstance(value, (Stub, StubModule, _AnyMeta))


def touched(error: BaseException) -> str | None:
    """The stub that an exception came through, if one shows in its frames: the frame's own code, or what its innermost line works with."""
    trace = error.__traceback__
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in frames:
        if frame.f_code.co_filename == __file__:
            return "a stub was called"
    if frames:
        frame = frames[-1]
        for name, value in [*frame.f_locals.items(), *((n, frame.f_globals.get(n)) for n in frame.f_code.co_names)]:
            if value is not None and is_stub(value):
                return f"{name} in {frame.f_globals.get('__name__', '?')} is a stub"
    return "a stub was computed with" if "AnyMeta" in str(error) or "'Stub'" in str(error) else None


_building = False
_NAMESPACES = ("_C", "_moe_C", "_qutlass_C", "_vllm", "_flashmla", "_rocm_C", "_xpu_C", "vllm")
"""Where vLLM registers operators; torch's own namespaces keep telling the truth."""


def answer_for_compiled_ops() -> None:
    """Compiled operators that only ask what the machine supports have an answer from now on; the others while layers are constructed."""
    import torch

    namespace: Any = torch._ops._OpNamespace
    real = namespace.__getattr__

    def lookup(self: Any, name: str) -> Any:
        try:
            return real(self, name)
        except AttributeError:
            ours = self.name.startswith(_NAMESPACES) and not name.startswith("__")
            if not ours or not (_building or "support" in name):
                raise
            return _MissingOp(f"{self.name}::{name}")

    namespace.__getattr__ = lookup


@contextmanager
def building() -> Iterator[None]:
    """While layers are constructed, and the module of a model is imported, any compiled operator that is looked up is there, and does
    nothing. Calls elsewhere fail."""
    global _building
    before, _building = _building, True
    try:
        yield
    finally:
        _building = before


class _MissingOp:
    """A compiled operator: may be held and named, does nothing when a constructor calls it.

    One that asks whether the machine supports something (vllm/_custom_ops.py: `cutlass_scaled_mm_supports_fp8` and its like, which take a
    compute capability such as 90) gets the answer of the released build: FP4 from sm100 on, anything else from sm89 on.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> _MissingOp:
        if name.startswith("__"):
            raise AttributeError(name)
        return self  # an overload: `default`, `out`

    def __call__(self, *args: Any, **_: Any) -> Any:
        if "support" in self.name and len(args) == 1 and isinstance(args[0], int):
            return args[0] >= (100 if "fp4" in self.name else 89)
        return None
