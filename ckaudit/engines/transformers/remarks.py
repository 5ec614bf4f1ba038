"""What the loader accepts in silence, and why it passes over what it does: facts for the checks, in the plan's notes and reasons."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from ckaudit.engines import Job
from ckaudit.engines.transformers.classes import raw_config
from ckaudit.engines.transformers.tensors import dtype_name
from ckaudit.header import FLOATS
from ckaudit.plan import Mismatch, NameFate, Note

if TYPE_CHECKING:
    from ckaudit.engines.transformers.fates import View

_DRAFT = re.compile(r"(^|\.)(mtp|mtp_layers|mtp_block|nextn|nextn_predict_layers|draft_model)\.")
_COMPUTED = re.compile(r"(^|\.)(rotary\w*\.inv_freq|position_ids)$")
_DOUBLED = re.compile(r"(?:^|(?<=\.))((?:[A-Za-z_]\w*\.)+?)\1")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def stray_by_design(name: str, config: Any) -> str | None:
    """Why it is meant that the model has no place for `name`; None when it is not."""
    if _COMPUTED.search(name):
        return "computed: transformers derives it from the config"
    if _DRAFT.search(name):
        return "draft model (multi-token prediction): transformers does not build it"
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    layers, extra = getattr(text, "num_hidden_layers", None), getattr(text, "num_nextn_predict_layers", None)
    match = _LAYER.search(name)
    if match and isinstance(layers, int) and isinstance(extra, int) and layers <= int(match[1]) < layers + extra:
        return "draft model (num_nextn_predict_layers): transformers does not build it"
    return None


def ignored_because(model: Any, name: str) -> str:
    """Which of the model's own lists makes the loader pass over `name` without a word."""
    for pattern in sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()):
        if re.search(pattern, name):
            return f"{type(model).__name__} lists it to be ignored ({pattern})"
    return "computed: transformers derives it from the config"


def missing_because(model: Any, name: str) -> str:
    """Which of the model's own lists lets `name` be missing without a word."""
    for pattern in sorted(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()):
        if re.search(pattern, name):
            return f"{type(model).__name__} lists it as not stored ({pattern})"
    return f"{type(model).__name__} lets it be missing"


def tied_pairs(view: View) -> list[tuple[str, str]]:
    """Pairs that the config ties although the checkpoint fills both."""
    return [(a, b) for a, b in view.record.tied.items() if a != b and view.accepted(a) and view.accepted(b)]


def notes(job: Job, chosen: Any, view: View, names: tuple[NameFate, ...]) -> tuple[Note, ...]:
    return (
        Note(kind="class", text=f"built {chosen.cls.__name__}, chosen by {chosen.how}"),
        *_config_notes(job, chosen, view),
        *_tied_notes(view),
        *_doubled_notes(names),
        *_gap_notes(view, names),
        *_cast_notes(view),
        *_unchecked_notes(view),
    )


def _config_notes(job: Job, chosen: Any, view: View) -> list[Note]:
    import transformers

    raw = raw_config(job)
    out, said = [], raw.get("transformers_version")
    try:
        if isinstance(said, str) and Version(Version(said).base_version) > Version(transformers.__version__):
            text = f"config.json was written by transformers {said}, newer than {transformers.__version__}: unknown keys are ignored"
            out.append(Note(kind="config-newer", text=text))
    except InvalidVersion:
        pass
    if chosen.named is not None:
        own = type(chosen.config).__name__
        text = f"config.json is a {chosen.named} by its model_type, but {chosen.cls.__name__} reads it as a {own}"
        out.append(Note(kind="config-class", text=text))
    method = (
        raw.get("quantization_config", {}).get("quant_method")
        if isinstance(raw.get("quantization_config"), dict)
        else None
    )
    if method is not None and view.record.quantizer is None:
        text = f"transformers does not know quant_method {method!r}: it warns and loads as if nothing were quantised"
        out.append(Note(kind="unknown-quantization", text=text))
    if getattr(getattr(view.record.quantizer, "quantization_config", None), "dequantize", False):
        text = f"{method} weights are turned back into full precision: transformers does not compute with them as they are here"
        out.append(Note(kind="dequantized", text=text))
    return out


def _tied_notes(view: View) -> list[Note]:
    return [
        Note(
            kind="tied-both-stored",
            text=f"{a} is tied to {b}, and both are stored",
            names=view.sources_of[a] + view.sources_of[b],
        )
        for a, b in tied_pairs(view)
    ]


def _doubled_notes(names: tuple[NameFate, ...]) -> list[Note]:
    """Names whose doubled prefix the loader took off without a word, by its rule for base models."""
    found: dict[str, list[str]] = {}
    for fate in names:
        last = fate.chain[-1] if fate.chain else None
        if fate.fate != "loaded" or last is None or last.rule != "base prefix":
            continue
        match = _DOUBLED.match(last.before)
        if match is not None and last.after is not None and len(last.after) < len(last.before):
            found.setdefault(match[1], []).append(fate.name)
    return [
        Note(
            kind="doubled-prefix",
            text=f"the prefix {p}{p} is doubled; transformers takes one off in silence",
            names=tuple(n),
        )
        for p, n in found.items()
    ]


def _gap_notes(view: View, names: tuple[NameFate, ...]) -> list[Note]:
    """Stacks whose names do not count from 0 without a gap: the loader stacks them in order and never looks at the numbers."""
    before = {fate.name: fate.chain[-1].before for fate in names if fate.chain}
    out = []
    for group in view.record.groups:
        for pattern in group.patterns if group.converter else ():
            if "*" not in pattern:
                continue
            number = re.compile(re.sub(r"\.?\*\\?\.", r".(\\d+).", pattern, count=1).replace("..(", ".("))
            members = [source for source, p in group.sources if p == pattern]
            found = [match and int(match[1]) for match in (number.search(before.get(m, m)) for m in members)]
            if None in found or found == list(range(len(found))):
                continue
            text = (
                f"{group.target} is stacked from {len(found)} tensors numbered {_ranges(found)}: slot and number differ"
            )
            out.append(Note(kind="expert-gap", text=text, names=tuple(members)))
    return out


def _ranges(numbers: list[Any]) -> str:
    """`0-2, 5`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _kind(dtype: str) -> str:
    if dtype in FLOATS:
        return "float"
    if dtype.startswith(("F8", "F6", "F4")):
        return "small float"
    return "complex" if dtype == "C64" else "integer"


def _plain(view: View) -> list[tuple[str, str, str, str]]:
    """(checkpoint name, parameter, stored dtype, loaded dtype) of every tensor that went in alone, with another dtype.

    A conversion of a quantisation method that has but one tensor to work on (its scale is not stored) does what a plain cast does.
    """
    out = []
    for group in view.record.groups:
        if len(group.outputs) != 1 or (group.converter and len(group.sources) != 1):
            continue
        target, (names, _) = next(iter(group.outputs.items()))
        stored = view.record.fed.specs[names[0]].dtype if len(names) == 1 else None
        if stored is None or not view.accepted(target) or names[0] in view.record.fed.odd:
            continue
        if (loaded := dtype_name(view.record.written[target])) != stored:
            out.append((names[0], target, stored, loaded))
    return out


def kind_mismatches(view: View) -> list[Mismatch]:
    """Casts between kinds of numbers, which the loader makes without a word: bytes of int8 or fp8 are no bf16 weights."""
    return [
        Mismatch(kind="dtype", parameter=target, names=(name,), wanted=loaded, found=stored)
        for name, target, stored, loaded in _plain(view)
        if _kind(stored) != _kind(loaded)
    ]


def _cast_notes(view: View) -> list[Note]:
    found: dict[tuple[str, str], list[str]] = {}
    for name, _, stored, loaded in _plain(view):
        if _kind(stored) == _kind(loaded):
            found.setdefault((stored, loaded), []).append(name)
    return [
        Note(kind="dtype-cast", text=f"stored as {a}, loaded as {b}", names=tuple(names))
        for (a, b), names in sorted(found.items())
    ]


def _unchecked_notes(view: View) -> list[Note]:
    """Shapes that do not fit and that the loader does not look at, as a quantisation method is at work."""
    wrong = [n for n in view.record.reshaped if view.accepted(n)]
    names = tuple(source for target in wrong for source in view.sources_of.get(target, ()))
    text = "under this quantisation method transformers does not compare shapes: these differ from the parameter's"
    return [Note(kind="shape-unchecked", text=text, names=names)] if wrong else []
