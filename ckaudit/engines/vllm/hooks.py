"""What a dispatch mode cannot see: Python reading a tensor's values as a list, and a parameter that is pointed at other data.

The attributes are replaced while an observer is active and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Observer(Protocol):
    def listed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real values of a tensor without data."""
        ...

    def replaced(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """What was `old` is now `new` (or has its data)."""
        ...


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

    tensor.tolist = real(base.tolist)
    tensor.numpy = real(base.numpy)
    tensor.data = property(base.data.__get__, point)
    torch.nn.Module.register_parameter = register_parameter
    try:
        yield
    finally:
        del tensor.tolist, tensor.numpy, tensor.data
        torch.nn.Module.register_parameter = register
