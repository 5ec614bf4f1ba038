"""Every architecture that a release of vLLM registers, made by transformers and replayed: is the verdict the right one?

    python benchmarks/vllm_architectures.py 0.33.0 --rows rows.jsonl [--only LlamaForCausalLM …] [--layers 4]
    python benchmarks/vllm_architectures.py 0.33.0 --rows rows.jsonl --page docs/vllm-architectures.md

The config and the names, shapes and types of the tensors are those that a published checkpoint has (`tests/vllm/architectures.py`), laid
out as a file without data. The replay is the product's: `ckaudit`'s reader, engine and worker, one worker for all of them. Rows that are
in the file already are kept, so that a sweep can be done in parts. `--page` puts the table into the page, between its two markers.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from ckaudit.checkpoint import read_checkpoint
from ckaudit.engines import EngineOptions, select
from ckaudit.engines.vllm import store
from ckaudit.plan import Plan
from ckaudit.progress import NullProgress
from ckaudit.source import open_source
from tests.vllm import architectures
from tests.vllm.published import FACTS, Fact

BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"


def row_of(architecture: str, layers: int | None, budget: float, engine: Any) -> dict[str, Any]:
    """One architecture, judged; `expected` is absent where no checkpoint of it can be made, with the reason in `uncounted`."""
    try:
        made = architectures.make(architecture, layers)
    except architectures.UnmakeableError as error:
        return {"architecture": architecture, "uncounted": str(error)}
    with tempfile.TemporaryDirectory() as folder:
        architectures.write(made, Path(folder))
        began = time.perf_counter()
        checkpoint = read_checkpoint(open_source(folder))
        plan = engine.plan(checkpoint, EngineOptions(cache=False, budget=budget), NullProgress())
        seconds = time.perf_counter() - began
    expected = FACTS.get(architecture, Fact()).verdict
    return {
        "architecture": architecture, "tensors": len(made.tensors), "seconds": round(seconds, 2), "verdict": plan.verdict,
        "expected": expected, "correct": plan.verdict == expected, "reason": _reason(plan), "odd": _odd(plan), "class": plan.architecture,
    }  # fmt: skip


def _reason(plan: Plan) -> str | None:
    return plan.not_judged or plan.error


def _odd(plan: Plan) -> list[str]:
    """Up to a few names of what was not loaded whole, none of it by design."""
    names = [f"{n.name}: {n.fate}" for n in plan.names if not n.by_design and (n.fate != "loaded" or n.read != 1.0)]
    parameters = [f"{p.name} <- {p.coverage}" for p in plan.parameters if not p.by_design and p.coverage != "full"]
    collisions = [f"{c.parameter} <- {c.kept} over {c.lost[0]}" for c in plan.collisions]
    return [*names[:4], *parameters[:4], *collisions[:2]]


def sweep(release: str, rows: Path, only: Sequence[str], layers: int | None, budget: float) -> None:
    """Judge what is registered and not yet in `rows`, and append to it."""
    done = {row["architecture"] for row in read(rows)}
    names = [a for a in only or architectures.registered(store.add(release).path) if a not in done]
    (engine,) = select(f"vllm=={release}")
    try:
        for name in names:
            row = row_of(name, layers, budget, engine)
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                name,
                row.get("verdict", "not counted"),
                row.get("correct", ""),
                row.get("reason") or row.get("uncounted") or "",
                flush=True,
            )
    finally:
        engine.close()  # type: ignore[attr-defined]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"worker: {used.ru_utime + used.ru_stime:.0f} s of CPU, {used.ru_maxrss / 2**20:.2f} GiB at most",
        file=sys.stderr,
    )


def read(rows: Path) -> list[dict[str, Any]]:
    """The rows that are there, the last of each architecture."""
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    return list({row["architecture"]: row for row in found}.values())


def page(rows: Sequence[dict[str, Any]], tables: dict[str, str]) -> str:
    """The result as Markdown: what is wrong, what is rightly no `loads`, and, folded, what loads and what does not count."""
    counted = sorted((r for r in rows if "verdict" in r), key=lambda r: str(r["architecture"]))
    right = [r for r in counted if r["correct"]]
    unknown = len([r for r in rows if FACTS.get(r["architecture"], Fact()).without.startswith("vLLM reads")])
    share = 100 * len(right) / max(len(counted), 1)
    parts = [
        f"**{len(right)} of {len(counted)} verdicts are correct ({share:.1f} %)**; {len(tables)} architectures are registered, "
        f"and {len(rows) - len(counted)} do not count (reasons below). Were the {unknown} counted as wrong whose configs have what no "
        f"public source states, it would be {100 * len(right) / (len(counted) + unknown):.1f} %.",
        "### Not correct",
        _table(("architecture", "verdict", "why"), [
            (_code(r), r["verdict"], FACTS.get(r["architecture"], Fact()).exception or f"not explained: {r['reason']}")
            for r in counted if not r["correct"]
        ]),
        "### Rightly not `loads`",
        _table(("architecture", "verdict", "what of vLLM makes it so"), [
            (_code(r), r["verdict"], FACTS[r["architecture"]].why) for r in right if r["verdict"] != "loads"
        ]),
        _folded(f"{len([r for r in right if r['verdict'] == 'loads'])} that load, every element of every tensor in its place", _table(
            ("architecture", "class of vLLM", "tensors", "seconds"),
            [(_code(r), f"`{r['class']}`", r["tensors"], r["seconds"]) for r in right if r["verdict"] == "loads"],
        )),
        _folded(f"{len(rows) - len(counted)} that do not count", _uncounted(rows)),
    ]  # fmt: skip
    return "\n\n".join(parts)


def _uncounted(rows: Sequence[dict[str, Any]]) -> str:
    """The architectures without a checkpoint, by reason."""
    reasons: dict[str, list[str]] = {}
    for row in sorted((r for r in rows if "uncounted" in r), key=lambda r: str(r["architecture"])):
        reasons.setdefault(row["uncounted"], []).append(_code(row))
    common = sorted(reasons.items(), key=lambda item: -len(item[1]))
    return _table(("why", "architectures"), [(why.replace("|", "\\|"), " ".join(names)) for why, names in common])


def _code(row: dict[str, Any]) -> str:
    return f"`{row['architecture']}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _folded(title: str, text: str) -> str:
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("release")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--budget", type=float, default=300)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page is None:
        sweep(options.release, options.rows, options.only, options.layers, options.budget)
        return
    before, rest = options.page.read_text("utf-8").split(BEGIN)
    text = page(read(options.rows), architectures.registered(store.add(options.release).path))
    options.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", "utf-8")


if __name__ == "__main__":
    main()
