"""What a load took, what the forward pass gave, and how large the weights of each layer are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ckaudit.report.terminal.layout import grid, label, many, prose, safe, size

SHOWN = 24
"""Lines of the chart, unless all are asked for."""
_BAR = 24
_MARK = {"complete": ("✓", "bold green"), "partial": ("!", "bold yellow")}


def load(
    section: dict[str, Any], forward: dict[str, Any] | None, layers: Iterable[Any], *, verbose: bool
) -> Iterator[RenderableType]:
    """The `load` and `forward` sections of a report, and a chart of `layers` (`materialize.stats.Layer`)."""
    yield from _loaded(section, verbose=verbose)
    if forward is not None and forward.get("runs"):
        yield ""
        yield from _forward(forward)
    shown = list(layers)
    if shown:
        yield ""
        yield from _chart(shown, verbose=verbose)


def _loaded(section: dict[str, Any], *, verbose: bool) -> Iterator[RenderableType]:
    status = section["status"]
    mark, style = _MARK.get(status, ("✗", "bold red"))
    line = Text(f"{mark} load {status.replace('_', ' ')}", style=style)
    facts = []
    if section.get("bytes") is not None and section.get("seconds"):
        speed = f" ({section['gb_per_s']:.1f} GB/s)" if section["gb_per_s"] >= 0.05 else ""
        facts.append(f"{size(section['bytes'])} in {section['seconds']:.2f} s{speed}")
    if section.get("device_name") or section.get("device"):
        devices = section.get("devices") or 1
        facts.append(
            safe(f"{section.get('device_name') or section['device']}" + (f" x {devices}" if devices > 1 else ""))
        )
    if section.get("dtype"):
        facts.append(safe(section["dtype"]))
    if section.get("peak_bytes"):
        facts.append(f"memory {size(section.get('steady_bytes') or 0)}, peak {size(section['peak_bytes'])}")
    yield line.append("  " + " · ".join(facts), style="not bold default")
    if section.get("error"):
        yield Text(f"    {safe(section['error'])}", style="red")
    stages = {k: v for k, v in (section.get("stages") or {}).items() if v >= 0.05}
    if verbose and stages:
        yield Text("    " + " · ".join(f"{safe(k)} {v:.2f} s" for k, v in stages.items()), style="dim")


def _forward(forward: dict[str, Any]) -> Iterator[RenderableType]:
    table = grid("forward", "result", "output", "takes", "last position")
    for run in forward["runs"]:
        if run["status"] != "ran":
            table.add_row(
                safe(run["kind"]), Text(safe(run["status"]), style="magenta"), safe(run.get("reason") or ""), "", ""
            )
            continue
        finite = run["finite"]
        where = (run.get("first_non_finite") or {}).get("module", "the output")
        result = (
            Text("finite", style="green")
            if finite
            else Text(f"not finite, first in {safe(str(where))}", style="bold red")
        )
        name, shape = next(iter(run["outputs"].items()), ("", []))
        top = run.get("fingerprint") or {}
        pairs = zip(top.get("ids", ())[:3], top.get("logits", ())[:3], strict=False)
        last = ", ".join(f"{i} ({'not finite' if v is None else f'{v:.3g}'})" for i, v in pairs)
        table.add_row(
            safe(run["kind"]), result, safe(f"{name} {'x'.join(map(str, shape))}"), f"{run['seconds']:.2f} s", last
        )
    yield table
    for reason, kinds in _unprocessed(forward).items():
        inputs = ", ".join(kinds)
        yield prose(f"{inputs}: input made from the config, not by the repo's {reason}", "dim")
    expected = forward.get("expect")
    if expected:
        yield label(f"compared with {safe(str(expected.get('file', '')))}")


def _unprocessed(forward: dict[str, Any]) -> dict[str, list[str]]:
    """Kinds of input that the repo's processor did not make, by the reason."""
    reasons: dict[str, list[str]] = {}
    for run in forward["runs"]:
        if run["status"] == "ran" and run.get("reason"):
            reasons.setdefault(run["reason"], []).append(safe(run["kind"]))
    return reasons


def _chart(layers: list[Any], *, verbose: bool) -> Iterator[RenderableType]:
    """One bar a layer: the root mean square of its weights, on a scale from nothing to the largest."""
    widest = max((layer.rms for layer in layers if math.isfinite(layer.rms)), default=0.0) or 1.0
    shown = layers if verbose or len(layers) <= SHOWN else layers[: SHOWN - 1]
    table = grid("layer", "root mean square", "largest", "not finite")
    for layer in shown:
        finite = math.isfinite(layer.rms)
        bar = "█" * max(round(_BAR * layer.rms / widest), 1 if layer.rms else 0) if finite else ""
        value = Text(bar, style="cyan").append(f" {layer.rms:.3g}", style="default")
        bad = Text(f"{layer.bad:,}", style="bold red") if layer.bad else ""
        table.add_row(safe(layer.path), value, f"{layer.absmax:.3g}", bad)
    yield table
    if len(shown) < len(layers):
        yield label(f"… and {many(len(layers) - len(shown), 'more layer')} (--verbose shows all)")
