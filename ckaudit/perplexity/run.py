"""The whole of `ckaudit ppl`: score, compare, prove; one value out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from ckaudit import __version__
from ckaudit.errors import EngineError, UsageError
from ckaudit.perplexity import data, faults, references
from ckaudit.perplexity.compare import compare
from ckaudit.perplexity.encode import Encoded, Encoder
from ckaudit.perplexity.journal import Journal
from ckaudit.perplexity.processor import load_processor, pixel_limits
from ckaudit.perplexity.score import load_model, score_rows
from ckaudit.perplexity.server import Server
from ckaudit.progress import Progress
from ckaudit.scores import Drift, Outcome, Planted, PplOptions, RowScore, Score, Settings, Skipped, perplexity


class Repo(msgspec.Struct, frozen=True):
    """Where a target's files lie, and a text that changes when they do."""

    name: str
    folder: Path
    identity: str


def run(
    repo: Repo, options: PplOptions, progress: Progress, *, candidate: Repo | None = None, cache: Path | None = None
) -> Outcome:
    """Score `repo` as `options` say, and `candidate` where another one is compared with it.

    Rows of an interrupted run are kept in the folder `cache`, and used again while nothing that the number depends on has changed.
    Raises CkauditError: no such data, a reference made on other rows, a model that does not load, a server without log-probabilities.
    """
    if options.save_reference is not None and not options.save_reference.absolute().parent.is_dir():
        raise UsageError(f"{options.save_reference} cannot be written: its folder does not exist.", "Make it first.")
    compared = bool(candidate or options.candidate_settings)
    if options.against and compared:
        raise UsageError("A server and a candidate are two comparisons.", "Give --against or --candidate…, not both.")
    if options.save_reference is not None and (options.against or compared):
        raise UsageError(
            "A reference is the target's own score, and here another side is under test.",
            "Keep it first, in a run with --save-reference alone; then compare with --reference.",
        )
    side = _Side(repo, options, progress, cache)
    rows = data.load(options.data, options.rows)
    kept = references.entry(options.reference, options.entry or repo.name) if options.reference else None
    tolerance = (
        options.tolerance if options.tolerance is not None else kept.tolerance if kept else references.DEFAULT_TOLERANCE
    )
    reason = options.tolerance_reason or (kept.tolerance_reason if kept and options.tolerance is None else "")

    drifts: list[Drift] = []
    reference: Score | None
    if options.against:
        score = _serve(side, rows, options, drifts)  # first: a server that is not there or cannot tell is known at once
        reference = kept.score if kept else side.score(rows, options.settings)
    elif compared:
        reference = kept.score if kept else side.score(rows, options.settings)
        other = _Side(candidate, options, progress, cache) if candidate else side
        score = other.score(rows, options.candidate_settings or options.settings)
    else:
        reference = kept.score if kept else None
        score = side.score(rows, options.settings)
    outcome = Outcome(
        score=score,
        reference=reference,
        comparison=compare(reference, score, tolerance, reason) if reference else None,
        drifts=tuple(drifts),
        faults=tuple(side.prove(rows, options.settings, tolerance)) if options.prove else (),
    )
    if options.save_reference:
        save_reference(options.save_reference, options.entry or repo.name, outcome, options)
    return outcome


class _Side:
    """One repo: its processor, and its model once one is needed."""

    def __init__(self, repo: Repo, options: PplOptions, progress: Progress, cache: Path | None) -> None:
        self.repo, self.progress, self.cache = repo, progress, cache
        self.processor = load_processor(repo.folder, min_pixels=options.min_pixels, max_pixels=options.max_pixels)
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
            with self.progress.task(f"loading {self.repo.name}"):
                self._model = (settings, load_model(self.repo.folder, settings))
        return self._model[1]

    def score(self, rows: data.DataSet, settings: Settings) -> Score:
        encoded, skipped = self.encode(rows)
        facts = self.settings(settings)
        key = (self.repo.identity, rows.hash, msgspec.json.encode(facts).decode(), *versions().values())
        journal = Journal(self.cache, key) if self.cache else None
        began = time.monotonic()

        def fresh(left: list[Encoded]) -> Iterator[RowScore]:
            return score_rows(self.model(settings), self.encoder, left, settings)

        scored = _watch(
            journal.score(encoded, fresh) if journal else fresh(encoded), len(encoded), self.repo.name, self.progress
        )
        by_id = {row.id: row for row in scored}
        if journal:
            journal.finish()
        done = tuple(by_id[e.row.id] for e in encoded)
        return make(self.repo.name, done, skipped, rows, facts, time.monotonic() - began)

    def settings(self, settings: Settings) -> dict[str, Any]:
        facts = msgspec.to_builtins(settings)
        return {**facts, "template_hash": self.encoder.template_hash, **pixel_limits(self.processor)}

    def prove(self, rows: data.DataSet, settings: Settings, tolerance: float) -> Iterator[Planted]:
        """Plant every fault in turn and score again through the same pipeline."""
        encoded, skipped = self.encode(rows)
        model = self.model(settings)

        def score(label: str) -> Score:
            watched = _watch(
                score_rows(model, self.encoder, encoded, settings), len(encoded), self.repo.name, self.progress
            )
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


def _serve(side: _Side, rows: data.DataSet, options: PplOptions, drifts: list[Drift]) -> Score:
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
    return {"ckaudit": __version__, **{name: version(name) for name in ("torch", "transformers")}}


def save_reference(path: Path, name: str, outcome: Outcome, options: PplOptions) -> None:
    """Keep the outcome's score as the reference `name`. Raises UsageError for a score that is no reference: not finite."""
    if outcome.score.perplexity is None:
        raise UsageError("A score that is not finite cannot be a reference.", "See the findings.")
    tolerance = references.DEFAULT_TOLERANCE if options.tolerance is None else options.tolerance
    references.save(
        path,
        name,
        references.Entry(score=outcome.score, tolerance=tolerance, tolerance_reason=options.tolerance_reason),
    )
