"""target -> Report: the only place that names every stage, one module a command, each stage once and in order.

A command imports its own module: what `load` and `ppl` need is not read for an audit of names.
"""

from ckaudit.pipeline.stages import describe as describe
