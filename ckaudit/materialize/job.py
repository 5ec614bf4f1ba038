"""What a load is asked to do and what it tells: plain data that crosses the process border as JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ckaudit.checks.observed import Observed
from ckaudit.findings import Finding, Skip
from ckaudit.materialize.layout import CHUNK, Stored

Status = Literal["complete", "partial", "failed", "interrupted"]


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked of `ckaudit load`."""

    device: str = "cpu"
    devices: int = 1
    """GPUs to spread the model over, by accelerate's device map."""
    tp: bool = False
    """Under torchrun: each process holds its part, by transformers' tensor-parallel plan."""
    dtype: str | None = None
    """A torch dtype name to load in; None as the config says."""
    class_name: str | None = None
    trust_remote_code: bool = False
    values: bool = True
    forward: bool = True
    attention: str = "eager"
    tokens: int = 64
    """Length of the text input, at least 64: NaN in one projection stays hidden from fused attention in shorter ones."""
    seed: int = 0
    modalities: tuple[str, ...] = ()
    """Kinds of input to run (`text`, `image`, `video`, `audio`); empty for all that the model takes."""
    shards: int | None = None
    """Load only this many shards, as a trial."""
    expect: str | None = None
    """A file with the fingerprint to compare with; the JSON report of an earlier load is one."""
    tolerance: float = 1e-2
    """Largest difference of a fingerprint's logits, relative to the largest of them."""
    readers: int = 12
    chunk: int = CHUNK
    access: Literal["auto", "buffered", "ahead", "direct"] = "auto"


class LoadJob(msgspec.Struct, frozen=True, kw_only=True):
    """One load: `tensors` point into `files`, which lie in `folder` beside the config."""

    name: str
    folder: str
    files: tuple[str, ...]
    tensors: tuple[Stored, ...]
    unused: tuple[str, ...] = ()
    """Tensors that the loader will not ask for."""
    weights: str | None = None
    """The one file or index of `folder` to load, where the target names it."""
    partial: bool = False
    """Whether these are only some of the checkpoint's shards."""
    processes: int = 1
    """Processes that hold a part each, this one of them."""
    options: LoadOptions


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from the child: a stage that begins, bytes that moved, what is known so far, or how it failed."""

    stage: str | None = None
    moved: int = 0
    load: dict[str, Any] | None = None
    forward: dict[str, Any] | None = None
    observed: Observed | None = None
    error: str | None = None
    hint: str = ""
    blame: Literal["", "checkpoint", "environment"] = ""
    done: bool = False


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a load found: the `load` and `forward` sections of the report, findings, and statistics of every tensor.

    `error` is the one line that says why it ended early (then `load["status"]` is not `complete`, and what is here is what was known);
    `environment` says whether that is a matter of circumstances (exit code 2) and not of the checkpoint (a finding).
    """

    load: dict[str, Any]
    forward: dict[str, Any] | None = None
    findings: tuple[Finding, ...] = ()
    skips: tuple[Skip, ...] = ()
    observed: Observed | None = None
    error: str | None = None
    hint: str = ""
    environment: bool = False
    unanswered: bool = False
    """Whether a kind of input or a comparison that was asked for could not be had (exit code 3)."""
