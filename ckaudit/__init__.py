"""Tell, before anyone downloads a weight, whether a checkpoint will load into the software that will serve it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckaudit.errors import CkauditError
    from ckaudit.findings import Finding, Report, Skip
    from ckaudit.pipeline.names import audit

__version__ = "0.1.0.dev0"
__all__ = ["CkauditError", "Finding", "Report", "Skip", "__version__", "audit"]

_HOME = {
    "audit": "ckaudit.pipeline.names",
    "CkauditError": "ckaudit.errors",
    "Finding": "ckaudit.findings",
    "Report": "ckaudit.findings",
    "Skip": "ckaudit.findings",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: `import ckaudit` stays light (PEP 562)."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
