"""The whole of `ckaudit ppl`: score, compare, prove; one value out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from ckaudit.errors import EngineError, UsageError
from ckaudit.perplexity import data, faults, references
from ckaudit.perplexity.compare import compare
from ckaudit.perplexity.encode import Encoded, Encoder
from ckaudit.perplexity.journal import Journal
from ckaudit.perplexity.processor import load_processor, pixel_limits
from ckaudit.perplexity.score import Settings, load_model, score_rows
from ckaudit.perplexity.server import Server
from ckaudit.progress import Progress
from ckaudit.scores import Drift, Outcome, Planted, RowScore, Score, Skipped, perplexity


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked of `ckaudit ppl`."""

    data: str = data.BUILTIN
    rows: int | None = None
    settings: Settings = Settings()
    min_pixels: int | None = None
    max_pixels: int | None = None
    reference: Path | None = None
    """A reference file to compare with."""
    candidate: Path | None = None
    """Another repo (quantised, another revision) to compare with the target."""
    candidate_settings: Settings | None = None
    """The same weights under other settings."""
    against: str | None = None
    """Address of a running server to compare with the target."""
    served_model: str | None = None
    entry: str | None = None
    tolerance: float | None = None
    tolerance_reason: str = ""
    prove: bool = False
    cache: Path | None = None
    """Where the rows of an interrupted run are kept; None keeps none."""


def run(name: str, identity: str, folder: Path, options: Options, progress: Progress) -> Outcome:
    """Score the repo in `folder` (called `name`; `identity` changes when its files do) as `options` say.

    Raises CkauditError: no such data, a reference made on other rows, a model that does not load, a server without log-probabilities.
    """
    side = _Side(folder, options, progress)
    rows = data.load(options.data, options.rows)
    kept = references.entry(options.reference, options.entry or name) if options.reference else None
    tolerance = (
        options.tolerance if options.tolerance is not None else kept.tolerance if kept else references.DEFAULT_TOLERANCE
    )
    reason = options.tolerance_reason or (kept.tolerance_reason if kept and options.tolerance is None else "")

    drifts: list[Drift] = []
    reference: Score | None
    if options.against:
        reference = kept.score if kept else side.score(rows, name, identity, options.settings)
        score = _serve(side, rows, options, drifts)
    elif options.candidate or options.candidate_settings:
        reference = kept.score if kept else side.score(rows, name, identity, options.settings)
        other = _Side(options.candidate, options, progress) if options.candidate else side
        label = str(options.candidate) if options.candidate else name
        score = other.score(
            rows, label, f"{identity} {options.candidate}", options.candidate_settings or options.settings
        )
    else:
        reference = kept.score if kept else None
        score = side.score(rows, name, identity, options.settings)
    return Outcome(
        score=score,
        reference=reference,
        comparison=compare(reference, score, tolerance, reason) if reference else None,
        drifts=tuple(drifts),
        faults=tuple(side.prove(rows, options.settings, tolerance)) if options.prove else (),
    )


class _Side:
    """One repo: its processor, and its model once one is needed."""

    def __init__(self, folder: Path, options: Options, progress: Progress) -> None:
        self.folder, self.options, self.progress = folder, options, progress
        self.processor = load_processor(folder, min_pixels=options.min_pixels, max_pixels=options.max_pixels)
        self.encoder = Encoder(self.processor)
        self._model: tuple[Settings, Any] | None = None

    def encode(self, rows: data.DataSet) -> tuple[list[Encoded], tuple[Skipped, ...]]:
        reasons = {row.id: self.encoder.cannot(row) for row in rows.rows}
        encoded = [self.encoder.encode(row) for row in rows.rows if reasons[row.id] is None]
        if not encoded:
            raise EngineError(
                "Not one row can be scored: " + str(next(iter(reasons.values()))), "Give --data of another kind."
            )
        return encoded, tuple(Skipped(i, r) for i, r in reasons.items() if r)

    def model(self, settings: Settings) -> Any:
        if self._model is None or self._model[0] != settings:
            self._model = None  # free the first before the second is loaded
            with self.progress.task(f"loading {self.folder.name}"):
                self._model = (settings, load_model(self.folder, settings))
        return self._model[1]

    def score(self, rows: data.DataSet, label: str, identity: str, settings: Settings) -> Score:
        encoded, skipped = self.encode(rows)
        facts = self.settings(settings)
        key = (identity, rows.hash, msgspec.json.encode(facts).decode(), *versions().values())
        journal = Journal(self.options.cache, key) if self.options.cache else None
        began = time.monotonic()

        def fresh(left: list[Encoded]) -> Iterator[RowScore]:
            return score_rows(self.model(settings), self.encoder, left, settings)

        scored = _watch(
            journal.score(encoded, fresh) if journal else fresh(encoded), len(encoded), label, self.progress
        )
        by_id = {row.id: row for row in scored}
        if journal:
            journal.finish()
        done = tuple(by_id[e.row.id] for e in encoded)
        return make(label, done, skipped, rows, facts, time.monotonic() - began)

    def settings(self, settings: Settings) -> dict[str, Any]:
        facts = msgspec.to_builtins(settings)
        return {**facts, "template_hash": self.encoder.template_hash, **pixel_limits(self.processor)}

    def prove(self, rows: data.DataSet, settings: Settings, tolerance: float) -> Iterator[Planted]:
        """Plant every fault in turn and score again through the same pipeline."""
        encoded, skipped = self.encode(rows)
        model = self.model(settings)

        def score(label: str) -> Score:
            watched = _watch(score_rows(model, self.encoder, encoded, settings), len(encoded), label, self.progress)
            return make(label, tuple(watched), skipped, rows, {}, 0.0)

        healthy = score("healthy")
        for name, plant in faults.FAULTS:
            try:
                with plant(model, self.encoder):
                    found = compare(healthy, score(name), tolerance)
            except faults.NotApplicable as why:
                yield Planted(name, None, False, str(why))
                continue
            # A score that is no longer finite is as visible as a fault can be.
            yield Planted(name, found.relative, found.relative is None or not found.within)


def _serve(side: _Side, rows: data.DataSet, options: Options, drifts: list[Drift]) -> Score:
    encoded, skipped = side.encode(rows)
    assert options.against is not None
    server = Server(options.against, options.served_model)
    began, done = time.monotonic(), []
    for result in _watch(server.score(encoded), len(encoded), options.against, side.progress):
        if isinstance(result, Drift):
            drifts.append(result)
        else:
            done.append(result)
    facts = {"model": server.model, "template_hash": side.encoder.template_hash, **pixel_limits(side.processor)}
    return make(options.against, tuple(done), skipped, rows, facts, time.monotonic() - began)


def _watch(results: Iterator[Any], total: int, label: str, progress: Progress) -> Iterator[Any]:
    with progress.task(f"scoring {label}", total) as task:
        for result in results:
            yield result
            task.advance()


def make(
    side: str, rows: tuple[RowScore, ...], skipped: tuple[Skipped, ...], of: data.DataSet, facts: Any, took: float
) -> Score:
    """A Score from its rows."""
    return Score(
        side=side,
        perplexity=perplexity(rows),
        tokens=sum(row.tokens for row in rows),
        rows=rows,
        skipped=skipped,
        data=of.name,
        data_hash=of.hash,
        settings=facts,
        versions=versions(),
        seconds=round(took, 3),
    )


def versions() -> dict[str, str]:
    """Releases that the number depends on."""
    return {name: version(name) for name in ("torch", "transformers", "ckaudit")}


def save_reference(path: Path, name: str, outcome: Outcome, options: Options) -> None:
    """Keep the outcome's score as the reference `name`. Raises UsageError for a score that is no reference (not finite, rows skipped)."""
    if outcome.score.perplexity is None:
        raise UsageError("A score that is not finite cannot be a reference.", "See the findings.")
    tolerance = references.DEFAULT_TOLERANCE if options.tolerance is None else options.tolerance
    references.save(
        path,
        name,
        references.Entry(score=outcome.score, tolerance=tolerance, tolerance_reason=options.tolerance_reason),
    )
