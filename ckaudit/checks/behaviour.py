"""CK60x: what a model does once it is loaded. Pure functions over the `load` and `forward` sections of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ckaudit.findings import Blame, Check, Finding, Skip, finding
from ckaudit.naming import printable

LOAD_RAISES = Check("CK601", "the load raises", "error")
FORWARD_RAISES = Check("CK602", "the forward pass raises", "error")
NOT_FINITE = Check("CK603", "the output is not finite", "error")
HIDDEN = Check("CK604", "NaN that the output hides", "warning")
NO_EFFECT = Check("CK605", "input without effect", "error")
DIFFERS = Check("CK606", "fingerprint differs", "error")
DISAGREES = Check("CK607", "engine and replay disagree", "error")
_WEIGHTS = frozenset({"CK501", "CK502", "CK503", "CK504"})
"""Faults of values that a strange output can come from."""
CHECKS = (LOAD_RAISES, FORWARD_RAISES, NOT_FINITE, HIDDEN, NO_EFFECT, DIFFERS, DISAGREES)


class Comparison(msgspec.Struct, frozen=True):
    """One fingerprint beside the expected one. `difference` is the largest of its logits, relative to the largest expected one."""

    kind: str
    matched: bool
    difference: float | None
    wanted: str
    found: str


def run(
    load: Mapping[str, Any] | None,
    forward: Mapping[str, Any] | None,
    *,
    engine: str = "transformers",
    values: Iterable[Finding] = (),
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """Findings on behaviour, and what could not be judged. `load["error"]` counts where `load["blame"]` is the checkpoint's.

    `values` is what the values of the weights gave: an output is held against the checkpoint where they are at fault.
    """
    weights: Blame = (
        "checkpoint" if any(f.check in _WEIGHTS and f.severity != "note" for f in values) else "undecidable"
    )
    findings: list[Finding] = []
    skips: list[Skip] = []
    if load is not None and load.get("error") and load.get("blame") == "checkpoint":
        findings.append(
            _finding(
                LOAD_RAISES,
                engine,
                f"from_pretrained raises: {printable(load['error'])}",
                "`ckaudit names` says whether it is the tensors or the config.",
                blame="undecidable",
            )
        )
    if forward is None:
        return tuple(findings), tuple(skips)
    for one in forward.get("runs", ()):
        findings += _judge(one, engine, weights)
        if one["status"] == "not_run":
            reason = f"{one['kind']} input: {printable(one['reason'] or '')}"
            skips += [Skip(c.id, reason, engine) for c in (FORWARD_RAISES, NOT_FINITE)]
    findings += [_left_out(kind, engine) for kind in forward.get("left_out_by_template", ())]
    compared = forward.get("expect")
    if compared is not None:
        findings += [_differs(c, engine) for c in compared["runs"] if not c["matched"]]
        skips += [
            Skip(DIFFERS.id, f"{kind} input: {printable(why)}", engine) for kind, why in compared["reasons"].items()
        ]
    return tuple(findings), tuple(skips)


def compare(
    forward: Mapping[str, Any], expected: Mapping[str, Mapping[str, Any]], tolerance: float, *, partial: bool = False
) -> dict[str, Any]:
    """The `expect` section: each run's fingerprint beside `expected[kind]`. An id may differ where its logit is near enough.

    What was made of another input (another seed or length, a processor in place of the config), or by a model of which only some shards
    were loaded (`partial`), is not compared: `missing` lists the kinds, `reasons` why.
    """
    compared, reasons = [], {}
    runs = {one["kind"]: one for one in forward["runs"]}
    for kind in dict.fromkeys((*runs, *expected)):
        one, wanted = runs.get(kind, {}), expected.get(kind)
        found = one.get("fingerprint")
        if wanted is None:
            reasons[kind] = "nothing is expected of it"
        elif found is None:
            reasons[kind] = "no fingerprint to compare"
        elif partial:
            reasons[kind] = "only some shards were loaded"
        elif other := _otherwise(_made(one, forward), wanted.get("made", {})):
            reasons[kind] = other
        else:
            compared.append(msgspec.to_builtins(_compare(kind, found, wanted, tolerance)))
    return {
        "matched": all(c["matched"] for c in compared) and not reasons,
        "tolerance": tolerance,
        "runs": compared,
        "missing": list(reasons),
        "reasons": reasons,
    }


def fingerprints(document: Any) -> dict[str, Mapping[str, Any]]:
    """Fingerprints by kind of input, from a report, a `forward` section or a plain `{kind: {"ids": …, "logits": …}}`. Empty if none.

    Those of a report say how their input was `made`.
    """
    if isinstance(document, dict):
        document = document.get("forward", document)
    runs = document.get("runs") if isinstance(document, dict) else None
    if not isinstance(runs, list):
        pairs = list(document.items()) if isinstance(document, dict) else []
        return {str(kind): found for kind, found in pairs if _is_fingerprint(found)}
    told = [one for one in runs if isinstance(one, dict) and _is_fingerprint(one.get("fingerprint"))]
    return {
        str(one.get("kind")): one["fingerprint"] | ({"made": made} if (made := _made(one, document)) else {})
        for one in told
    }


def _made(one: Mapping[str, Any], forward: Mapping[str, Any]) -> dict[str, Any]:
    """How the input of a run was made, as far as it is told."""
    told = {"seed": forward.get("seed"), "inputs_from": one.get("inputs_from"), "inputs": one.get("inputs")}
    return {key: value for key, value in told.items() if value is not None}


def _otherwise(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """How two inputs differ in what both tell; empty where they do not."""
    for key, word in (("inputs_from", "made from the {}"), ("seed", "of seed {}")):
        if key in ours and key in theirs and ours[key] != theirs[key]:
            return f"the input is {word.format(ours[key])}, the expected one was {word.format(theirs[key])}"
    shapes, wanted = ours.get("inputs"), theirs.get("inputs")
    if isinstance(shapes, dict) and isinstance(wanted, dict):
        for name in (*shapes, *wanted):
            if shapes.get(name) != wanted.get(name):
                return f"the input's {name} is {_shape(shapes.get(name))}, the expected one's was {_shape(wanted.get(name))}"
    return ""


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) if isinstance(shape, list) else "not there"


def _is_fingerprint(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    ids, logits = found.get("ids"), found.get("logits")
    numbers = isinstance(logits, list) and all(v is None or isinstance(v, int | float) for v in logits)
    if not (isinstance(ids, list) and numbers and len(ids) == len(logits or ()) > 0):
        return False
    return all(isinstance(i, int) for i in ids) and len(set(ids)) == len(ids)


def _compare(kind: str, found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float) -> Comparison:
    shown = {"wanted": _shown(wanted), "found": _shown(found)}
    numbers = [*found["logits"], *wanted["logits"]]
    if any(v is None for v in numbers) or len(found["logits"]) != len(wanted["logits"]):
        return Comparison(kind, False, None, **shown)
    scale = max(abs(v) for v in wanted["logits"]) or 1.0
    difference = max(abs(a - b) for a, b in zip(found["logits"], wanted["logits"], strict=True)) / scale
    # Two ids whose logits are nearer than the tolerance may change places, and some of the last may be others that are as large. Where most
    # are others it is another output, however near its numbers are.
    last = wanted["logits"][-1]
    ours = dict(zip(found["ids"], found["logits"], strict=True))
    theirs = dict(zip(wanted["ids"], wanted["logits"], strict=True))
    most = len(ours.keys() & theirs.keys()) > len(theirs) / 2
    ids_fit = most and all(
        (abs(ours[i] - v) if i in ours else abs(v - last)) / scale <= tolerance for i, v in theirs.items()
    )
    return Comparison(kind, difference <= tolerance and ids_fit, difference, **shown)


def _judge(one: Mapping[str, Any], engine: str, weights: Blame) -> list[Finding]:
    kind = one["kind"]
    if one["status"] == "raised":
        message = f"The forward pass on {kind} input raises: {printable(one['reason'])}"
        return [
            _finding(
                FORWARD_RAISES, engine, message, "Run the same input in transformers to see where.", blame="undecidable"
            )
        ]
    if one["status"] == "ignored":
        message = f"The model takes {kind} input, and no part of it looks at it."
        return [
            _finding(
                NO_EFFECT,
                engine,
                message,
                f"Set {kind}_token_id in config.json to the placeholder's id.",
                blame="config",
            )
        ]
    if one["status"] != "ran":
        return []
    before = []
    if "processor" in one.get("raised_from", ()):
        message = f"The model raises on {kind} input from the repo's {printable(one['reason'] or 'processor')}"
        mend = "Compare the processor's and the tokenizer's files with the config: token ids, patch and image sizes."
        before = [_finding(FORWARD_RAISES, engine, message, mend, blame="config")]
    if "processor" in one.get("ignored_from", ()):
        message = f"The model does not look at {kind} input as the repo's processor makes it."
        mend = f"Set {kind}_token_id in config.json to the id of the processor's placeholder."
        before = [_finding(NO_EFFECT, engine, message, mend, blame="config")]
    return [*before, *_judge_output(one, engine, weights)]


def _judge_output(one: Mapping[str, Any], engine: str, weights: Blame) -> list[Finding]:
    kind = one["kind"]
    first = one.get("first_non_finite")
    where = f"{printable(first['module'] or 'the model')} ({first['class']})" if first else ""
    if not one["finite"]:
        place = f"; the first is {where}" if first else ""
        message = f"The output for {kind} input holds NaN or Inf{place}."
        mend = "Look at the values of that module's tensors (CK501)."
        if weights == "undecidable":
            mend = (
                "Where the weights are finite (CK501), try --dtype bfloat16, for float16 overflows; "
                "else compare the config's scales, epsilons and rope settings with the original's."
            )
        names = (first["module"],) if first else ()
        return [_finding(NOT_FINITE, engine, message, mend, names=names, blame=weights)]
    if first and first["nan"]:
        message = f"{where} gives NaN for {kind} input, and the output does not show it."
        return [
            _finding(
                HIDDEN,
                engine,
                message,
                "Look at the values of that module's tensors (CK501).",
                names=(first["module"],),
                blame=weights,
            )
        ]
    if (one.get("fingerprint") or {}).get("flat"):
        message = f"At every position, all entries of the output are the same for {kind} input."
        mend = "A weight on the way is zero or constant (CK502, CK503), or a scale in the config is zero."
        return [_finding(NO_EFFECT, engine, message, mend, blame=weights)]
    return []


def _left_out(kind: str, engine: str) -> Finding:
    message = f"The repo's chat template has no place for {kind} input: a chat that sends one is answered from its text alone, or refused."
    mend = f"Let the template write the placeholder of {kind} input where a message has a part of type {kind}."
    return _finding(NO_EFFECT, engine, message, mend, blame="config", severity="warning")


def _differs(compared: Mapping[str, Any], engine: str) -> Finding:
    by = "" if compared["difference"] is None else f" by {compared['difference']:.2%}"
    message = f"The fingerprint for {compared['kind']} input differs from the expected one{by}."
    mend = "Load the revision, dtype and attention that the expected one was made with; else a weight has changed."
    return _finding(
        DIFFERS, engine, message, mend, blame="undecidable", wanted=compared["wanted"], found=compared["found"]
    )


def disagreement(engine: str, predicted: str, live: str, error: str | None) -> Finding | None:
    """The finding for an engine whose own load ended otherwise than its replay said; None where they agree."""
    if predicted == live:
        return None
    message = f"The replay of {engine} says {predicted}, the engine itself {live}" + (
        f": {printable(error)}" if error else "."
    )
    return _finding(
        DISAGREES,
        engine,
        message,
        "Please report this: the engine is right, ckaudit is wrong.",
        blame="undecidable",
        wanted=live,
        found=predicted,
    )


def _shown(fingerprint: Mapping[str, Any]) -> str:
    logits = ", ".join("NaN" if v is None else f"{v:.4g}" for v in fingerprint["logits"])
    return f"ids {', '.join(map(str, fingerprint['ids']))}; logits {logits}"


def _finding(check: Check, engine: str, message: str, mend: str, *, names: Sequence[str] = (), **more: Any) -> Finding:
    return finding(check, message, names, engine=engine, mend=mend, count=max(1, len(names)), **more)
