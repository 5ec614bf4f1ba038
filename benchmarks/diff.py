"""How long a comparison of two 45,000-tensor mixtures of experts takes, whatever became of the one in the other.

    python benchmarks/diff.py

Prints the best of five runs in seconds. Reading headers and laying out the report are not in it.
"""

from __future__ import annotations

from collections.abc import Callable

from checks import EXPERTS, LAYERS, best, names

from ckaudit.checkpoint import Checkpoint, TensorSpec
from ckaudit.diff import compare

Spec = tuple[str, str, tuple[int, ...]]


def checkpoint(specs: list[Spec]) -> Checkpoint:
    tensors = {n: TensorSpec(n, "model.safetensors", dtype, shape, 8192) for n, dtype, shape in specs}
    config = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": LAYERS}
    return Checkpoint(
        name="moe", kind="local", revision=None, files={}, config=config, texts={}, index=None, shards=(), tensors=tensors
    )  # fmt: skip


def plain(rename: Callable[[str], str] = str, dtype: str = "BF16") -> list[Spec]:
    return [(rename(n), dtype, (64, 64)) for n in names()]


def stacked() -> list[Spec]:
    made = [s for s in plain() if ".experts." not in s[0]]
    paths = sorted({n.partition(".experts.")[0] for n in names() if ".experts." in n})
    for path in paths:
        made += [
            (f"{path}.experts.gate_up_proj", "BF16", (EXPERTS, 128, 64)),
            (f"{path}.experts.down_proj", "BF16", (EXPERTS, 64, 64)),
        ]
    return made


def eight_bits() -> list[Spec]:
    made: list[Spec] = []
    for name, dtype, shape in plain():
        made.append((name, "F8_E4M3" if "_proj" in name else dtype, shape))
        if "_proj" in name:
            made.append((f"{name}_scale_inv", "F32", (1, 1)))
    return made


def main() -> None:
    source = checkpoint(plain())
    cases = {
        "identical": plain(),
        "a prefix on every name": plain(lambda n: f"module.{n}"),
        "experts stacked": stacked(),
        "cast": plain(dtype="F32"),
        "eight bits": eight_bits(),
        "half of it lost": plain()[: len(source.tensors) // 2],
        "another model": plain(lambda n: f"other.{n.replace('layers', 'units').replace('_proj', '_x').replace('mlp', 'z')}"),
    }  # fmt: skip
    print(f"{len(source.tensors):,} tensors")
    for what, specs in cases.items():
        target = checkpoint(specs)
        print(f"{what:<24} {best(lambda other=target: compare(source, other)):.2f} s")  # type: ignore[misc]


if __name__ == "__main__":
    main()
