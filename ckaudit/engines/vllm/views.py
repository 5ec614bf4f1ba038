"""Views move no element, so an observer need not see them: torch calls their kernels past it, which is most of the calls of a loader."""

from __future__ import annotations

from typing import Any

import torch

_MODES = "Python"  # torch's name for the place where dispatch modes are called


class Views:
    """The views that were met so far. While this is entered, dispatch modes no longer see them, in the whole process."""

    def __init__(self) -> None:
        self._library: Any = None
        self._met: set[Any] = set()

    def __enter__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def __exit__(self, *_: object) -> None:
        self._library._destroy()
        self._library = None
        self._met.clear()

    def pass_by(self, func: Any) -> bool:
        """Whether an operation is a view; from the next call on it passes dispatch modes by.

        `lift_fresh` is called a view and is how a real tensor comes in.
        """
        if func in self._met:
            return True
        if not func.is_view or func._schema.is_mutable or func is torch.ops.aten.lift_fresh.default:
            return False
        self._met.add(func)
        # `detach` has a kernel of its own for modes: torch warns of replacing it.
        taken = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _MODES)
        if self._library is not None and func.namespace == "aten" and not taken:
            self._library.impl(func, torch.library.fallthrough_kernel, _MODES)
        return True
