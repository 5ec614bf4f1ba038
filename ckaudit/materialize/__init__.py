"""Load a checkpoint for real: on a device, every value looked at, one forward pass."""

from ckaudit.materialize.files import needed_files
from ckaudit.materialize.host import load, waiting
from ckaudit.materialize.job import LoadOptions, LoadResult

__all__ = ["LoadOptions", "LoadResult", "load", "needed_files", "waiting"]
