"""What the rows are made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from ckaudit.checkpoint import Checkpoint, read_checkpoint
from ckaudit.findings import Report
from ckaudit.mapper import Rule
from ckaudit.plan import Parameter, Plan
from tests.helpers import DictSource
from tests.test_checks_companions import SCHEMES
from tests.test_checks_rewrites import mapped
from tests.toy import CONFIG, checkpoint, llama, plan


class Kind(Enum):
    """The kinds of fault that the reports fall into."""

    COMPANIONS = "Quantised companions without a place"
    INDEX = "Index and shards that disagree"
    EXPERTS = "Layouts of experts"
    ADAPTER = "Adapters that do not bind"
    PREFIX = "Saved with a wrong prefix"
    TIED = "Tied embeddings and heads"
    HEADER = "Headers that are broken or unusual"
    RENAMED = "Names changed by a release of transformers"
    IGNORE_LIST = "Ignore lists that miss"
    SHAPE = "Shapes that do not fit"
    CLASS = "A class or mapper of another model"
    EXTRA = "Tensors too many"
    CASCADE = "Substitutions that cascade"
    SILENT = "Silent losses"
    DRAFT = "Draft layers (MTP)"
    RUNTIME = "Loads, then fails"
    SYNC = "Names from a trainer to an engine"
    DTYPE = "Dtypes"
    TABLE = "Tables of a converter"
    FUSED_ROWS = "Order of fused rows"
    SUBMODULE = "Mapper inside a submodule"
    COLLISION = "Two tensors on one parameter"


Case = tuple[Checkpoint, *tuple[Plan, ...]]
Row = tuple[str, str, str, int]
"""Check, severity, blame, count."""
ERROR, WARN, NOTE = "error", "warning", "note"


class Fault(NamedTuple):
    """A report that can be told from headers. Without rows in `says` it is a false alarm that must not be repeated."""

    kind: Kind
    links: tuple[str, ...]
    """Without `https://github.com/`, the report itself first; that one is the key."""
    what: str
    case: Callable[[], Case | Report]
    """What is to be judged, or, for an adapter and for a pair of checkpoints, the report on it."""
    says: tuple[Row, ...] = ()
    tp: tuple[int, ...] = ()


class Elsewhere(NamedTuple):
    """A report that the headers of one checkpoint cannot tell, and what can, if anything of ckaudit does."""

    kind: Kind
    links: tuple[str, ...]
    what: str
    why: str
    by: str = ""


LLAMA = llama(3)
VISION = [
    f"visual.blocks.{i}.{p}"
    for i in range(3)
    for p in ("attn.qkv.weight", "attn.qkv.bias", "norm1.weight", "mlp.fc1.weight")
]
DOWN, UP, Q = "model.layers.{i}.mlp.down_proj", "model.layers.{i}.mlp.up_proj", "model.layers.{i}.self_attn.q_proj"


def made(
    tensors: Any,
    parameters: Iterable[str] | None = None,
    rename: Callable[[str], str] = str,
    config: Mapping[str, Any] = {},
    **more: Any,
) -> Case:
    """A checkpoint and, where `parameters` are given, what an engine with them does."""
    files = more.pop("files", None)
    source = checkpoint(tensors, CONFIG | config, files)
    if parameters is None:
        return (source,)
    if isinstance(parameters, Mapping):  # tensors as a checkpoint has them: the engine wants these shapes
        parameters = {name: shape for name, (_, shape) in parameters.items()}
    return source, plan(source, parameters, rename, **more)


def folder(files: Mapping[str, bytes], **options: Any) -> Case:
    """A target of these files, judged without an engine."""
    return (read_checkpoint(DictSource(files, **options)),)


def ruled(tensors: Any, rules: Iterable[Rule], parameters: Iterable[str], **more: Any) -> Case:
    """A checkpoint and an engine that looks its names up through `rules`."""
    source = checkpoint(tensors, CONFIG | more.pop("config", {}))
    return source, mapped(source, rules, parameters, **more)


def layers(template: str, count: int = 3, **words: Iterable[str]) -> list[str]:
    """`template` for every layer `{i}` and every choice of its other words."""
    names = [template.replace("{i}", str(i)) for i in range(count)]
    for word, choices in words.items():
        names = [n.replace(f"{{{word}}}", c) for n in names for c in choices]
    return names


def quantised(module: str, scheme: str, lacking: str = "") -> dict[str, tuple[str, list[int]]]:
    """What `scheme` stores for `module` in three layers."""
    return {n: spec for leaf, spec in SCHEMES[scheme][1].items() if leaf != lacking for n in layers(f"{module}.{leaf}")}


def declared(scheme: str, **more: Any) -> dict[str, Any]:
    """The config of such a checkpoint."""
    return {"quantization_config": SCHEMES[scheme][0] | more}


def plain(*modules: str, count: int = 3) -> dict[str, tuple[str, list[int]]]:
    """A plain weight of each module, in three layers where it has a number."""
    return {n: ("BF16", [4, 4]) for m in modules for n in dict.fromkeys(layers(f"{m}.weight", count))}


def with_fate(fate: str, names: Iterable[str], tensors: Iterable[str], config: Mapping[str, Any] = {}) -> Case:
    """An engine that has `tensors` and does `fate` to `names`, which are stored too."""
    source, base = made([*tensors, *names], tensors, config=config)
    told = tuple(msgspec.structs.replace(n, fate=fate) if n.name in names else n for n in base.names)
    return source, msgspec.structs.replace(base, names=told)


def in_part(case: Case, pattern: str, shape: tuple[int, ...], share: float) -> Case:
    """The case with the parameters that `pattern` finds written only in part."""
    source, base = case
    parts = tuple(
        Parameter(p.name, "partial", shape=shape, dtype="F32", share=share, sources=p.sources)
        if re.search(pattern, p.name)
        else p
        for p in base.parameters
    )
    return source, msgspec.structs.replace(base, parameters=parts)
