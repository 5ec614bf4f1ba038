"""Ranks and shapes of adapter tensors, among themselves, against the configuration and against the base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Literal

import msgspec

from ckaudit.adapters import Adapter, Unit, peft
from ckaudit.adapters.dialects import FUSED, Part
from ckaudit.adapters.surface import Surface
from ckaudit.naming import printable

Shape = tuple[int, ...]


class Fault(msgspec.Struct, frozen=True):
    """Tensors that are wrong in one way."""

    message: str
    names: tuple[str, ...]
    wanted: str
    found: str
    mend: str
    blame: Literal["checkpoint", "config"] = "checkpoint"


def _shape(adapter: Adapter, part: Part) -> Shape | None:
    return adapter.checkpoint.tensors[part.name].shape


def alone(adapter: Adapter) -> Iterator[Fault]:
    """What shapes tell without a base."""
    if adapter.method != "LORA":
        return
    factors = [(p, s) for u in adapter.modules for p in u.of("A", "B") if (s := _shape(adapter, p)) is not None]
    broken = [(p, s) for p, s in factors if len(s) < 2 or 0 in s]
    if broken:
        part, shape = broken[0]
        yield Fault(
            f"{len(broken)} of {len(factors)} factors have no two sides, or a side of no length, such as `{printable(part.name)}` "
            f"with {list(shape)}: a trainer that spreads parameters over ranks (ZeRO-3, FSDP) saved one rank's part.",
            tuple(p.name for p, _ in broken), "two sides, one of them the rank", str(list(shape)),
            "Gather the parameters before saving (stage3_gather_16bit_weights_on_model_save, or the trainer's own save_model).",
        )  # fmt: skip
    bad = {p.name for p, _ in broken}
    whole = [u for u in adapter.modules if u.of("A") and u.of("B") and not bad & set(u.names)]
    yield from _uneven(adapter, whole)
    yield from _off_rank(adapter, whole)


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def rank(adapter: Adapter, part: Part) -> int | None:
    """The side of a factor that is the rank: the first of A, the second of B; None where the header is not known."""
    shape = _shape(adapter, part)
    return None if shape is None or len(shape) < 2 else shape[0] if part.role == "A" else shape[1]


def ranks(adapter: Adapter) -> list[int]:
    """The ranks of all first factors; of fused experts, whose factors hold every expert's, none."""
    plain = (u for u in adapter.modules if not FUSED.fullmatch(u.path))
    return [r for u in plain for p in u.of("A") if (r := rank(adapter, p)) is not None]


def _uneven(adapter: Adapter, units: list[Unit]) -> Iterator[Fault]:
    if adapter.dialect == "xlabs":
        return
    found = [
        u
        for u in units
        if not u.of("mid") and len({r for p in u.of("A", "B") if (r := rank(adapter, p)) is not None}) > 1
    ]
    if found:
        a, b = found[0].of("A")[0], found[0].of("B")[0]
        yield Fault(
            f"A and B of {_many(len(found), 'module')} differ in rank, such as those of `{printable(found[0].path)}`.",
            tuple(n for u in found for n in u.names), f"rank {rank(adapter, a)} as in {printable(a.name)}",
            f"rank {rank(adapter, b)} in {printable(b.name)}", "Take both factors from one training run.",
        )  # fmt: skip


def _off_rank(adapter: Adapter, units: list[Unit]) -> Iterator[Fault]:
    """PEFT builds factors of the rank that the configuration says, and raises for others."""
    config = adapter.config or {}
    if adapter.rank is None or config.get("use_qalora"):
        return
    off: dict[tuple[int, int], list[Unit]] = {}
    for unit in units:
        if "experts" in unit.path.split("."):
            continue
        said = peft.pattern_value(config.get("rank_pattern"), unit.path)
        wanted = said if isinstance(said, int) else adapter.rank
        held = rank(adapter, unit.of("A")[0])
        if held is not None and held != wanted:
            off.setdefault((wanted, held), []).append(unit)
    for (wanted, held), found in off.items():
        yield Fault(
            f"{len(found)} of {_many(len(adapter.modules), 'module')} have rank {held} where adapter_config.json says {wanted}, such as "
            f"`{printable(found[0].path)}`: PEFT raises, and other software scales the adapter wrongly.",
            tuple(n for u in found for n in u.names), f"rank {wanted}", f"rank {held}",
            f'Set "r": {held}.' if len(found) == len(units) else 'Name these modules with their rank in "rank_pattern".', "config",
        )  # fmt: skip


def on_base(adapter: Adapter, weights: Iterable[tuple[Unit, Shape, bool]]) -> Iterator[Fault]:
    """Factors that do not fit the module that they bind to: each unit with the shape of its weight, and whether that may be transposed."""
    if adapter.method != "LORA" or (adapter.config or {}).get("use_qalora"):
        return
    swapped = bool((adapter.config or {}).get("fan_in_fan_out"))
    found = [
        misfit
        for unit, weight, turned in weights
        if len(weight) >= 2 and unit.parts[0].dialect != "xlabs"
        for misfit in _misfits(adapter, unit, weight, turned or swapped)
    ]
    if found:
        part, wanted, held = found[0]
        yield Fault(
            f"{_many(len(found), 'tensor')} of the wrong size for the module, such as `{printable(part.name)}`: the adapter is of another "
            "base, or of another size of it.", tuple(p.name for p, _, _ in found), wanted, held,
            "Give the base that the adapter was trained on.",
        )  # fmt: skip


def replaced(adapter: Adapter, surface: Surface) -> Iterator[Fault]:
    """Tensors that replace whole ones of the base and are of another size than those."""
    found = [
        (part, weight, shape)
        for unit in adapter.replaced
        for part in unit.of("full")
        if part.leaf.endswith("weight")
        and (weight := surface.modules.get(unit.path)) is not None
        and (shape := _shape(adapter, part)) not in (None, weight)
    ]
    if found:
        part, weight, shape = found[0]
        rows = shape is not None and len(shape) == len(weight) == 2 and shape[1] == weight[1]
        yield Fault(
            f"{_many(len(found), 'tensor')} of another size than what they replace, such as `{printable(part.name)}`: PEFT raises.",
            tuple(p.name for p, _, _ in found), str(list(weight)), str(list(shape or ())),
            f"Give the base as many rows before: model.resize_token_embeddings({shape[0]})." if rows and shape
            else "Give the base that the adapter was trained on.",
        )  # fmt: skip


def _misfits(adapter: Adapter, unit: Unit, weight: Shape, turn: bool) -> Iterator[tuple[Part, str, str]]:
    out, inner = weight[0], weight[1]
    for part in unit.parts:
        shape = _shape(adapter, part)
        if shape is None or 0 in shape:
            continue
        embedding = "embedding" in part.leaf
        if part.role in ("A", "B") and len(shape) >= 2:
            side, held = (shape[1] if part.role == "A" else shape[0]), part.role
            wanted = {inner if held == "A" else out} if not embedding else {out if held == "A" else inner}
            if turn and not embedding:
                wanted = {out, inner}
            if held == "A" and len(weight) > 2:
                continue  # grouped convolutions keep fewer inputs in the weight than the factor has
            if side not in wanted:
                yield (
                    part,
                    f"{' or '.join(map(str, sorted(wanted)))} {'inputs' if held == 'A' else 'outputs'}",
                    str(list(shape)),
                )
        elif part.leaf == "lora_magnitude_vector" and not embedding and not turn and len(weight) == 2:
            plain = bool(unit.of("A")) and "embedding" not in unit.of("A")[0].leaf
            if plain and prod(shape) != out:
                yield part, f"{out} elements", str(list(shape))
