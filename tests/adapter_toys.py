"""Adapters and bases made in memory, so that a case is one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckaudit.adapters import Adapter, recognise
from ckaudit.adapters.base import Base
from ckaudit.adapters.binding import Binding, bind_all, summary
from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.checks import adapters as checks
from ckaudit.findings import Finding, Report, Skip, ordered
from ckaudit.pipeline import describe
from ckaudit.plan import NameFate, Parameter, Plan, RuleHit
from tests.helpers import DictSource, safetensors_file

ROOT = "base_model.model."
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/base",
    "target_modules": ["q_proj", "v_proj"],
}  # fmt: skip
Entries = dict[str, tuple[str, list[int]]]


def lora(
    modules: Mapping[str, tuple[int, int]] | Iterable[str], rank: int = 4, root: str = ROOT, a: str = "lora_A.weight",
    b: str = "lora_B.weight",
) -> Entries:  # fmt: skip
    """Both factors of each module, given with its outputs and inputs (8 and 8 where only the path is given)."""
    sizes = modules if isinstance(modules, Mapping) else dict.fromkeys(modules, (8, 8))
    made: Entries = {}
    for path, (out, inner) in sizes.items():
        made[f"{root}{path}.{a}"] = ("F32", [rank, inner])
        made[f"{root}{path}.{b}"] = ("F32", [out, rank])
    return made


def attention(prefix: str = "model.", layers: int = 2, parts: str = "qv") -> list[str]:
    """Paths of attention modules, a layer's after the other's."""
    return [f"{prefix}layers.{i}.self_attn.{p}_proj" for i in range(layers) for p in parts]


def repo(
    tensors: Entries | None, config: Mapping[str, Any] | None = CONFIG, file: str = "adapter_model.safetensors", **files: bytes
) -> Checkpoint:  # fmt: skip
    """What is read of an adapter repo with these tensors (no weights if None)."""
    data: dict[str, bytes] = dict(files)
    if tensors is not None:
        data[file] = safetensors_file(tensors)
    if config is not None:
        data["adapter_config.json"] = json.dumps(dict(config)).encode()
    return read_checkpoint(DictSource(data, name="test/adapter"))


def adapter(tensors: Entries | None, config: Mapping[str, Any] | None = CONFIG, **more: Any) -> Adapter:
    """`repo` as an adapter; it must be recognised as one."""
    found = recognise(repo(tensors, config, **more))
    assert found is not None
    return found


def base(names: Iterable[str] | Mapping[str, list[int]], config: Mapping[str, Any] | None = None) -> Base:
    """A base with these tensors (8 by 8 where only the name is given)."""
    shapes = names if isinstance(names, Mapping) else {n: [8, 8] for n in names}
    data = {
        "model.safetensors": safetensors_file({n: ("BF16", s) for n, s in shapes.items()}),
        "config.json": json.dumps(
            dict(config or {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
        ).encode(),
    }
    return Base(read_checkpoint(DictSource(data, name="org/base")))


def weights(*modules: str) -> list[str]:
    return [f"{m}.weight" for m in modules]


def peft(on: Base, parameters: Iterable[str] | Mapping[str, list[int]] | None = None) -> Plan:
    """transformers on the base: it builds these parameters (those that the base stores, if None)."""
    shapes = parameters if isinstance(parameters, Mapping) else {n: [8, 8] for n in parameters} if parameters else None
    if shapes is None:
        shapes = {t.name: list(t.shape or ()) for t in on.checkpoint.tensors.values()}
    told = tuple(Parameter(n, "full", tuple(s), "BF16") for n, s in shapes.items())
    return Plan(id="transformers", engine="transformers", release="5.24.0", method="live", parameters=told)


def vllm(
    on: Base, into: Mapping[str, tuple[str, str | None]], rules: Iterable[tuple[str, str, str | None]] = (), release: str = "0.29.0",
    **more: Any,
) -> Plan:  # fmt: skip
    """A vLLM release on the base: stored name -> (parameter, shard), with the rules (kind, key, target) of its mapper."""
    names = tuple(NameFate(n, "loaded", p, shard=shard) for n, (p, shard) in into.items())
    parameters = tuple(Parameter(p, "full", (8, 8), "BF16") for p in dict.fromkeys(p for p, _ in into.values()))
    hits = tuple(RuleHit(kind, key, to, "", 1) for kind, key, to in rules)
    return Plan(
        id=f"vllm=={release}", engine="vllm", release=release, method="replay", names=names, parameters=parameters, rules=hits, **more
    )  # fmt: skip


def report(found: Adapter, on: Base | None = None, *plans: Plan) -> Report:
    """The report on an adapter, as the pipeline makes it."""
    bindings: list[Binding] = bind_all(found, on, plans) if on is not None else []
    findings, skips = checks.run(found, on, bindings)
    told = tuple(b.plan for b in bindings)
    return Report(
        target=describe(found.checkpoint), plans=told, findings=ordered(findings, [p.id for p in told]), skips=skips,
        sizes={t.name: t.nbytes for t in found.checkpoint.tensors.values() if t.nbytes is not None},
        adapter=summary(found, on, bindings),
    )  # fmt: skip


def told(found: Adapter, on: Base | None = None, *plans: Plan) -> list[tuple[str, str, str, int]]:
    """The findings as (check, severity, blame, count)."""
    return [(f.check, f.severity, f.blame, f.count) for f in report(found, on, *plans).findings]


def only(found: Adapter, on: Base | None = None, *plans: Plan) -> Finding:
    """The one finding that there is."""
    findings = report(found, on, *plans).findings
    assert len(findings) == 1, [(f.check, f.message) for f in findings]
    return findings[0]


def skips(found: Adapter, on: Base | None = None, *plans: Plan) -> list[Skip]:
    return list(report(found, on, *plans).skips)
