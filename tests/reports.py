"""Literal plans, findings and reports for the tests of what is made from them."""

from __future__ import annotations

from typing import Any

from ckaudit.findings import Finding, Report, Skip, Target
from ckaudit.plan import NameFate, Note, Parameter, Plan, RuleHit, Step

HOSTILE = "a\x1b[31m\n\u202e[red]b[/red]\\x"
"""A name that would colour, break, reverse and mark up a careless output."""


def target(**change: Any) -> Target:
    """A small local checkpoint."""
    facts: dict[str, Any] = {
        "name": "tiny", "revision": None, "source": "local", "architectures": ("TinyForCausalLM",), "model_type": "tiny",
        "tensors": 3, "parameters": 1_300_659_440, "bytes": 2_601_318_880, "shards": 1, "dtypes": {"BF16": 3},
    }  # fmt: skip
    return Target(**facts | change)


def good(**change: Any) -> Plan:
    """transformers loads all three tensors."""
    facts: dict[str, Any] = {
        "id": "transformers", "engine": "transformers", "release": "5.24.0", "method": "live",
        "names": tuple(NameFate(name=n, fate="loaded", into=n, read=1.0) for n in ("q_proj.weight", "k_proj.weight", "norm.weight")),
        "parameters": tuple(Parameter(name=n, coverage="full") for n in ("q_proj.weight", "k_proj.weight", "norm.weight")),
        "environment": {"torch": "2.13.0"},
    }  # fmt: skip
    return Plan(**facts | change)


def cascade(**change: Any) -> Plan:
    """An engine whose rule fires on another rule's output: one tensor finds no parameter, one parameter is a third short."""
    steps = (
        Step(rule="stacked", key="q_proj", at="attn", before="q_proj.weight", after="qkv_proj.weight", shard="q"),
        Step(rule="stacked", key="v_proj", at="attn", before="qkv_proj.weight", after="qkqkv_proj.weight", shard="v"),
    )
    facts: dict[str, Any] = {
        "id": "rules:vllm==0.25.1", "engine": "vllm", "release": "0.25.1", "method": "rules",
        "architecture": "TinyForCausalLM", "error": "There is no parameter named 'qkqkv_proj'",
        "names": (
            NameFate(name="q_proj.weight", fate="unmatched", into="qkqkv_proj.weight", shard="v", read=0.0, chain=steps),
            NameFate(name="k_proj.weight", fate="loaded", into="qkv_proj.weight", shard="k", read=1.0),
            NameFate(name="norm.weight", fate="ignored", by_design="computed"),
        ),
        "parameters": (
            Parameter(name="qkv_proj.weight", coverage="partial", share=1 / 3, sources=("k_proj.weight",)),
            Parameter(name="norm.weight", coverage="none", by_design="computed"),
        ),
        "notes": (Note("tied-twice", "both are stored; the later one wins", ("norm.weight",)),),
        "rules": (RuleHit("stacked", "q_proj", "qkv_proj", "attn", 1), RuleHit("stacked", ".z", "y", "attn", 0)),
    }  # fmt: skip
    return Plan(**facts | change)


def unjudged(**change: Any) -> Plan:
    """An engine whose environment stood in the way."""
    facts: dict[str, Any] = {
        "id": "vllm==0.33.0", "engine": "vllm", "release": "0.33.0", "method": "replay", "not_judged": "no compressed_tensors",
    }  # fmt: skip
    return Plan(**facts | change)


def finding(**change: Any) -> Finding:
    """The cascade as a finding."""
    facts: dict[str, Any] = {
        "check": "CK201", "title": "cascading substitution", "severity": "error", "blame": "engine",
        "engine": "rules:vllm==0.25.1", "names": ("q_proj.weight",), "count": 1, "bytes": 2000,
        "wanted": "qkv_proj.weight", "found": "qkqkv_proj.weight", "message": "One rule fires on another's output.",
        "mend": "Serve with 0.33.0.",
    }  # fmt: skip
    return Finding(**facts | change)


def report(**change: Any) -> Report:
    """transformers loads, the other engine fails with one finding."""
    facts: dict[str, Any] = {
        "target": target(), "plans": (good(), cascade()), "findings": (finding(),),
        "sizes": {"q_proj.weight": 2000, "k_proj.weight": 1000, "norm.weight": 10},
    }  # fmt: skip
    return Report(**facts | change)


def hostile() -> Report:
    """A report in which every text that a checkpoint can choose is hostile."""
    fate = NameFate(name=HOSTILE, fate="unmatched", into=HOSTILE, shard=HOSTILE, by_design=None,
                    chain=(Step(rule=HOSTILE, key=HOSTILE, at=HOSTILE, before=HOSTILE, after=HOSTILE, shard=HOSTILE),))  # fmt: skip
    plan = Plan(
        id="transformers", engine="transformers", release=HOSTILE, method="live", error=HOSTILE, architecture=HOSTILE, names=(fate,),
        parameters=(Parameter(name=HOSTILE, coverage="none", by_design=HOSTILE),), environment={HOSTILE: HOSTILE},
        notes=(Note(HOSTILE, HOSTILE, (HOSTILE,)),), rules=(RuleHit(HOSTILE, HOSTILE, HOSTILE, HOSTILE, 1, HOSTILE),),
        options={HOSTILE: HOSTILE},
    )  # fmt: skip
    return report(
        target=target(
            name=HOSTILE, revision=HOSTILE, architectures=(HOSTILE,), model_type=HOSTILE, dtypes={HOSTILE: 1}
        ),
        plans=(plan, unjudged(not_judged=HOSTILE)),
        findings=tuple(
            finding(
                engine=e,
                names=(HOSTILE,),
                wanted=HOSTILE,
                found=HOSTILE,
                message=HOSTILE,
                mend=HOSTILE,
                suppressed_by=s,
            )
            for e, s in (("transformers", None), (None, HOSTILE))
        ),
        skips=(Skip(check="CK301", engine="transformers", reason=HOSTILE),),
    )
