"""The machine that a release is told it runs on: fixed, recorded, and the same whatever machine this is.

Kernels and quantisation methods are chosen by compute capability while layers are constructed, which decides the layout of parameters.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import msgspec

from ckaudit.engines.vllm import stubs

DEFAULT = "cuda:sm90"
_MEMORY = 80 * 2**30


class Machine(msgspec.Struct, frozen=True):
    """A pretended platform: `kind` is `cuda` or `cpu`, `capability` (major, minor) of a CUDA device."""

    kind: str
    capability: tuple[int, int] = (0, 0)

    @property
    def text(self) -> str:
        """As a report names it."""
        where = f"cuda sm{self.capability[0]}{self.capability[1]}" if self.kind == "cuda" else self.kind
        return f"{where} (pretended)"


def parse(text: str) -> Machine:
    """`cuda`, `cuda:sm90`, `cuda:8.0` or `cpu`. Raises ValueError."""
    kind, _, rest = text.strip().lower().partition(":")
    if kind == "cpu" and not rest:
        return Machine("cpu")
    match = re.fullmatch(r"(?:sm_?)?(\d+?)\.?(\d)a?", rest or "sm90")
    if kind != "cuda" or match is None:
        raise ValueError(f"{text!r} is no platform: use cuda, cuda:sm80, cuda:sm90, cuda:sm100 or cpu")
    return Machine("cuda", (int(match[1]), int(match[2])))


def pretend(machine: Machine, devices: int = 1024) -> None:
    """Make vLLM and torch see `devices` of this machine. Once a process; vLLM is imported here."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    platforms: Any = __import__("vllm.platforms", fromlist=["_current_platform"])
    interface: Any = __import__("vllm.platforms.interface", fromlist=["Platform"])
    interface.Platform.get_cpu_architecture = classmethod(lambda _: interface.CpuArchEnum.X86)
    if machine.kind == "cpu":
        cpu: Any = __import__("vllm.platforms.cpu", fromlist=["CpuPlatform"])
        platforms._current_platform = cpu.CpuPlatform()
        return
    stubs.with_kernels(stubs.bundled(_wheel_files()))
    _pretend_torch_cuda(machine, devices)
    platforms._current_platform = _cuda(machine, devices, interface)()


def _wheel_files() -> list[PurePosixPath]:
    """What the release's wheel listed; nothing for a source checkout."""
    try:
        return list(importlib.metadata.files("vllm") or ())
    except importlib.metadata.PackageNotFoundError:
        return []


def _cuda(machine: Machine, devices: int, interface: Any) -> Any:
    """A CUDA platform that answers without asking a driver."""
    # The module asks NVML while it is imported; without a driver it settles for the class that asks torch.
    module: Any = __import__("vllm.platforms.cuda", fromlist=["CudaPlatformBase"])
    capability = interface.DeviceCapability(*machine.capability)
    name = f"pretended GPU sm{machine.capability[0]}{machine.capability[1]}"

    # Signatures are those of vLLM, which passes these arguments by name.
    class Pretended(module.CudaPlatformBase):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:  # noqa: ARG003
            return capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:  # noqa: ARG003
            return name

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return f"GPU-{device_id}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:  # noqa: ARG003
            return _MEMORY

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:  # noqa: ARG003
            return True

        @classmethod
        def device_count(cls) -> int:
            return devices

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:  # noqa: ARG003
            return 132

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def import_kernels(cls) -> None:
            pass

        @classmethod
        def log_warnings(cls) -> None:
            pass

    Pretended.__name__ = Pretended.__qualname__ = "CudaPlatform"
    return Pretended


def _pretend_torch_cuda(machine: Machine, devices: int) -> None:
    """What vLLM's layers ask of torch.cuda while they are constructed."""
    import torch

    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(
        name="pretended GPU", major=machine.capability[0], minor=machine.capability[1], total_memory=_MEMORY,
        multi_processor_count=132, warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 * 2**20, uuid="GPU-0",
    )  # fmt: skip
    answers: dict[str, Any] = {
        "device_count": devices, "current_device": 0, "get_device_capability": machine.capability, "get_device_properties": properties,
        "get_device_name": properties.name, "mem_get_info": (_MEMORY, _MEMORY), "set_device": None, "synchronize": None,
        "empty_cache": None, "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "reset_peak_memory_stats": None,
        "current_stream": stubs.Stub(), "stream": stubs.Stub(),
    }  # fmt: skip
    for name, value in answers.items():  # a function each: torch keeps tables by function
        setattr(cuda, name, lambda *_, _value=value, **__: _value)
    for name in ("empty_cache", "synchronize"):
        setattr(torch.accelerator, name, lambda *_, **__: None)
    for name in ("Stream", "Event", "CUDAGraph"):
        setattr(cuda, name, type(name, (stubs.Stub,), {}))
    cuda._lazy_init = lambda: None  # what asks for this device is made on `meta`, before any driver is asked
    torch.version.cuda = "12.9"
    # Compiled code is never run here, and the compiler would look at every function replaced above.
    torch.compile = lambda model=None, **_: model if model is not None else lambda function: function


@contextmanager
def on_meta() -> Iterator[None]:
    """Tensors asked for on the pretended device are made on `meta`: torch would ask for a driver before any observer sees the call."""
    import torch
    from torch.overrides import TorchFunctionMode

    meta = torch.device("meta")

    class OnMeta(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            device = (kwargs or {}).get("device")
            if device is not None and not str(device).startswith(("cpu", "meta")):
                kwargs = {**kwargs, "device": meta}
            return func(*args, **(kwargs or {}))

    with OnMeta():
        yield
