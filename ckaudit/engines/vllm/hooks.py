"""What a dispatch mode cannot see: Python reading a tensor's values as a list, a parameter that is pointed at other data, a device that
is not of this machine.

The attributes are replaced while an observer is active and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

META = torch.device("meta")


class Observer(Protocol):
    def listed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real values of a tensor without data."""
        ...

    def replaced(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """What was `old` is now `new` (or has its data)."""
        ...


def _here(value: Any) -> Any:
    """`meta` for a device that is not of this machine: torch would refuse to move anything there."""
    if isinstance(value, torch.device | str) and not isinstance(value, torch.dtype):
        return META if str(value).partition(":")[0] not in ("cpu", "meta") else value
    return value


@contextmanager
def hooked(observer: Observer) -> Iterator[None]:
    """`tolist`, `numpy`, `data =` and `register_parameter` report to the observer inside this context."""
    tensor: Any = torch.Tensor
    base = torch._C.TensorBase
    register = torch.nn.Module.register_parameter

    def real(method: Any) -> Any:
        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return method(observer.listed(self) if self.device.type == "meta" else self, *args, **kwargs)

        return call

    def point(self: torch.Tensor, value: torch.Tensor) -> None:
        observer.replaced(self, value)
        base.data.__set__(self, value)

    def register_parameter(self: torch.nn.Module, name: str, param: Any) -> None:
        old = self._parameters.get(name)
        if old is not None and param is not None:
            observer.replaced(old, param)
        register(self, name, param)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return base.to(self, *(_here(a) for a in args), **{k: _here(v) for k, v in kwargs.items()})

    def made(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{k: v for k, v in kwargs.items() if k != "device"})

    make = torch.tensor
    tensor.to = to
    tensor.cuda = tensor.pin_memory = lambda self, *_, **__: self
    torch.tensor = made
    tensor.tolist = real(base.tolist)
    tensor.numpy = real(base.numpy)
    tensor.data = property(base.data.__get__, point)
    torch.nn.Module.register_parameter = register_parameter
    try:
        yield
    finally:
        del tensor.tolist, tensor.numpy, tensor.data, tensor.to, tensor.cuda, tensor.pin_memory
        torch.tensor = make
        torch.nn.Module.register_parameter = register
