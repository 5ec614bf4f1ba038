"""CK309: which quantised weights can be spread over how many ranks."""

from __future__ import annotations

from typing import Any

import pytest

from ckaudit import checks
from ckaudit.findings import Finding
from tests.toy import CONFIG, Entries, sized

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def found(tensors: Entries, method: dict[str, Any], *tp: int) -> list[Finding]:
    source = sized(tensors, CONFIG | {"quantization_config": method})
    return [f for f in checks.run(source, (), tp)[0] if f.check == "CK309"]


def gptq(module: str, inputs: int, outputs: int, group: int = 128, bits: int = 4) -> Entries:
    per = 32 // bits
    return {
        f"{module}.qweight": ("I32", [inputs // per, outputs]), f"{module}.qzeros": ("I32", [inputs // group, outputs // per]),
        f"{module}.scales": ("F16", [inputs // group, outputs]),
    }  # fmt: skip


def awq(module: str, inputs: int, outputs: int, group: int = 128) -> Entries:
    return {
        f"{module}.qweight": ("I32", [inputs, outputs // 8]),
        f"{module}.scales": ("F16", [inputs // group, outputs]),
    }


def packed(module: str, inputs: int, outputs: int, group: int = 128, bits: int = 4) -> Entries:
    return {
        f"{module}.weight_packed": ("I32", [outputs, inputs * bits // 32]),
        f"{module}.weight_scale": ("BF16", [outputs, inputs // group]),
    }


def nvfp4(module: str, inputs: int, outputs: int, group: int = 16) -> Entries:
    return {
        f"{module}.weight_packed": ("U8", [outputs, inputs // 2]),
        f"{module}.weight_scale": ("F8_E4M3", [outputs, inputs // group]),
    }


def block(module: str, inputs: int, outputs: int) -> Entries:
    return {
        f"{module}.weight": ("F8_E4M3", [outputs, inputs]),
        f"{module}.weight_scale_inv": ("F32", [-(-outputs // 128), -(-inputs // 128)]),
    }


CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
}


@pytest.mark.parametrize(
    ("tensors", "method", "ranks"),
    [
        # 29568 = 231 groups of 128, and 231 = 3 * 7 * 11
        (gptq("layers.0.mlp.down_proj", 29568, 8192), GPTQ, [2, 4, 8]),
        (gptq("layers.0.mlp.down_proj", 29568, 8192, bits=8), GPTQ | {"bits": 8}, [2, 4, 8]),
        (awq("layers.0.mlp.down_proj", 29568, 8192), GPTQ | {"quant_method": "awq"}, [2, 4, 8]),
        (packed("layers.0.mlp.down_proj", 29568, 8192, bits=8), CT, [2, 4, 8]),
        # 896 = 7 groups of 128 = 56 of 16
        (nvfp4("layers.0.self_attn.o_proj", 896, 896), {"quant_method": "compressed-tensors"}, []),
        (nvfp4("layers.0.self_attn.o_proj", 96, 96), {"quant_method": "compressed-tensors"}, [4, 8]),
        # 1536 = 12 blocks: whole on 2 and 4, 1.5 on 8
        (block("layers.0.mlp.down_proj", 1536, 4096), FP8, [8]),
        (block("layers.0.mlp.gate_proj", 4096, 1536), FP8, [8]),
        (block("layers.0.mlp.down_proj", 4096, 1536), FP8, []),  # its outputs are not split
        (block("layers.0.self_attn.k_proj", 4096, 128), FP8, []),  # its heads may be repeated
        # one scale a channel, or for the whole matrix
        (gptq("layers.0.mlp.down_proj", 1000, 512, group=1000), GPTQ | {"group_size": -1}, []),
        ({"layers.0.mlp.down_proj.weight": ("F8_E4M3", [64, 100]), "layers.0.mlp.down_proj.weight_scale": ("F32", [64, 1])}, FP8, []),
        ({"layers.0.mlp.down_proj.weight": ("BF16", [64, 100])}, FP8, []),
        # MLX
        ({"layers.0.mlp.down_proj.weight": ("U32", [64, 29568 // 8]), "layers.0.mlp.down_proj.scales": ("BF16", [64, 462])}, {}, []),
    ],
)  # fmt: skip
def test_how_many_ranks_fit(tensors: Entries, method: dict[str, Any], ranks: list[int]) -> None:
    assert [n for n in (2, 4, 8) if found(tensors, method, n)] == ranks


def test_one_finding_says_what_fits() -> None:
    tensors = {n: s for i in range(4) for n, s in gptq(f"layers.{i}.mlp.down_proj", 1024, 512).items()}
    (finding,) = found(tensors, GPTQ, 2, 4, 8, 16)
    assert (finding.severity, finding.blame, finding.count) == ("error", "environment", 4)
    assert "16 ranks" in finding.message
    assert "over 8 ranks" in finding.mend


def test_without_ranks_nothing_is_asked() -> None:
    assert found(gptq("layers.0.mlp.down_proj", 29568, 8192), GPTQ) == []
    assert found(gptq("layers.0.mlp.down_proj", 29568, 8192), GPTQ, 1) == []
