"""The example on the page of every CK80x check, made from two small checkpoints. `python -m tests.diff_examples` renews them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckaudit.changes import Diff
from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.checks import differences
from ckaudit.diff import compare
from ckaudit.diff.places import placed
from ckaudit.findings import Report, ordered
from ckaudit.pipeline import describe
from ckaudit.report.terminal import render_diff
from tests.helpers import DictSource, checkpoint_files
from tests.toy import CONFIG, Entries, plan

PAGES = Path(__file__).parent.parent / "docs" / "checks"
Pair = tuple[Checkpoint, Checkpoint]


def decoder(
    layers: int = 4, root: str = "model.", dtype: str = "BF16", vocab: int = 100
) -> dict[str, tuple[str, list[int]]]:
    """A small decoder, with the shapes of its parts: hidden 16, two of four heads for keys, MLP 24."""
    shapes = {
        "input_layernorm": [16], "self_attn.q_proj": [16, 16], "self_attn.k_proj": [8, 16], "self_attn.v_proj": [8, 16],
        "self_attn.o_proj": [16, 16], "post_attention_layernorm": [16], "mlp.gate_proj": [24, 16], "mlp.up_proj": [24, 16],
        "mlp.down_proj": [16, 24],
    }  # fmt: skip
    names = {f"{root}layers.{i}.{leaf}.weight": shape for i in range(layers) for leaf, shape in shapes.items()}
    every = {
        f"{root}embed_tokens.weight": [vocab, 16],
        **names,
        f"{root}norm.weight": [16],
        "lm_head.weight": [vocab, 16],
    }
    return {name: (dtype, shape) for name, shape in every.items()}


def sharded(shards: Mapping[str, Entries], config: Mapping[str, Any] = CONFIG) -> Checkpoint:
    """A sound checkpoint of several files."""
    return read_checkpoint(DictSource(checkpoint_files(shards, config)))


def one(entries: Entries, config: Mapping[str, Any] = CONFIG) -> Checkpoint:
    """A sound checkpoint of one file."""
    return sharded({"model.safetensors": entries}, config)


def split(entries: Entries, count: int) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """The tensors in so many shards, in their order."""
    names = list(entries)
    size = -(-len(names) // count)
    return {
        f"model-{i + 1:05}-of-{count:05}.safetensors": {n: entries[n] for n in names[i * size : (i + 1) * size]}
        for i in range(count)
    }


def told(found: Diff, a: Checkpoint, b: Checkpoint, **options: Any) -> Report:
    """The comparison as a report."""
    findings, skips = differences.run(found)
    sizes = {t.name: t.nbytes or 0 for c in (a, b) for t in c.tensors.values()}
    return Report(
        target=describe(b), source=describe(a), plans=(), diff=found, findings=ordered(findings, ()), skips=skips, sizes=sizes, **options
    )  # fmt: skip


def example(check: str) -> str:
    """The finding of `check` in its case, as the terminal shows it."""
    a, b, roundtrip = globals()[check.lower()]()
    found = compare(a, b, roundtrip=roundtrip)
    if not roundtrip:
        found = placed(found, [plan(b, list(a.tensors))], a, b)  # an engine that knows the names of A
    lines = render_diff(told(found, a, b), width=110).split("\n")
    start = next(i for i, line in enumerate(lines) if line[1:].startswith(f" {check} "))
    stop = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith("  "))
    return "\n".join(lines[start:stop])


def ck801() -> tuple[Checkpoint, Checkpoint, bool]:
    """An exporter that left the draft layers out, and with them every source shard that held one."""
    draft = {f"mtp.layers.0.{p}.weight": ("BF16", [16, 16]) for p in ("eh_proj", "mlp.down_proj", "mlp.up_proj")}
    shards = split(decoder(), 3)
    last = list(shards)[-1]
    a = sharded(shards | {last: shards[last] | draft})
    return a, sharded({n: e for n, e in shards.items() if n != last}), False


def ck802() -> tuple[Checkpoint, Checkpoint, bool]:
    extra = {f"gene_projector.proj.{i}.{p}": ("BF16", [16]) for i in (0, 1, 4) for p in ("bias", "weight")}
    return one(decoder()), one(decoder() | extra), False


def ck803() -> tuple[Checkpoint, Checkpoint, bool]:
    changed = {f"model.layers.{i}.self_attn.k_proj.weight": ("BF16", [16, 16]) for i in range(4)}
    return one(decoder()), one(decoder() | changed), False


def ck804() -> tuple[Checkpoint, Checkpoint, bool]:
    changed = {f"model.layers.{i}.mlp.down_proj.weight": ("F16", [16, 24]) for i in range(4)}
    return one(decoder()), one(decoder() | changed), False


def ck805() -> tuple[Checkpoint, Checkpoint, bool]:
    return one(decoder()), one(decoder(root="model.language_model.")), True


def ck806() -> tuple[Checkpoint, Checkpoint, bool]:
    return one(decoder()), one({f"_orig_mod.{name}": entry for name, entry in decoder().items()}), False


CASES = [c.id for c in differences.CHECKS]


def renewed(page: str, check: str) -> str:
    """`page` with its example as the program prints it now."""
    return re.sub(r"(## Example\n\n```\n).*?(\n```\n)\Z", lambda m: m[1] + example(check) + m[2], page, flags=re.DOTALL)


if __name__ == "__main__":
    for check in CASES:
        path = PAGES / f"{check}.md"
        path.write_text(renewed(path.read_text(encoding="utf-8"), check), encoding="utf-8")
