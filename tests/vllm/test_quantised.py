"""Quantised checkpoints on a released vLLM: each scheme whole, and with faults, one at a time, at one module.

What is expected is what the loader of 0.33.0 does by its code: a linear or expert module with a quantisation method is exempt from
the check that every parameter was filled (`default_loader.py`), so that what is missing there passes in silence; `_load_w13`,
`load_qkv_weight` and `load_column_parallel_weight` compare shapes, `load_row_parallel_weight` cuts the inputs that it wants out
of what there is; `copy_` casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from ckaudit import checks  # noqa: E402
from ckaudit.engines import Engine, EngineOptions, select  # noqa: E402
from ckaudit.engines.vllm.attempt import beside  # noqa: E402
from ckaudit.engines.vllm.provenance import Provenance  # noqa: E402
from ckaudit.findings import Finding  # noqa: E402
from ckaudit.plan import Plan  # noqa: E402
from ckaudit.progress import NullProgress  # noqa: E402
from tests.vllm import quantised as q  # noqa: E402
from tests.vllm.quantised import SCHEMES, Entries, checkpoint, dense, experts  # noqa: E402

Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
EXPERT_DOWN, EXPERT_GATE = "model.layers.1.mlp.experts.2.down_proj", "model.layers.1.mlp.experts.2.gate_proj"
STACK = "model.layers.1.mlp.experts.routed_experts"
SIZES = {
    Q: (q.HIDDEN, q.HIDDEN),
    DOWN: (q.HIDDEN, q.INTERMEDIATE),
    EXPERT_DOWN: (q.HIDDEN, q.EXPERT),
    EXPERT_GATE: (q.EXPERT, q.HIDDEN),
}

Change = Callable[[Entries, str], None]
"""What is done to the tensors at one module."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    (found,) = select("vllm==0.33.0")
    yield found
    found.close()  # type: ignore[attr-defined]


def audited(engine: Engine, config: dict[str, object], tensors: Entries) -> tuple[Plan, list[Finding]]:
    source = checkpoint(config, tensors)
    plan = engine.plan(source, EngineOptions(), NullProgress())
    return plan, [
        f for f in checks.run(source, [plan])[0] if f.check != "CK306"
    ]  # CK306: what no NVFP4 header can tell


def lacks(leaf: str) -> Change:
    def change(tensors: Entries, module: str) -> None:
        del tensors[f"{module}.{leaf}"]

    return change


def sized(leaf: str, *factors: float) -> Change:
    """The sizes of a tensor times `factors`."""

    def change(tensors: Entries, module: str) -> None:
        dtype, shape = tensors[f"{module}.{leaf}"]
        tensors[f"{module}.{leaf}"] = (dtype, [int(n * f) for n, f in zip(shape, factors, strict=True)])

    return change


def typed(leaf: str, dtype: str) -> Change:
    def change(tensors: Entries, module: str) -> None:
        tensors[f"{module}.{leaf}"] = (dtype, tensors[f"{module}.{leaf}"][1])

    return change


def unquantised(tensors: Entries, module: str) -> None:
    """As plain weights, which no entry of the config exempts."""
    for name in [n for n in tensors if n.startswith(f"{module}.")]:
        del tensors[name]
    tensors |= {f"{module}.{leaf}": held for leaf, held in q.plain(*SIZES[module]).items()}


class Fault(NamedTuple):
    module: str
    change: Change
    verdict: str
    told: tuple[str, str, str]
    """Check, blame, and the leaf of the tensor that is named, or the parameter."""


LOSS, FAILS, LOADS = "loads_with_loss", "fails", "loads"


def absent(leaf: str) -> tuple[str, str, str]:
    return "CK304", "checkpoint", leaf


def misshapen(leaf: str) -> tuple[str, str, str]:
    return "CK301", "checkpoint", leaf


PLAIN = ("CK308", "config", "weight")
FAULTS: dict[str, list[Fault]] = {
    "fp8-block": [
        Fault(Q, lacks("weight_scale_inv"), LOSS, absent("weight_scale_inv")),
        Fault(DOWN, sized("weight_scale_inv", 1, 2), LOSS, ("CK303", "config", "weight_scale_inv")),
        Fault(EXPERT_GATE, sized("weight_scale_inv", 1, 2), FAILS, misshapen("weight_scale_inv")),
        Fault(EXPERT_DOWN, unquantised, LOSS, PLAIN),  # the shape fits, so it is cast to FP8, and there is no scale
    ],
    "fp8-tensor": [
        Fault(EXPERT_DOWN, lacks("weight_scale"), LOSS, absent("weight_scale")),
        Fault(Q, unquantised, LOSS, PLAIN),
        Fault(DOWN, typed("weight", "BF16"), LOSS, ("CK302", "checkpoint", "weight")),
    ],
    "ct-fp8": [
        Fault(DOWN, lacks("weight_scale"), LOSS, absent("weight_scale")),
        Fault(Q, sized("weight_scale", 1, 4), FAILS, misshapen("weight_scale")),
        Fault(EXPERT_GATE, sized("weight", 2, 0.5), FAILS, misshapen("weight")),
    ],
    "ct-int8": [
        Fault(EXPERT_GATE, lacks("weight_scale"), LOSS, absent("weight_scale")),
        Fault(Q, typed("weight", "F8_E4M3"), LOSS, ("CK302", "checkpoint", "weight")),
        Fault(DOWN, unquantised, LOSS, PLAIN),
    ],
    "ct-int4": [
        Fault(EXPERT_DOWN, lacks("weight_scale"), LOSS, absent("weight_scale")),
        Fault(DOWN, lacks("weight_shape"), LOADS, absent("weight_shape")),  # no kernel asks for it; other readers do
        Fault(Q, sized("weight_scale", 1, 2), FAILS, misshapen("weight_scale")),
        Fault(Q, sized("weight_packed", 1 / 8, 8), FAILS, misshapen("weight_packed")),  # as GPTQ packs: along the outputs
        Fault(DOWN, unquantised, FAILS, PLAIN),
        Fault(EXPERT_DOWN, unquantised, FAILS, PLAIN),
    ],
    "ct-nvfp4": [
        Fault(Q, lacks("weight_global_scale"), LOSS, absent("weight_global_scale")),
        Fault(EXPERT_GATE, sized("weight_scale", 1, 2), FAILS, misshapen("weight_scale")),
        # groups of 32: a narrower tensor passes for one without padding, and fills a part (`_narrow_expert_data_for_padding`)
        Fault(EXPERT_GATE, sized("weight_scale", 1, 0.5), LOSS, ("CK205", "checkpoint", f"{STACK}.w13_weight_scale")),
        Fault(Q, unquantised, FAILS, PLAIN),
    ],
    "modelopt-nvfp4": [
        Fault(DOWN, lacks("weight_scale_2"), LOSS, absent("weight_scale_2")),
        Fault(Q, sized("weight_scale", 1, 0.5), FAILS, misshapen("weight_scale")),
        Fault(EXPERT_GATE, unquantised, FAILS, PLAIN),
    ],
    "gptq": [
        Fault(EXPERT_DOWN, lacks("scales"), LOSS, absent("scales")),
        Fault(Q, sized("scales", 2, 1), FAILS, misshapen("scales")),
        Fault(Q, sized("qweight", 8, 1 / 8), FAILS, misshapen("qweight")),  # as AWQ packs: along the outputs
        Fault(DOWN, unquantised, LOADS, ("CK308", "config", "weight")),  # 0.33.0 looks in the files for what is quantised
        Fault(EXPERT_GATE, unquantised, FAILS, PLAIN),
    ],
    "awq": [
        Fault(Q, lacks("qzeros"), LOSS, absent("qzeros")),
        Fault(EXPERT_GATE, sized("scales", 2, 1), FAILS, misshapen("scales")),
        Fault(EXPERT_GATE, sized("qweight", 1 / 8, 8), FAILS, misshapen("qweight")),  # as GPTQ packs: along the inputs
        Fault(Q, unquantised, FAILS, PLAIN),
    ],
}  # fmt: skip


@pytest.mark.wheel
@pytest.mark.timeout(1200)
class TestReleased:
    @pytest.mark.parametrize("scheme", FAULTS)
    def test_a_scheme_whole_and_with_faults(self, engine: Engine, scheme: str) -> None:
        for made in (dense(SCHEMES[scheme]), experts(SCHEMES[scheme])):
            plan, found = audited(engine, *made)
            assert (plan.verdict, plan.not_judged, plan.error) == ("loads", None, None)
            assert [f for f in found if f.severity == "error"] == []
        for fault in FAULTS[scheme]:
            config, tensors = (experts if "experts" in fault.module else dense)(SCHEMES[scheme])
            fault.change(tensors, fault.module)
            plan, found = audited(engine, config, tensors)
            where = f"{fault.module} {plan.error} {[(f.check, f.message) for f in found]}"
            assert plan.verdict == fault.verdict, where
            check, blame, leaf = fault.told
            name = leaf if leaf.startswith("model.") else f"{fault.module}.{leaf}"
            assert [(f.check, f.blame, f.names) for f in found] == [(check, blame, (name,))], where

    def test_stacked_experts_in_mxfp4(self, engine: Engine) -> None:
        config, tensors = q.mxfp4()
        assert audited(engine, config, tensors)[0].verdict == "loads"
        stack = "model.layers.1.mlp.experts.down_proj"
        lost = {n: t for n, t in tensors.items() if n != f"{stack}_scales"}
        plan, found = audited(engine, config, lost)
        assert plan.verdict == "loads_with_loss"
        assert [(f.check, f.blame, f.names) for f in found] == [("CK304", "checkpoint", (f"{stack}_scales",))]
        dtype, shape = tensors[f"{stack}_scales"]
        plan, found = audited(engine, config, tensors | {f"{stack}_scales": (dtype, [*shape[:-1], shape[-1] * 2])})
        assert plan.verdict == "loads_with_loss", plan.error  # gpt_oss.py cuts out of it what a rank needs
        assert [(f.check, f.blame, f.names) for f in found] == [("CK303", "config", (f"{stack}_scales",))]

    @pytest.mark.parametrize("make", [dense, experts])
    def test_bitsandbytes_which_this_release_no_longer_knows(self, engine: Engine, make: Callable[..., object]) -> None:
        # vllm/model_executor/layers/quantization of 0.33.0 has no bitsandbytes: a plug-in might, and is not here
        plan, _ = audited(engine, *make(SCHEMES["bitsandbytes"]))
        assert plan.verdict == "not_judged"
        assert "Unknown quantization method: bitsandbytes" in (plan.not_judged or "")


class State:
    """As bitsandbytes' QuantState: tensors and numbers, one state inside another."""

    def __init__(self, absmax: torch.Tensor, inner: State | None = None) -> None:
        self.absmax, self.blocksize, self.state2 = absmax, 64, inner


def test_what_a_loader_hangs_on_a_parameter_is_held() -> None:
    model = torch.nn.Linear(4, 4, bias=False, device="meta")
    observer = Provenance()
    observer.watch("weight", model.weight)
    given = {n: observer.yielded(n, torch.empty(4, device="meta")) for n in ("absmax", "nested", "stray")}
    with observer:
        model.weight.bnb_quant_state = {0: State(given["absmax"], State(given["nested"]))}
        given["stray"].clone()
    seen = observer.result(model.named_parameters(), beside(model)).tensors
    assert {n: (t.read, t.into) for n, t in seen.items()} == {
        "absmax": (4, ("weight",)), "nested": (4, ("weight",)), "stray": (0, ()),
    }  # fmt: skip
