"""The example on the page of every adapter check, made from a small case. `python -m tests.adapter_examples` renews them."""

from __future__ import annotations

import re
from pathlib import Path

from ckaudit.findings import Report
from ckaudit.report.terminal import render
from tests.adapter_toys import CONFIG, adapter, attention, base, lora, peft, report, vllm, weights

PAGES = Path(__file__).parent.parent / "docs" / "checks"
WRAPPED = [f"language_model.model.layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in "qv"]


def ck901() -> Report:
    """Gemma 3's text class trained, its multimodal class served."""
    on = base(WRAPPED)
    fused = {n: (n.replace(f"{n[-13]}_proj", "qkv_proj"), n[-13]) for n in WRAPPED}
    return report(adapter(lora(attention())), on, vllm(on, fused, release="0.15.1"))


def ck902() -> Report:
    on = base([n for n in weights(*attention()) if n])
    return report(adapter(lora([*attention()[:2], *attention("model.model.")[2:]])), on, peft(on))


def ck903() -> Report:
    return report(adapter(lora(attention(), rank=8)))


def ck904() -> Report:
    paths = [f"model.layers.{i}.mlp.experts{tail}" for i in range(2) for tail in ("", ".base_layer")]
    config = CONFIG | {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    return report(adapter(lora(paths, 16), config))


def ck905() -> Report:
    return report(adapter({n: s for n, s in lora(attention()).items() if "1.self_attn.v_proj.lora_B" not in n}))


def ck906() -> Report:
    paths = [f"unet.down_blocks.{i}.attentions.0.transformer_blocks.0.attn1.to_k" for i in range(2)]
    return report(adapter(lora(paths, root="unet.", a="lora.down.weight", b="lora.up.weight"), None))


def ck907() -> Report:
    on = base(weights(*attention()))
    return report(adapter(lora(attention()[:2])), on, peft(on))


def ck908() -> Report:
    return report(adapter(None))


def ck909() -> Report:
    on = base(weights(*attention(parts="qvo")))
    return report(adapter(lora(attention(parts="qvo"))), on, peft(on))


def ck910() -> Report:
    on = base(weights(*attention()))
    config = CONFIG | {"rank_pattern": {"layers.0.self_attn.q_proj": 4}}
    return report(adapter(lora(attention()), config), on, vllm(on, {n: (n, None) for n in weights(*attention())}))


CASES = sorted(name.upper() for name in globals() if re.fullmatch(r"ck[0-9]{3}", name))


def example(check: str) -> str:
    """The finding of `check` in its case, as the terminal shows it."""
    made: Report = globals()[check.lower()]()
    lines = [line.rstrip() for line in render(made, width=110).split("\n")]
    start = next(i for i, line in enumerate(lines) if f" {check} " in line)
    stop = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith("  "))
    return "\n".join(lines[start:stop])


def renewed(page: str, check: str) -> str:
    """`page` with its example as the program prints it now."""
    return re.sub(r"(## Example\n\n```\n).*?(\n```\n)\Z", lambda m: m[1] + example(check) + m[2], page, flags=re.DOTALL)


if __name__ == "__main__":
    for check in CASES:
        path = PAGES / f"{check}.md"
        path.write_text(renewed(path.read_text(encoding="utf-8"), check), encoding="utf-8")
