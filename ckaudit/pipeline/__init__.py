"""target -> Report: the only place that names every stage, one module a command, each stage once and in order."""

from ckaudit.pipeline.diff import diff
from ckaudit.pipeline.load import Loaded, load
from ckaudit.pipeline.names import audit
from ckaudit.pipeline.perplexity import measure
from ckaudit.pipeline.stages import describe

__all__ = ["Loaded", "audit", "describe", "diff", "load", "measure"]
