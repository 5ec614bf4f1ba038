"""CK302, CK303, CK306: dtypes, what of a tensor is used, and layouts that headers cannot tell."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from ckaudit.checks.case import Case, by_stack, many, on_files, under
from ckaudit.checks.facts import Facts
from ckaudit.checks.quantisation import weight_block
from ckaudit.checks.sizes import SHAPE
from ckaudit.findings import Check, Finding
from ckaudit.header import DTYPE_BITS, FLOATS
from ckaudit.plan import Mismatch

DTYPE = Check("CK302", "dtype that does not fit", "error")
IN_PART = Check("CK303", "tensor used only in part", "error")
UNDECIDABLE = Check("CK306", "layout that headers cannot tell", "warning")
CHECKS = (DTYPE, IN_PART, UNDECIDABLE)


def _read_elsewhere(case: Case, names: list[str]) -> bool:
    """Whether another engine loads these without a cast."""
    wanted = set(names)
    cast = ({n for m in o.mismatches if m.kind == "dtype" for n in m.names} for o in case.others)
    loaded = ({n.name for n in o.names if n.fate == "loaded"} for o in case.others)
    return any(wanted <= has and not wanted & bad for has, bad in zip(loaded, cast, strict=True))


def casts(case: Case) -> Iterator[Finding]:
    """Casts between kinds of number (int8 into bf16): the loader converts the stored integers, not what they stand for."""
    members = [m for m in case.mismatches if m.kind == "dtype"]
    groups: dict[tuple[str, str], list[Mismatch]] = defaultdict(list)
    for mismatch in members:
        groups[mismatch.wanted, mismatch.found].append(mismatch)
    for (wanted, found), group in groups.items():
        names = [n for m in group for n in m.names]
        yield case.finding(
            DTYPE, f"{many(len(names), 'tensor')} stored as {found} and loaded as {wanted}: values are cast, not dequantised.",
            names=names, mend="Declare the quantisation in config.json, or store a floating dtype.", wanted=wanted, found=found,
            blame=None if _read_elsewhere(case, names) else "checkpoint",
        )  # fmt: skip
        case.take(names, [m.parameter for m in group])


def read_in_part(case: Case) -> Iterator[Finding]:
    """Tensors of which a part reaches no parameter although the loader is content: wider or longer than the model is built."""
    told = {n for m in case.plan.mismatches for n in m.names} | {n for f in case.on_files for n in f.names}
    told |= {n for c in case.plan.collisions for n in (c.kept, *c.lost)}
    part = {
        n.name: n.read for n in case.plan.not_plain
        if n.fate == "loaded" and n.read is not None and n.read < 1 and n.by_design is None and n.name not in told
    }  # fmt: skip
    for stack, names in by_stack(part).items():
        share = part[names[0]] or 0
        yield case.finding(
            IN_PART, f"Only {share:.0%} of {many(len(names), 'tensor')}{under(stack)} is used; the rest is dropped.", names=names,
            blame="config", mend="Compare the sizes in the config with these tensors.", wanted="all elements", found=f"{share:.0%}",
        )  # fmt: skip


def saved_dtype(facts: Facts) -> Iterator[Finding]:
    """Most bytes are stored in a wider float than the config declares: twice the download, for no gain."""
    declared = facts.config.get("dtype") or facts.config.get("torch_dtype")
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    wanted = names.get(str(declared).removeprefix("torch."))
    sizes: Counter[str] = Counter()
    for (dtype, _, nbytes), count in facts.checkpoint.kinds.items():
        if dtype in FLOATS:
            sizes[dtype] += count * (nbytes or 0)
    if wanted is None or not sizes:
        return
    found, size = sizes.most_common(1)[0]
    ratio = DTYPE_BITS[found] / DTYPE_BITS[wanted]
    if ratio > 1 and 2 * size > sum(sizes.values()):
        wide = [t.name for t in facts.checkpoint.tensors.values() if t.dtype == found]
        yield on_files(
            facts, DTYPE, f"{len(wide)} tensors are stored as {found}, the config says {declared}: {ratio:g} times its size.", wide,
            severity="warning", mend=f"Save in {declared}, or declare {found}.", wanted=wanted, found=found,
        )  # fmt: skip


def square_experts(facts: Facts) -> Iterator[Finding]:
    """Fused experts whose matrices are square: a transposed set has the same shape, so no header can tell which way they lie."""
    fused = facts.matching(re.compile(r"experts\.(gate_up_proj|down_proj|w13|w2)(\.weight|_weight)?$"))
    square = [
        t.name for t in map(facts.checkpoint.tensors.__getitem__, fused)
        if t.shape is not None and len(t.shape) == 3 and t.shape[1] == t.shape[2] and t.shape[1] > 1
    ]  # fmt: skip
    if square:
        shape = facts.checkpoint.tensors[square[0]].shape
        yield on_files(
            facts, UNDECIDABLE, f"{len(square)} fused expert tensors are square: whether they are transposed cannot be told from headers.",
            square, blame="undecidable", mend="Run `ckaudit load` to see whether the model's output is sound.",
            found=str(list(shape or ())),
        )  # fmt: skip


_QKV = re.compile(r"(qkv_proj|query_key_value)\.weight$")
_MEGATRON_QKV = re.compile(r"(^|\.)decoder\.layers\.#\.self_attention\.linear_qkv\.weight$")
_MEGATRON = re.compile(r"(^|\.)decoder\.layers\.#\.(self_attention\.linear_qkv|mlp\.linear_fc1)\.weight$")


def fused_rows(facts: Facts) -> Iterator[Finding]:
    """Fused query, key and value rows in an order that only the config hints at; block scales betray rows interleaved by rank."""
    block = weight_block(facts)
    hinted = "attention_projection_layout" in facts.config
    plain, interleaved = [], []
    for tensor in map(facts.checkpoint.tensors.__getitem__, facts.matching(_QKV)):
        if tensor.shape is None or len(tensor.shape) != 2:
            continue
        scale = facts.checkpoint.tensors.get(f"{tensor.name}_scale_inv")
        if block and scale is not None and scale.shape is not None and len(scale.shape) == 2:
            if scale.shape[0] != -(-tensor.shape[0] // block[0]):
                interleaved.append(tensor.name)
        elif hinted:
            plain.append(tensor.name)
    megatron = facts.matching(_MEGATRON)
    if megatron and facts.matching(_MEGATRON_QKV):
        yield on_files(
            facts, UNDECIDABLE, f"{len(megatron)} fused matrices of Megatron hold their parts rank by rank: the order depends on how many "
            "ranks saved them, which no header says.",
            megatron, blame="undecidable", mend="Convert them with the tool and the number of ranks that they were saved with.",
        )  # fmt: skip
    if interleaved:
        yield on_files(
            facts, UNDECIDABLE,
            f"{len(interleaved)} fused projections have more rows of block scales than blocks: their rows are interleaved "
            "for tensor-parallel ranks. A loader that takes them for plain [Q; K; V] gives garbage.",
            interleaved, blame="undecidable", mend="Use a loader that knows this layout, or re-export with plain rows.",
        )  # fmt: skip
    if plain:
        yield on_files(
            facts, UNDECIDABLE, f"{len(plain)} fused projections may hold plain or interleaved rows: both have this name and shape.", plain,
            blame="undecidable", mend="Compare the output of one prompt with the source model's.",
        )  # fmt: skip


_GLOBAL = {
    "weight_global_scale": ("compressed-tensors", "divided by it"),
    "weight_scale_2": ("ModelOpt", "multiplied by it"),
}  # fmt: skip
"""The leaf of an NVFP4 weight's global scale: whose it is, and how the block scales are meant. Facts: vLLM 0.29.0 inverts
the first on loading (`compressed_tensors_w4a4_nvfp4.py`) and takes the second as it is (`modelopt.py`)."""


def global_scales(facts: Facts) -> Iterator[Finding]:
    """NVFP4's second scale: a divisor in one format and a factor in the other. The name says which; only values could prove it."""
    found = {leaf: facts.matching(re.compile(rf"(^|[._]){leaf}$")) for leaf in _GLOBAL}
    found = {leaf: names for leaf, names in found.items() if names}
    if not found:
        return
    means = " and ".join(f"{len(n)} `{leaf}` ({_GLOBAL[leaf][0]}: {_GLOBAL[leaf][1]})" for leaf, n in found.items())
    yield on_files(
        facts, UNDECIDABLE, f"NVFP4 with {means}: that the values keep to this sense cannot be told from headers.",
        [n for names in found.values() for n in names], blame="undecidable", severity="warning" if len(found) > 1 else "note",
        mend="Run `ckaudit load` after a conversion between the two: a scale of the wrong sense gives garbage.",
    )  # fmt: skip


def unchecked(case: Case) -> Iterator[Finding]:
    """Shapes that differ and that the loader does not compare, as its quantisation method is at work."""
    for note in case.plan.notes:
        if note.kind == "shape-unchecked":
            yield case.finding(
                SHAPE,
                f"{note.text[:1].upper()}{note.text[1:]}.",
                names=note.names,
                severity="warning",
                blame="checkpoint",
            )
