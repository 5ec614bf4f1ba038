"""A toy engine for the tests of checks: it looks names up among its parameters, as every loader does in the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckaudit import checks
from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.findings import Finding
from ckaudit.plan import Mismatch, NameFate, Parameter, Plan, Step
from tests.helpers import DictSource, checkpoint_files, data_size, header

Entries = Mapping[str, tuple[str, list[int]]]
CONFIG = {"model_type": "toy", "architectures": ["ToyForCausalLM"]}
LEAVES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def llama(layers: int = 4, root: str = "model.") -> list[str]:
    """The names of a small decoder: 9 tensors a layer and 3 beside them."""
    names = [
        f"{root}layers.{i}.{leaf}.weight"
        for i in range(layers)
        for leaf in (*LEAVES, "input_layernorm", "post_attention_layernorm")
    ]
    return [f"{root}embed_tokens.weight", *names, f"{root}norm.weight", "lm_head.weight"]


def checkpoint(
    tensors: Iterable[str] | Entries,
    config: Mapping[str, Any] | None = CONFIG,
    files: Mapping[str, bytes] | None = None,
) -> Checkpoint:
    """One sound file with these tensors (BF16 [2, 2] where only a name is given), read as a target is read. No config if None."""
    entries = tensors if isinstance(tensors, Mapping) else dict.fromkeys(tensors, ("BF16", [2, 2]))
    data = checkpoint_files({"model.safetensors": entries}, config)
    if config is None:
        del data["config.json"]
    return read_checkpoint(DictSource(data | dict(files or {})))


def sized(tensors: Entries, config: Mapping[str, Any] = CONFIG) -> Checkpoint:
    """One file of these sizes whose data is never made: for tensors as large as real ones."""
    head = header(tensors, {"format": "pt"})
    files = {"model.safetensors": head, "config.json": json.dumps(dict(config)).encode()}
    return read_checkpoint(DictSource(files, sizes={"model.safetensors": len(head) + data_size(tensors)}))


def plan(
    source: Checkpoint,
    parameters: Iterable[str] | Mapping[str, list[int]],
    rename: Callable[[str], str] = str,
    *,
    id: str = "toy==1",
    chains: Mapping[str, Sequence[Step]] | None = None,
    by_design: Mapping[str, str] | None = None,
    raises: bool = False,
    **more: Any,
) -> Plan:
    """What an engine with these parameters (name, or name and shape) does when it looks `rename(name)` up for each tensor.

    `by_design` excuses tensors and parameters by name. With `raises` the engine raises at the first tensor that it does not know.
    """
    shapes = dict(parameters) if isinstance(parameters, Mapping) else dict.fromkeys(parameters)
    excused, filled, names, mismatches = by_design or {}, {}, [], []
    for name, tensor in source.tensors.items():
        into, chain = rename(name), tuple((chains or {}).get(name, ()))
        if into not in shapes:
            names.append(
                NameFate(name=name, fate="unmatched", into=into, read=0.0, by_design=excused.get(name), chain=chain)
            )
        elif shapes[into] is not None and tuple(shapes[into]) != tensor.shape:
            names.append(NameFate(name=name, fate="not_reached", into=into, read=0.0))
            mismatches.append(Mismatch("shape", into, (name,), str(shapes[into]), str(list(tensor.shape or ()))))
        else:
            names.append(NameFate(name=name, fate="loaded", into=into, read=1.0, chain=chain))
            filled[into] = name
    told = tuple(
        Parameter(name=p, coverage="full", share=1.0, sources=(filled[p],), shape=tuple(s) if s else None)
        if p in filled
        else Parameter(name=p, coverage="none", share=0.0, by_design=excused.get(p), shape=tuple(s) if s else None)
        for p, s in shapes.items()
    )
    lost = [n.into for n in names if n.fate != "loaded" and n.by_design is None]
    error = f"KeyError: {lost[0]!r}" if raises and lost else None
    facts: dict[str, Any] = {
        "id": id, "engine": id.partition("==")[0], "release": id.partition("==")[2], "method": "live", "architecture": "ToyForCausalLM",
        "names": tuple(names), "parameters": told, "mismatches": tuple(mismatches), "error": error,
    }  # fmt: skip
    return Plan(**facts | more)


def findings(source: Checkpoint, *plans: Plan) -> list[Finding]:
    """What CK2xx to CK4xx find."""
    return [f for f in checks.run(source, plans)[0] if f.check[:3] in ("CK2", "CK3", "CK4")]


def told(source: Checkpoint, *plans: Plan) -> list[tuple[str, str, str, int]]:
    """The findings as (check, severity, blame, count)."""
    return [(f.check, f.severity, f.blame, f.count) for f in findings(source, *plans)]


def only(source: Checkpoint, *plans: Plan) -> Finding:
    """The one finding there is."""
    found = findings(source, *plans)
    assert len(found) == 1, [(f.check, f.message) for f in found]
    return found[0]
