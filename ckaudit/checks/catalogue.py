"""Every check there is, by id. An audit does without: it reads the modules of its own checks alone."""

from __future__ import annotations

from ckaudit.checks import (
    adapters,
    behaviour,
    classes,
    companions,
    config,
    container,
    coverage,
    differences,
    drafts,
    joined,
    layout,
    names,
    parallel,
    perplexity,
    prefixes,
    quantisation,
    rewrites,
    rules,
    sizes,
    tensors,
    ties,
    values,
)
from ckaudit.findings import Check

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (
            *container.CHECKS, *names.CHECKS, *rewrites.CHECKS, *prefixes.CHECKS, *layout.CHECKS, *joined.CHECKS, *drafts.CHECKS,
            *ties.CHECKS, *sizes.CHECKS, *tensors.CHECKS, *companions.CHECKS, *quantisation.CHECKS, *coverage.CHECKS, *parallel.CHECKS,
            *config.CHECKS, *classes.CHECKS, *values.CHECKS, *behaviour.CHECKS, *perplexity.CHECKS, *rules.CHECKS,
            *differences.CHECKS, *adapters.CHECKS,
        ),
        key=lambda c: c.id,
    )
)  # fmt: skip
"""The catalogue, by id."""
