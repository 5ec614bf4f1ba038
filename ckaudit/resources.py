"""Data folders that ship with ckaudit: `rules/` and `docs/checks/`."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path


def folder(name: str) -> Traversable:
    """The shipped folder `name` (such as `rules`): inside the package when installed, beside it in a checkout."""
    packaged = files("ckaudit").joinpath(name)
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / name
