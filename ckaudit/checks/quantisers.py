"""How quantisers name what they store, and which modules of a checkpoint are stored so."""

from __future__ import annotations

import re
from collections import defaultdict

import msgspec

from ckaudit.checks.facts import Facts
from ckaudit.checks.quantisation import declared
from ckaudit.header import FLOATS


class Scheme(msgspec.Struct, frozen=True):
    """How one quantiser names what it stores. `marker` recognises a module by its leaves, `needs` are leaves that must be there:
    of each tuple one. `usual` are leaves that all modules of a checkpoint have or none."""

    name: str
    methods: frozenset[str]
    """`quant_method` values of configs that mean this scheme."""
    marker: re.Pattern[str]
    needs: tuple[tuple[str, ...], ...]
    usual: frozenset[str] = frozenset()
    meant: re.Pattern[str] | None = None
    """What recognises a module too, where the config declares this scheme."""
    common: bool = False
    """Whether models have such leaves for other reasons: then a module with all that is needed must be there, or a declaration."""


def _scheme(
    name: str, methods: str, marker: str, *needs: str, usual: str = "", meant: str = "", common: bool = False
) -> Scheme:
    return Scheme(
        name, frozenset(methods.split()), re.compile(f"(?:{marker})$"), tuple(tuple(n.split("|")) for n in needs),
        frozenset(usual.split()), re.compile(f"(?:{meant})$") if meant else None, common,
    )  # fmt: skip


_FP8_SCALE = "weight_scale|weight_scale_inv|scale|qscale_weight|scale_weight"
SCHEMES = (
    _scheme(
        "FP-Quant", "fp_quant", "dqweight|act_global_scale|(forward|backward)_hadamard_matrix", "qweight|dqweight|weight*",
        usual="scales weight_global_scale act_global_scale forward_hadamard_matrix backward_hadamard_matrix", meant="qweight",
    ),
    _scheme("GPTQ or AWQ", "gptq awq gptq_marlin awq_marlin auto-round auto_round", "qweight", "scales", usual="qzeros g_idx"),
    _scheme(
        "compressed-tensors, packed", "compressed-tensors modelopt", "weight_packed", "weight_scale",
        usual="weight_shape weight_global_scale",
    ),
    _scheme(
        "bitsandbytes 4-bit", "bitsandbytes", r"weight\.(absmax|quant_map|quant_state\..*)", "weight.absmax", "weight.quant_map",
        "weight.quant_state.*", "weight*", usual="weight.nested_absmax weight.nested_quant_map",
    ),
    _scheme("bitsandbytes 8-bit", "bitsandbytes", "SCB", "weight*"),
    _scheme("MXFP4", "mxfp4 quark", "_blocks", "_scales"),
    _scheme("quanto", "quanto", r"weight\._data", "weight._scale"),
    _scheme(
        "torchao", "torchao", "_weight_(qdata|scale|scale_and_zero|zero_point)", "_weight_qdata", "_weight_scale|_weight_scale_and_zero",
        usual="_weight_zero_point _weight_per_tensor_scale _weight_act_pre_scale",
    ),
    _scheme(
        "HQQ or SINQ", "hqq sinq", "W_q|nbits", "W_q", "scale|scale_q|meta", "zero|zero_q|meta", common=True,
        usual="shape nbits group_size axis packing",
    ),
    _scheme("HIGGS", "higgs", "tables2|weight:I16", "weight*", "scales", "tables", "tables2", common=True),
    _scheme("SpQR", "spqr", "dense_weights|row_offsets|col_vals", "dense_weights", "row_offsets", "col_vals", usual="in_perm"),
    _scheme("AQLM", "aqlm", "codes|codebooks", "codes", "codebooks", "scales", common=True),
    _scheme(
        "VPTQ", "vptq", r"indices|centroids\.weight", "indices", "centroids.weight", common=True,
        usual="res_centroids.weight res_indices outlier_centroids.weight outlier_indices perm weight_scale weight_bias",
    ),
    _scheme("EETQ", "eetq", "weight_scales", "weight*", "weight_scales", meant="weight:I8"),
    _scheme("FP8", "fp8 fbgemm_fp8 compressed-tensors modelopt quark", "weight:F8_.*", _FP8_SCALE),
    _scheme("int8", "compressed-tensors bitsandbytes modelopt quark w8a8_int8 ascend", "weight:I8", f"SCB|{_FP8_SCALE}|deq_scale"),
    _scheme("Metal", "metal", "qbiases", "weight*", "scales", "qbiases", meant="weight:U32"),
    _scheme("MLX", "mlx", "weight:U32|biases", "scales", usual="biases"),
    _scheme(
        "packed bytes with a scale", "bitnet modelopt nvfp4 compressed-tensors", "weight:U8", f"{_FP8_SCALE}|weight.absmax",
        usual="weight_scale_2",
    ),
)  # fmt: skip
"""In the order in which a module is recognised. Facts: transformers 5.24.0 `quantizers/` and `integrations/` (`higgs.py` HiggsLinear,
`eetq.py` EetqLinear, `metal_quantization.py` MetalLinear, `quantizer_torchao.py` and `quantizer_sinq.py` serialized_names),
compressed-tensors `compressors/`, AutoGPTQ, AutoAWQ, mlx `nn/layers/quantized.py`, aqlm 1.1.7 `inference.py`, vptq 0.0.5
`layers/vqlinear.py`, spqr_quant 0.2.0 `inference.py`, fp_quant 0.3.2 `module/linear.py`, hqq `core/quantize.py`."""

BASES = (
    "weight", "qweight", "dqweight", "weight_packed", "_blocks", "_packed", "W_q", "codes", "indices", "dense_weights", "_weight_qdata",
    "",
)  # fmt: skip
"""Leaves that hold the weight itself."""
FULL = FLOATS | {"I64", "BOOL"}
"""Dtypes that no quantiser stores weights in."""
TAIL = re.compile(
    r"(^|\.|_)(qweight|qzeros|scales|g_idx|biases|weight_packed|weight_scale(s|_inv|_2)?|weight_shape|weight_zero_point|weight_global_scale"
    r"|input_scale|input_global_scale|weight_g_idx|SCB|weight_format|scale_inv|blocks|weight\.[a-z_]+(\..*)?|_data|_scale|dqweight|W_q"
    r"|act_global_scale|(forward|backward)_hadamard_matrix|dense_weights|row_offsets|col_vals|codebooks|qbiases"
    r"|_weight_(qdata|scale|scale_and_zero|zero_point|per_tensor_scale|act_pre_scale))$"
)


def has(leaves: frozenset[str], leaf: str) -> bool:
    """Whether a module has this leaf; `weight*` is a weight of any type, `x.*` anything that begins so."""
    if leaf.endswith("*"):
        return any(n.partition(":")[0] == leaf[:-1] or (leaf != "weight*" and n.startswith(leaf[:-1])) for n in leaves)
    return leaf in leaves


def recognised(facts: Facts) -> dict[Scheme, dict[frozenset[str], list[str]]]:
    """The schemes on disk: scheme -> set of leaves -> modules."""
    if not may_be_quantised(facts):
        return {}
    method = str(declared(facts).get("quant_method") or "").lower()
    meant = [s for s in SCHEMES if method in s.methods and s.meant is not None]
    found: dict[Scheme, dict[frozenset[str], list[str]]] = defaultdict(dict)
    for leaves, modules in facts.modules.items():
        scheme = next((s for s in meant if s.meant is not None and any(map(s.meant.match, leaves))), None)
        scheme = scheme or next((s for s in SCHEMES if any(map(s.marker.match, leaves))), None)
        if scheme is not None and not (scheme.name == "MLX" and not has(leaves, "weight*")):
            found[scheme][leaves] = modules
    return {s: kinds for s, kinds in found.items() if not s.common or method in s.methods or certain(s, kinds)}


def certain(scheme: Scheme, kinds: dict[frozenset[str], list[str]]) -> bool:
    """Whether a scheme is beyond doubt: plain bytes or FP8 without any scale may just be how a tensor is stored."""
    return any(all(any(has(leaves, n) for n in need) for need in scheme.needs) for leaves in kinds)


def may_be_quantised(facts: Facts) -> bool:
    """A quick look: whether any name reads like a companion, or any dtype is one that weights are quantised to."""
    return not facts.dtypes <= FULL or any(TAIL.search(text) for text in facts.shapes)
