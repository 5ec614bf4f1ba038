"""CK903 to CK906, CK908: what an adapter tells without a base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckaudit.adapters import Adapter, Unit, shapes
from ckaudit.adapters.binding import Binding
from ckaudit.checks.adapters.rows import (
    DOUBLED,
    EMPTY,
    PAIR,
    SHAPE,
    finding,
    names_of,
)
from ckaudit.checks.case import many
from ckaudit.findings import Finding
from ckaudit.naming import printable


def alone(adapter: Adapter) -> Iterator[Finding]:
    if not adapter.checkpoint.tensors:
        yield from _empty(adapter)
    yield from _doubled(adapter)
    yield from _pairs(adapter)
    for fault in shapes.alone(adapter):
        yield _faulty(adapter, fault)


def _faulty(adapter: Adapter, fault: shapes.Fault) -> Finding:
    return finding(
        adapter,
        SHAPE,
        fault.message,
        fault.names,
        mend=fault.mend,
        wanted=fault.wanted,
        found=fault.found,
        blame=fault.blame,
    )


def _empty(adapter: Adapter) -> Iterator[Finding]:
    files = adapter.checkpoint.files
    if adapter.checkpoint.shards or any(p.rpartition("/")[2].startswith("adapter_model") for p in files):
        return  # a file that is not read, or that is broken, is told elsewhere
    about = f"{adapter.method}, r {adapter.rank}" if adapter.rank is not None else adapter.method
    yield finding(
        adapter, EMPTY, f"There is an adapter's configuration ({printable(about)}) and no file with its weights: nothing can be loaded.",
        mend="Upload adapter_model.safetensors beside adapter_config.json.", wanted="adapter_model.safetensors",
        found="adapter_config.json alone",
    )  # fmt: skip


def _doubled(adapter: Adapter) -> Iterator[Finding]:
    groups: dict[str, list[Unit]] = {}
    for unit in adapter.units:
        if unit.parts[0].doubled:
            groups.setdefault(unit.parts[0].doubled, []).append(unit)
    for prefix, units in groups.items():
        names, text = names_of(units), printable(prefix)
        yield finding(
            adapter, DOUBLED, f"{many(len(names), 'name')} begin with `{text}` twice: no module is called so.", names,
            mend=f"Take one `{text}` off the front of the names.", wanted=printable(names[0].replace(prefix * 2, prefix, 1)),
            found=printable(names[0]),
        )  # fmt: skip


def _pairs(adapter: Adapter) -> Iterator[Finding]:
    if adapter.method != "LORA":
        return
    single = [u for u in adapter.modules if bool(u.of("A")) != bool(u.of("B"))]
    if single:
        lacking = "B" if single[0].of("A") else "A"
        yield finding(
            adapter, PAIR, f"{many(len(single), 'module')} of {len(adapter.modules)} with one factor alone, such as "
            f"`{printable(single[0].path)}`, which has no {lacking}: it adapts nothing.", names_of(single),
            mend="Save the adapter again; look for a file that was cut short or a shard that is missing.",
            wanted="A and B of every module", found=printable(single[0].names[0]),
        )  # fmt: skip
    bare = [u for u in adapter.modules if u.of("A") and u.of("B") and not u.of("magnitude")]
    dora = any(u.of("magnitude") for u in adapter.modules) or bool((adapter.config or {}).get("use_dora"))
    if dora and bare:
        yield finding(
            adapter, PAIR, f"{many(len(bare), 'module')} of {len(adapter.modules)} without the magnitude vector that DoRA needs.",
            names_of(bare), mend="Save the adapter again, or take `use_dora` out if it was trained without.",
            wanted=f"{printable(bare[0].path)}.lora_magnitude_vector", found=printable(bare[0].names[0]),
        )  # fmt: skip


def fits(adapter: Adapter, judged: Sequence[Binding]) -> Iterator[Finding]:
    """Shapes against the base, told once: they are the same whoever loads it."""
    faults = next((b.faults for b in judged if b.faults), ())
    return (_faulty(adapter, fault) for fault in faults)
