"""The JSON report, version 1, as types: a contract that CI gates parse.

They share nothing with the program's own types, so that a refactor cannot change the format. `schema_v1.json` beside this file is made from
them (`python -m ckaudit.report.schema_v1`). Within version 1 a key is never renamed or dropped; consumers ignore keys they do not know.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

SCHEMA = Path(__file__).with_name("schema_v1.json")

Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Tool(msgspec.Struct, frozen=True):
    """The program that wrote the report."""

    name: Annotated[str, Meta(description="Always ckaudit.")]
    version: Annotated[str, Meta(description="Its release.")]


class Target(msgspec.Struct, frozen=True):
    """What was audited."""

    name: Annotated[str, Meta(description="As the user named it, without the revision.")]
    revision: Annotated[str | None, Meta(description="The commit that every read used; null for a local target.")]
    source: Annotated[Literal["hub", "local"], Meta(description="Where the bytes came from.")]
    architectures: Annotated[tuple[str, ...], Meta(description="As config.json lists them.")]
    model_type: Annotated[str | None, Meta(description="As config.json says; null without one.")]
    tensors: Annotated[Count, Meta(description="Number of tensors, or of names where only the index was there.")]
    parameters: Annotated[
        Count | None,
        Meta(
            description="Elements of all tensors together, as stored; null when a tensor's header was not there to read."
        ),
    ]
    bytes: Annotated[
        Count | None,
        Meta(description="Bytes of data of all tensors together; null when a header was not there to read."),
    ]
    shards: Annotated[Count, Meta(description="Number of safetensors files.")]
    dtypes: Annotated[dict[str, Count], Meta(description="Number of tensors by safetensors dtype name.")]


class Step(msgspec.Struct, frozen=True):
    """One rule that changed a name."""

    rule: Annotated[str, Meta(description="The kind of rule: prefix, suffix, substring, regex, stacked …")]
    key: Annotated[str, Meta(description="The text or pattern that the rule looks for.")]
    at: Annotated[str, Meta(description='Path of the module the rule sits on; "" is the whole model.')]
    before: Annotated[str, Meta(description="The name before, as that module saw it.")] = msgspec.field(name="from")
    after: Annotated[str | None, Meta(description="The name after; null when the rule drops it.")] = msgspec.field(
        name="to"
    )
    shard: Annotated[str | None, Meta(description="The part of a fused parameter that the rule assigns.")]


class Name(msgspec.Struct, frozen=True):
    """What one engine does with one checkpoint tensor."""

    name: Annotated[str, Meta(description="As the checkpoint has it.")]
    fate: Annotated[
        Literal["loaded", "dropped", "ignored", "unmatched", "not_reached"],
        Meta(
            description="loaded: written into a parameter; dropped: a rule maps it to nothing; ignored: skipped in silence; "
            "unmatched: there is no such parameter; not_reached: the loader stopped before."
        ),
    ]
    into: Annotated[
        str | None, Meta(description="The parameter it was written into, or the last name it was looked up by.")
    ]
    also: Annotated[tuple[str, ...], Meta(description="Further parameters that hold a part of it.")]
    shard: Annotated[str | None, Meta(description="Which part of a fused parameter: q, k, v, 0, expert 3 …")]
    read: Annotated[Share | None, Meta(description="Share of its elements that were read; null when unknown.")]
    by_design: Annotated[str | None, Meta(description="Why not being loaded is meant; null when it is not.")]
    chain: Annotated[tuple[Step, ...], Meta(description="The rules that changed the name, in order.")]


class EngineSummary(msgspec.Struct, frozen=True):
    """Tensors by fate and parameters by coverage.

    loaded + dropped + ignored + unmatched + not_reached + by_design is the number of tensors, and
    full + partial + none + unknown that of parameters.
    """

    loaded: Annotated[Count, Meta(description="Tensors that were written into a parameter.")]
    dropped: Annotated[Count, Meta(description="Tensors that a rule maps to nothing, other than by design.")]
    ignored: Annotated[Count, Meta(description="Tensors that were skipped in silence, other than by design.")]
    unmatched: Annotated[Count, Meta(description="Tensors for which there is no parameter, other than by design.")]
    not_reached: Annotated[Count, Meta(description="Tensors that the loader had not come to, other than by design.")]
    by_design: Annotated[
        Count, Meta(description="Tensors whose not being loaded is meant: tied, computed, metadata, draft model …")
    ]
    bytes_lost: Annotated[
        Count,
        Meta(description="Bytes of tensors, or of parts of tensors, that reach no parameter, other than by design."),
    ]
    parameters: Annotated[Count, Meta(description="Parameters and persistent buffers of the engine's model.")]
    full: Annotated[Count, Meta(description="Parameters of which every element was written.")]
    partial: Annotated[Count, Meta(description="Parameters of which some elements were written.")]
    none: Annotated[Count, Meta(description="Parameters of which no element was written.")]
    unknown: Annotated[Count, Meta(description="Parameters for which it could not be observed.")]
    unwritten_by_design: Annotated[
        Count,
        Meta(description="How many of the partial and none ones are meant to be so: tied, computed, default-valued …"),
    ]


class TensorParallel(msgspec.Struct, frozen=True):
    """The same load divided over several ranks."""

    size: Annotated[int, Meta(ge=1, description="Tensor-parallel size.")]
    pp: Annotated[int, Meta(ge=1, description="Pipeline-parallel size.")]
    ep: Annotated[bool, Meta(description="Whether experts are spread over the tensor-parallel ranks.")]
    verdict: Annotated[
        Literal["loads", "loads_with_loss", "fails", "not_judged"],
        Meta(description="Over all ranks that were loaded; loads_with_loss: see lost."),
    ]
    error: Annotated[str | None, Meta(description="The loader's own first message.")]
    bytes_per_rank: Annotated[
        Count | None, Meta(description="Bytes of parameters on the fullest rank; null when unknown.")
    ]
    ranks: Annotated[
        tuple[Count, ...],
        Meta(
            description="Bytes of parameters on each rank that was loaded, in order; ranks that are alike are loaded once."
        ),
    ]
    lost: Annotated[
        tuple[str, ...],
        Meta(
            description="Tensors that no rank takes and parameters that a rank leaves unwritten, unless one rank alone does so too."
        ),
    ]


class DraftLayer(msgspec.Struct, frozen=True):
    """One layer of a draft model."""

    path: Annotated[str, Meta(description="Path of its tensors.")]
    state: Annotated[
        Literal["complete", "partial", "dropped"],
        Meta(description="partial: some of its parameters stay unwritten; dropped: none of its tensors is read."),
    ]
    names: Annotated[
        tuple[str, ...], Meta(description="Tensors that the draft model reads and the main model does not.")
    ]
    unwritten: Annotated[tuple[str, ...], Meta(description="Its parameters that were not, or only partly, written.")]


class Draft(msgspec.Struct, frozen=True):
    """The draft model (multi-token prediction) that the checkpoint carries, by the engine's own class for it."""

    architecture: Annotated[str, Meta(description="The draft class.")]
    verdict: Annotated[
        Literal["loads", "loads_with_loss", "fails", "not_judged"], Meta(description="As for the engine.")
    ]
    error: Annotated[str | None, Meta(description="The loader's own first message, or why it was not judged.")]
    layers: Annotated[tuple[DraftLayer, ...], Meta(description="Its layers.")]


class Engine(msgspec.Struct, frozen=True):
    """The verdict of one engine."""

    id: Annotated[str, Meta(description="As in --engine: transformers, vllm==0.25.1, rules:vllm==0.25.1.")]
    engine: Annotated[str, Meta(description="The software: transformers, vllm; of rules too, whose method says so.")]
    release: Annotated[str | None, Meta(description="Its release; null when unknown.")]
    method: Annotated[
        Literal["replay", "live", "rules"],
        Meta(
            description="replay: unpacked sources of a release; live: installed software; rules: rule books (provisional)."
        ),
    ]
    requested: Annotated[bool, Meta(description="Whether the user asked for it by name.")]
    verdict: Annotated[
        Literal["loads", "loads_with_loss", "fails", "not_judged"],
        Meta(
            description="loads; loads_with_loss: does not raise but loses weights; fails: raises; not_judged: see not_judged."
        ),
    ]
    error: Annotated[str | None, Meta(description="The loader's own first message.")]
    not_judged: Annotated[str | None, Meta(description="Why there is no verdict; null when there is one.")]
    architecture: Annotated[str | None, Meta(description="The class that was built.")]
    options: Annotated[dict[str, Any], Meta(description="Serving options the load ran under.")]
    environment: Annotated[dict[str, str], Meta(description="Versions and platform the load ran on.")]
    summary: Annotated[EngineSummary, Meta(description="The load in numbers.")]
    tp: Annotated[
        tuple[TensorParallel, ...], Meta(description="One row for each layout over several ranks that was asked for.")
    ]
    draft: Annotated[
        Draft | None, Meta(description="What became of the draft model; null where there is none to load.")
    ]
    names: Annotated[tuple[Name, ...] | UnsetType, Meta(description="There only with --names.")] = UNSET


class Finding(msgspec.Struct, frozen=True):
    """One root cause, whatever the number of tensors it touches."""

    check: Annotated[str, Meta(pattern="^CK[0-9]{3}$", description="`ckaudit checks ID` explains it.")]
    title: Annotated[str, Meta(description="Name of the defect.")]
    severity: Annotated[Literal["error", "warning", "note"], Meta(description="How bad it is.")]
    engine: Annotated[str | None, Meta(description="Engine id; null for a fault of the files themselves.")]
    blame: Annotated[
        Literal["checkpoint", "config", "engine", "environment", "undecidable"], Meta(description="The party at fault.")
    ]
    count: Annotated[Count, Meta(description="Tensors, parameters or files concerned.")]
    bytes: Annotated[Count, Meta(description="Their bytes, where known.")]
    names: Annotated[tuple[str, ...], Meta(description="All of them, not folded.")]
    wanted: Annotated[str, Meta(description="What should be there.")]
    found: Annotated[str, Meta(description="What is there.")]
    message: Annotated[str, Meta(description="One sentence: what is wrong and where.")]
    mend: Annotated[str, Meta(description="The smallest cure; empty when there is none to give.")]
    suppressed_by: Annotated[str | None, Meta(description="What suppressed it, with its reason; null when it stands.")]


class Skip(msgspec.Struct, frozen=True):
    """Something that could not be judged. Never counts as passed."""

    check: Annotated[str, Meta(description="The check, engine or topic that was skipped.")]
    engine: Annotated[str | None, Meta(description="Engine id; null when it concerns the files.")]
    reason: Annotated[str, Meta(description="Why.")]


class Summary(msgspec.Struct, frozen=True):
    """Counts of standing findings; suppressed ones are counted apart."""

    errors: Annotated[Count, Meta(description="Standing findings of severity error.")]
    warnings: Annotated[Count, Meta(description="Standing findings of severity warning.")]
    notes: Annotated[Count, Meta(description="Standing findings of severity note.")]
    skips: Annotated[Count, Meta(description="Things that were not judged.")]
    suppressed: Annotated[Count, Meta(description="Suppressed findings, of any severity.")]
    not_judged: Annotated[tuple[str, ...], Meta(description="Ids of the engines without a verdict.")]


class Link(msgspec.Struct, frozen=True):
    """Tensors that hold the same weights on both sides."""

    before: Annotated[
        tuple[str, ...], Meta(description="In the source; several where it keeps in parts what the target has in one.")
    ] = msgspec.field(name="from")
    after: Annotated[tuple[str, ...], Meta(description="In the target.")] = msgspec.field(name="to")


class Change(msgspec.Struct, frozen=True):
    """One way in which the target differs from its source. A tensor is in one of them for each way in which it differs."""

    kind: Annotated[
        Literal["renamed", "relaid", "quantised", "retyped", "reshaped", "removed", "added"],
        Meta(description="relaid: the same weights fused, split, stacked or unstacked."),
    ]
    rule: Annotated[
        Literal[
            "rename", "legacy", "fused", "stacked", "quantised", "cast", "vocabulary", "positions", "experts", "layers", "tied",
            "draft", "buffer",
        ]
        | None,
        Meta(description="What explains it; null when nothing does, and then a finding tells of it."),
    ]  # fmt: skip
    text: Annotated[str, Meta(description="The rule in words, or what is known of a change without one.")]
    from_count: Annotated[Count, Meta(description="Tensors of the source.")]
    to_count: Annotated[Count, Meta(description="Tensors of the target.")]
    from_bytes: Annotated[Count, Meta(description="Their bytes, where known.")]
    to_bytes: Annotated[Count, Meta(description="Their bytes, where known.")]
    engines: Annotated[
        tuple[str, ...],
        Meta(
            description="Engines that have a place for new names, or where rule is null, that have none; empty: not asked."
        ),
    ]
    links: Annotated[
        tuple[Link, ...],
        Meta(description="All of them, not folded; one side is empty where tensors were removed or added."),
    ]


class Diff(msgspec.Struct, frozen=True):
    """The target against its source. How tensors are spread over files is no difference."""

    source: Annotated[Target, Meta(description="What the target was compared with.")]
    roundtrip: Annotated[bool, Meta(description="Whether no difference was allowed, explained or not.")]
    identical: Annotated[
        Count,
        Meta(
            description="Tensors of the source of which the target has one of that name, dtype and shape, as far as known."
        ),
    ]
    identical_bytes: Annotated[Count, Meta(description="Their bytes, where known.")]
    changes: Annotated[tuple[Change, ...], Meta(description="Every difference, explained or not.")]


class AdapterEngine(msgspec.Struct, frozen=True):
    """The modules of an adapter in one engine, each in exactly one count."""

    id: Annotated[str, Meta(description="As in engines; base-names goes by the names in the base's files.")]
    bound: Annotated[Count, Meta(description="Laid on the module that they are meant for.")]
    absent: Annotated[Count, Meta(description="The base has no module of that path.")]
    untargeted: Annotated[Count, Meta(description="target_modules does not name them, so they are passed over.")]
    converted: Annotated[Count, Meta(description="Their target is taken for one of the experts.")]
    form: Annotated[
        Count, Meta(description="The engine has no place for adapters of this form, or cannot read the name.")
    ]
    open: Annotated[Count, Meta(description="Not judged.")]


class Adapter(msgspec.Struct, frozen=True):
    """What the target adapts, where it is an adapter; engines then hold the fates of its tensors on the base."""

    dialect: Annotated[Literal["peft", "kohya", "diffusers", "xlabs"], Meta(description="How its tensors are named.")]
    method: Annotated[str, Meta(description="LORA, ADALORA … as PEFT calls it; OTHER where nothing says so.")]
    rank: Annotated[int | None, Meta(description="r of adapter_config.json.")]
    base_named: Annotated[str | None, Meta(description="base_model_name_or_path of adapter_config.json.")]
    base: Annotated[str | None, Meta(description="The base that it was laid on; null when none was given.")]
    base_revision: Annotated[str | None, Meta(description="Its commit; null for a local one.")]
    modules: Annotated[Count, Meta(description="Modules that it adapts.")]
    replaced: Annotated[Count, Meta(description="Modules of which it replaces whole tensors (modules_to_save).")]
    engines: Annotated[
        tuple[AdapterEngine, ...], Meta(description="Where they bind; engines without a verdict left out.")
    ]


class Quantised(msgspec.Struct, frozen=True):
    """Modules that are quantised alike."""

    modules: Annotated[tuple[str, ...], Meta(description="Their paths, numbers folded: layers.{0..23}.")]
    count: Annotated[Count, Meta(description="How many they are.")]
    on_disk: Annotated[str, Meta(description="The scheme that the stored tensors show, or plain.")]
    declared: Annotated[str, Meta(description="What the config says of them.")]
    built: Annotated[
        dict[str, str], Meta(description="Engine id to quantised, dequantised (on loading), plain or nothing.")
    ]


class Document(msgspec.Struct, frozen=True):
    """A ckaudit report, version 1. null sections were not run. The order is stable: the same input gives the same bytes."""

    schema_version: Annotated[Literal[1], Meta(description="The version of this format.")]
    tool: Annotated[Tool, Meta(description="What wrote the report.")]
    target: Annotated[Target, Meta(description="What was audited.")]
    engines: Annotated[
        tuple[Engine, ...], Meta(description="One verdict for each engine, in the order they were asked for.")
    ]
    findings: Annotated[tuple[Finding, ...], Meta(description="Worst first, suppressed ones included.")]
    skips: Annotated[tuple[Skip, ...], Meta(description="What could not be judged.")]
    load: Annotated[dict[str, Any] | None, Meta(description="A real load, where one was run.")]
    forward: Annotated[dict[str, Any] | None, Meta(description="A forward pass, where one was run.")]
    perplexity: Annotated[dict[str, Any] | None, Meta(description="A perplexity comparison, where one was run.")]
    quantisation: Annotated[
        tuple[Quantised, ...], Meta(description="What is quantised on disk, in the config and in each engine.")
    ]
    adapter: Annotated[Adapter | None, Meta(description="Where an adapter binds; null when the target is none.")]
    diff: Annotated[Diff | None, Meta(description="A comparison with another checkpoint, where one was asked for.")]
    summary: Annotated[Summary, Meta(description="The findings in numbers.")]
    exit_code: Annotated[
        Literal[0, 1, 2, 3],
        Meta(
            description="0 clean; 1 findings at or above --fail-on; 2 a load was stopped; 3 something asked for was not judged."
        ),
    ]


def schema() -> str:
    """The JSON Schema (2020-12) of the format, as text."""
    made = msgspec.json.schema(Document)
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ckaudit report, version 1",
        **made,
    }
    return json.dumps(made, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema(), encoding="utf-8")
