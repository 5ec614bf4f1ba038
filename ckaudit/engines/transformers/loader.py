"""Runs in the worker: one Job through the real loader of the installed transformers."""

from __future__ import annotations

from ckaudit.engines import Job, ReadTensor
from ckaudit.plan import Plan


def run(job: Job, read: ReadTensor) -> Plan:
    """What the installed transformers does with the checkpoint of `job`."""
    raise NotImplementedError
