"""The example on the page of every name, tensor and config check, made from a small case. `python -m tests.check_examples` renews them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ckaudit import checks
from ckaudit.checkpoint import Checkpoint
from ckaudit.findings import Report, ordered
from ckaudit.mapper import Rule
from ckaudit.pipeline import describe
from ckaudit.plan import Collision, Failure, NameFate, Note, Parameter, Plan
from ckaudit.report.terminal import render
from tests.test_checks_companions import LINEARS, SCHEMES, W, config, quantised
from tests.test_checks_layout import experts
from tests.test_checks_rewrites import BARE, DOTTED, QKV, mapped
from tests.test_checks_tensors import SIZES, bf16, shapes
from tests.toy import CONFIG, checkpoint, llama, plan, sized

PAGES = Path(__file__).parent.parent / "docs" / "checks"
LLAMA = llama()
VLLM = "vllm==0.25.1"
FUSED = ["attn.qkv_proj.weight", "attn.qkv_proj.bias"]
Case = tuple[Checkpoint, *tuple[Plan, ...]]


def example(check: str) -> str:
    """The finding of `check` in its case, as the terminal shows it."""
    source, *plans = globals()[check.lower()]()
    found = [f for f in checks.run(source, plans, tp=(2, 4, 8))[0] if f.check == check][:1]
    sizes = {n: t.nbytes for n, t in source.tensors.items() if t.nbytes}
    report = Report(
        target=describe(source), plans=tuple(plans), findings=ordered(found, [p.id for p in plans]), sizes=sizes
    )
    lines = [line.rstrip() for line in render(report, width=110).split("\n")]
    start = next(i for i, line in enumerate(lines) if f" {check} " in line)
    stop = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith("  "))
    return "\n".join(lines[start:stop])


def transformers(
    source: Checkpoint, parameters: list[str] | dict[str, list[int]], rename: Callable[[str], str] = str, **more: object
) -> Plan:
    return plan(source, parameters, rename, id="transformers", **more)  # type: ignore[arg-type]


def without(*parts: str, names: list[str] = LLAMA) -> Checkpoint:
    return checkpoint([n for n in names if not any(p in n for p in parts)])


def ck201() -> Case:
    source = checkpoint(QKV)
    return source, mapped(source, BARE, FUSED, "attn", id=VLLM)


def ck202() -> Case:
    source = checkpoint(QKV)
    return source, mapped(source, DOTTED, FUSED, "attn", id="vllm==0.27.1")


def ck203() -> Case:
    source = checkpoint([*LLAMA, *(f"model.layers.{i}.self_attn.indexer.v_transform" for i in range(4))])
    return source, transformers(source, LLAMA)


def ck204() -> Case:
    source = without("layers.2.self_attn.q_proj")
    return source, transformers(source, LLAMA)


def ck205() -> Case:
    source = without("k_proj", names=QKV)
    names = tuple(NameFate(n, "loaded", re.sub("[qv]_proj", "qkv_proj", n), read=1.0) for n in source.tensors)
    parts = tuple(
        Parameter(f"attn.qkv_proj.{t}", "partial", share=2 / 3, sources=(f"attn.q_proj.{t}", f"attn.v_proj.{t}"))
        for t in ("weight", "bias")
    )
    return source, Plan(id=VLLM, engine="vllm", release="0.25.1", method="replay", names=names, parameters=parts)


def ck206() -> Case:
    extra = [f"model.layers.{i}.self_attn.q_proj.bias" for i in range(4)]
    source = checkpoint([*LLAMA, *extra])
    base = plan(source, LLAMA, id=VLLM)
    names = tuple(msgspec.structs.replace(n, fate="ignored") if n.name in extra else n for n in base.names)
    return source, msgspec.structs.replace(base, names=names)


def ck207() -> Case:
    a, b = ([f"model.{tree}.layers.{i}.layer_scalar" for i in range(3)] for tree in ("decoder", "encoder"))
    source = checkpoint([*a, *b])
    targets = [n.replace("decoder.", "") for n in a]
    base = plan(source, targets, lambda n: re.sub("(de|en)coder.", "", n), id=VLLM)
    clash = tuple(Collision(t, y, (x,)) for t, x, y in zip(targets, a, b, strict=True))
    return source, msgspec.structs.replace(base, collisions=clash)


def ck208() -> Case:
    source = checkpoint(["head.weight"])
    return source, mapped(
        source, [Rule("suffix", "head.weight", "lm_head.weight")], ["lm_head.weight"], id="vllm==0.21.0", twice=True
    )


def ck209() -> Case:
    source = checkpoint([f"_orig_mod.{n}" for n in LLAMA])
    return source, transformers(source, LLAMA)


def ck210() -> Case:
    return (without("layers.2.", "layers.3.", names=llama(6)),)


def ck211() -> Case:
    return (checkpoint([n.replace("experts.3.", "experts.7.") for n in experts()]),)


def ck212() -> Case:
    return (
        checkpoint([*experts(), "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]),
    )


def ck213() -> Case:
    source = checkpoint([re.sub("^model.", "model.model.", n) for n in LLAMA])
    return source, transformers(source, LLAMA, lambda n: n.replace("model.model.", "model."))


def ck214() -> Case:
    source = checkpoint(LLAMA[:-1], CONFIG | {"tie_word_embeddings": False})
    return source, transformers(source, LLAMA)


def ck215() -> Case:
    source = checkpoint(LLAMA)
    claim = Note("claims-too-little", "as the engine words it", ("vit_merger.self_attn.qkv_proj.weight",))
    return source, plan(source, LLAMA, id="vllm==0.24.0", notes=(claim,))


def ck216() -> Case:
    adapter = [f"model.layers.{i}.self_attn.q_proj.lora_{x}.default.weight" for i in range(4) for x in "AB"]
    source = checkpoint([n.replace("q_proj.", "q_proj.base_layer.") for n in LLAMA] + adapter)
    return source, transformers(source, LLAMA)


def ck217() -> Case:
    source = checkpoint([f"model.layers.29.mlp.calculator.experts.weight_gate.{i}" for i in range(8)])
    return source, mapped(
        source,
        [Rule("substring", "weight_g", "parametrizations.weight.original0")],
        list(source.tensors),
        id="transformers",
    )


def ck218() -> Case:
    source = checkpoint(LLAMA)
    error = "ValueError: Weight input_size_per_partition = 9856 is not divisible by min_thread_k = 128."
    return source, plan(source, LLAMA, id=VLLM, error=error, failures=(Failure(error),))


def ck219() -> Case:
    return (checkpoint(LLAMA, CONFIG | {"num_nextn_predict_layers": 1}),)


def ck220() -> Case:
    source = checkpoint([f"model.layers.{i}.mlp.experts.{p}_proj" for i in range(3) for p in ("gate_up", "down")])
    return source, plan(source, experts(), id=VLLM)


def ck222() -> Case:
    split = {f"model.layers.{i}.self_attn.{p}_proj.weight": [8, 8] for i in range(3) for p in "qkv"}
    fused = {f"model.layers.{i}.self_attn.qkv_proj.weight": [24, 8] for i in range(3)}
    source = checkpoint(bf16(fused))
    return source, transformers(source, split)


def ck221() -> Case:
    source = checkpoint(QKV)
    text = "MiniForCausalLM declares that qkv_proj is made of q_proj and k_proj and v_proj, and no rule of its loader does that"
    made = mapped(source, (), FUSED, "attn", id=VLLM)
    return source, msgspec.structs.replace(made, notes=(Note("packed-unmapped", text, tuple(QKV)),))


def ck301() -> Case:
    source = checkpoint(bf16(shapes() | {"model.layers.2.mlp.up_proj.weight": [24, 8]}), CONFIG | SIZES)
    return source, transformers(source, shapes())


def ck302() -> Case:
    return (checkpoint(dict.fromkeys(LLAMA, ("F32", [2, 2])), CONFIG | {"dtype": "bfloat16"}),)


def ck303() -> Case:
    source = checkpoint(LLAMA)
    base = plan(source, LLAMA, id=VLLM)
    return source, msgspec.structs.replace(
        base, names=tuple(msgspec.structs.replace(n, read=0.5) if "up_proj" in n.name else n for n in base.names)
    )


def ck304() -> Case:
    method, leaves = SCHEMES["fp8 block"]
    return (checkpoint(quantised(leaves, "weight_scale_inv", LINEARS[3]), config(method)),)


def ck305() -> Case:
    return (
        checkpoint(
            quantised(SCHEMES["fp8 tensor"][1]),
            files={"hf_quant_config.json": b'{"quantization": {"quant_algo": "FP8"}}'},
        ),
    )


def ck306() -> Case:
    return (checkpoint({f"model.layers.{i}.mlp.experts.gate_up_proj": ("BF16", [4, 8, 8]) for i in range(3)}),)


def ck307() -> Case:
    method, leaves = SCHEMES["packed"]
    tower = [f"layers.{i}.{p}" for i in range(3) for p in ("fc1", "fc2")]
    ignore = [f"model.visual.{m}" for m in tower]
    return (
        checkpoint(
            quantised(leaves) | {f"vision_tower.{m}.weight": W for m in tower}, config(method | {"ignore": ignore})
        ),
    )


def ck308() -> Case:
    method, leaves = SCHEMES["packed"]
    tensors = {n: spec for n, spec in quantised(leaves).items() if not n.startswith(LINEARS[-1])}
    return (checkpoint(tensors | {f"{LINEARS[-1]}.weight": W}, config(method)),)


def ck309() -> Case:
    # the sizes of Qwen2.5-VL-72B-Instruct-AWQ, two of its layers
    sizes: dict[str, tuple[str, list[int]]] = {
        "qweight": ("I32", [29568, 1024]), "qzeros": ("I32", [231, 1024]), "scales": ("F16", [231, 8192]),
    }  # fmt: skip
    tensors = {f"model.layers.{i}.mlp.down_proj.{leaf}": spec for i in range(2) for leaf, spec in sizes.items()}
    method = {"quant_method": "awq", "bits": 4, "group_size": 128}
    return (sized(tensors, CONFIG | {"quantization_config": method}),)


def ck310() -> Case:
    rows: tuple[dict[str, object], ...] = (
        {"size": 2, "verdict": "loads", "bytes_per_rank": 10},
        {
            "size": 3,
            "verdict": "fails",
            "error": "Total number of attention heads (8) must be divisible by tensor parallel size (3).",
        },
    )
    source = checkpoint(LLAMA)
    return source, plan(source, LLAMA, id=VLLM, tp=rows)


def ck401() -> Case:
    source = checkpoint(bf16(shapes(vocab=30)), CONFIG | SIZES)
    return source, transformers(source, shapes())


def ck402() -> Case:
    source = checkpoint(LLAMA)
    text = "config.json was written by transformers 5.30.0, newer than 5.24.0: unknown keys are ignored"
    return source, transformers(source, LLAMA, notes=(Note("config-newer", text),))


def ck403() -> Case:
    return (checkpoint(LLAMA, None, {"README.md": b""}),)


def ck404() -> Case:
    return (checkpoint(LLAMA, {"model_type": "llama"}),)


def ck405() -> Case:
    vision = [f"vpm.blocks.{i}.{p}.weight" for i in range(4) for p in ("fc1", "fc2", "norm")]
    resampler = [
        f"resampler.{p}.weight"
        for p in ("kv_proj", "query", "ln_q", "ln_kv", "ln_post", "attn.in_proj", "attn.out_proj", "pos_embed")
    ]
    source = checkpoint([*LLAMA, *vision, *resampler])
    return source, msgspec.structs.replace(transformers(source, LLAMA), architecture="Qwen2ForCausalLM")


CASES = sorted(name.upper() for name in globals() if re.fullmatch(r"ck[0-9]{3}", name))


def renewed(page: str, check: str) -> str:
    """`page` with its example as the program prints it now."""
    return re.sub(r"(## Example\n\n```\n).*?```\n\Z", lambda m: f"{m[1]}{example(check)}\n```\n", page, flags=re.DOTALL)


def pages() -> Iterator[tuple[str, Path]]:
    return ((check, PAGES / f"{check}.md") for check in CASES)


if __name__ == "__main__":
    for check, path in pages():
        path.write_text(renewed(path.read_text(encoding="utf-8"), check), encoding="utf-8")
