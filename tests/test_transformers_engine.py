"""What the transformers engine sees that the loader does not say, and what it refuses to judge. Each expected value is reasoned beside it,
or read off the data that the real loader put into the real model."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical", "TQDM_DISABLE": "1"}
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from real_checkpoints import build, job_of, load, save  # noqa: E402

from ckaudit import naming  # noqa: E402
from ckaudit.engines.transformers import loader, observe  # noqa: E402
from ckaudit.plan import NameFate, Plan  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def audit(folder: Path, **options: Any) -> Plan:
    return loader.run(job_of(folder, **options), lambda name: b"")


def fate(plan: Plan, name: str) -> NameFate:
    return next(n for n in plan.names if n.name == name)


def notes(plan: Plan, kind: str) -> list[tuple[str, ...]]:
    return [note.names for note in plan.notes if note.kind == kind]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    build("qwen3_moe", folder)
    return folder, load(folder)


@pytest.fixture
def copy(moe, tmp_path):
    """A function that writes a changed state beside the model's config, and the state to change."""
    folder, state = moe

    def write(changed: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        save(changed, tmp_path)
        return tmp_path

    return write, state


EXPERTS = "model.layers.1.mlp.experts"


def test_a_whole_checkpoint_loads_and_every_name_says_where_it_went(moe):
    plan = audit(moe[0])
    assert plan.verdict == "loads"
    assert Counter(n.fate for n in plan.names) == {"loaded": len(moe[1])}
    assert all(n.read == 1.0 for n in plan.names)
    assert (plan.collisions, plan.mismatches, plan.failures, plan.unjudged) == ((), (), (), ())
    assert {note.kind for note in plan.notes} == {"class"}


def test_the_slot_and_the_half_of_a_stacked_expert_are_where_the_data_is(moe):
    from transformers import Qwen3MoeForCausalLM

    folder, state = moe
    model, plan = Qwen3MoeForCausalLM.from_pretrained(folder), audit(folder)
    for slot in range(4):
        for half, word in enumerate(("gate_proj", "up_proj")):
            name = f"{EXPERTS}.{slot}.{word}.weight"
            found = fate(plan, name)
            assert (found.into, found.shard) == (f"{EXPERTS}.gate_up_proj", f"expert {slot} {word}")
            stacked = model.get_parameter(found.into)[slot].chunk(2)[half]
            assert torch.equal(stacked, state[name])
    sources = next(p.sources for p in plan.parameters if p.name == f"{EXPERTS}.down_proj")
    assert sources == tuple(f"{EXPERTS}.{slot}.down_proj.weight" for slot in range(4))


def test_a_gap_in_the_experts_numbers_loads_in_silence_and_is_told(copy):
    write, state = copy
    plan = audit(write({n.replace(f"{EXPERTS}.3.", f"{EXPERTS}.7."): t for n, t in state.items()}))
    assert plan.verdict == "loads"
    (down, gate, up) = sorted(notes(plan, "expert-gap"))
    assert down == tuple(f"{EXPERTS}.{i}.down_proj.weight" for i in (0, 1, 2, 7))
    assert fate(plan, f"{EXPERTS}.7.up_proj.weight").shard == "expert 3 up_proj"  # the slot, not the number
    assert not any("layers.0" in name for group in (down, gate, up) for name in group)


def test_two_names_on_one_parameter(copy):
    write, state = copy
    plan = audit(write({**state, "norm.weight": torch.ones_like(state["model.norm.weight"])}))
    (collision,) = plan.collisions
    assert (collision.parameter, collision.kept, collision.lost) == (
        "model.norm.weight",
        "model.norm.weight",
        ("norm.weight",),
    )
    assert fate(plan, "norm.weight").fate == "ignored"
    assert fate(plan, "model.norm.weight").fate == "loaded"
    assert plan.verdict == "loads_with_loss"


def test_the_winner_of_a_collision_is_the_one_whose_data_the_real_loader_kept(copy):
    from transformers import Qwen3MoeForCausalLM

    write, state = copy
    extra = torch.full_like(state["model.norm.weight"], 7.0)
    folder = write({**state, "norm.weight": extra, "model.model.norm.weight": extra * 2})
    (collision,) = audit(folder).collisions
    data = {"model.norm.weight": state["model.norm.weight"], "norm.weight": extra, "model.model.norm.weight": extra * 2}
    kept = Qwen3MoeForCausalLM.from_pretrained(folder).get_parameter("model.norm.weight")
    assert torch.equal(kept, data[collision.kept])
    assert {collision.kept, *collision.lost} == set(data)


@pytest.mark.parametrize(("fused", "shape"), [("gate_up_proj", (4, 64, 64)), ("down_proj", (4, 64, 32))])
def test_experts_one_by_one_beside_the_fused_tensor(copy, fused, shape):
    from transformers import Qwen3MoeForCausalLM

    write, state = copy
    name, data = f"{EXPERTS}.{fused}", torch.full(shape, 5.0)
    singles = {
        n
        for n in state
        if n.startswith(EXPERTS)
        and n.split(".")[-2] in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[fused]
    }
    folder = write({**state, name: data})
    plan = audit(folder)
    model, raised = None, None
    try:
        model = Qwen3MoeForCausalLM.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001  (5.24 stops at one of the two)
        raised = type(error).__name__
    assert (plan.error and plan.error.partition(":")[0]) == raised
    if model is None:
        (failure,) = plan.failures
        assert set(failure.names) == {n.name for n in plan.names if n.fate == "not_reached"} == singles | {name}
        assert sum(p.coverage == "none" for p in plan.parameters) == 1  # the rest was loaded all the same
        return
    (collision,) = plan.collisions
    assert set(collision.lost) == (singles if torch.equal(model.get_parameter(name), data) else {name})
    assert {n.name for n in plan.names if n.fate == "ignored"} == set(collision.lost)


def test_a_doubled_prefix_is_told(copy):
    write, state = copy
    plan = audit(write({(f"model.{n}" if n.startswith("model.") else n): t for n, t in state.items()}))
    told = [name for group in notes(plan, "doubled-prefix") for name in group]
    loaded = [n.name for n in plan.names if n.fate == "loaded" and n.name.startswith("model.model.")]
    assert loaded
    assert sorted(told) == sorted(loaded)


def test_a_missing_prefix_is_put_on_and_not_called_doubled(copy):
    write, state = copy
    plan = audit(write({n.removeprefix("model."): t for n, t in state.items()}))
    assert not notes(plan, "doubled-prefix")
    (step,) = fate(plan, "norm.weight").chain
    assert (step.rule, step.before, step.after) == ("base prefix", "norm.weight", "model.norm.weight")


def test_a_gate_without_its_up_fails_in_the_loaders_own_words(copy):
    write, state = copy
    plan = audit(write({n: t for n, t in state.items() if n != f"{EXPERTS}.2.up_proj.weight"}))
    assert plan.verdict == "fails"
    assert plan.error.startswith("RuntimeError: ")
    (failure,) = plan.failures
    assert failure.parameter == f"{EXPERTS}.gate_up_proj"
    assert "Traceback" not in failure.message
    assert len(failure.names) == 7  # four gates and three ups
    assert {n.name for n in plan.names if n.fate == "not_reached"} == set(failure.names)


def test_one_expert_less_is_a_mismatch_of_the_stack(copy):
    write, state = copy
    plan = audit(write({n: t for n, t in state.items() if f"{EXPERTS}.3." not in n}))
    assert plan.verdict == "fails"
    assert {(m.parameter, m.found, m.wanted) for m in plan.mismatches} == {
        (f"{EXPERTS}.down_proj", "[3, 64, 32]", "[4, 64, 32]"),
        (f"{EXPERTS}.gate_up_proj", "[3, 64, 64]", "[4, 64, 64]"),
    }
    assert fate(plan, f"{EXPERTS}.0.down_proj.weight").fate == "not_reached"
    assert next(p for p in plan.parameters if p.name == f"{EXPERTS}.down_proj").coverage == "none"


def test_a_stray_is_named_as_the_file_names_it(copy):
    write, state = copy
    name = "model.layers.9.mlp.experts.0.up_proj.weight"
    plan = audit(write({**state, name: torch.zeros(32, 64), "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    assert {n.name for n in plan.names if n.fate == "unmatched"} == {name, "model.layers.0.self_attn.q_proj.bias"}
    assert fate(plan, name).into == "model.layers.9.mlp.experts.gate_up_proj"
    assert [s.rule for s in fate(plan, name).chain] == ["convert"]
    assert plan.verdict == "loads_with_loss"


def test_strays_that_are_meant_do_not_lower_the_verdict(copy):
    write, state = copy
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "mtp.fc.weight": torch.zeros(2, 2)}
    plan = audit(write({**state, **extra}))
    assert all(fate(plan, name).fate != "loaded" and fate(plan, name).by_design for name in extra)
    assert plan.verdict == "loads"


def test_bytes_of_another_kind_of_number(copy):
    write, state = copy
    name = "model.layers.0.self_attn.q_proj.weight"
    plan = audit(
        write(
            {
                **state,
                name: torch.zeros(64, 64, dtype=torch.int8),
                "model.norm.weight": state["model.norm.weight"].half(),
            }
        )
    )
    (mismatch,) = plan.mismatches
    assert (mismatch.kind, mismatch.names, mismatch.found, mismatch.wanted) == ("dtype", (name,), "I8", "F32")
    assert notes(plan, "dtype-cast") == [("model.norm.weight",)]


def test_tied_pair(tmp_path):
    build("llama", tmp_path, tie_word_embeddings=True)
    state = load(tmp_path)
    assert "lm_head.weight" not in state  # save_pretrained leaves the tied one out
    plan = audit(tmp_path)
    head = next(p for p in plan.parameters if p.name == "lm_head.weight")
    assert (head.coverage, head.by_design, plan.verdict) == ("none", "tied to model.embed_tokens.weight", "loads")
    save({**state, "lm_head.weight": torch.randn(200, 64)}, tmp_path)
    plan = audit(tmp_path)
    assert [set(names) for names in notes(plan, "tied-both-stored")] == [
        {"lm_head.weight", "model.embed_tokens.weight"}
    ]
    assert [u.topic for u in plan.unjudged] == ["tied"]
    save({n: t for n, t in state.items() if n != "model.embed_tokens.weight"}, tmp_path)
    assert audit(tmp_path).verdict == "loads_with_loss"  # both ends gone: nothing to tie to


def test_a_projection_that_is_cut_goes_into_all_its_parts(tmp_path):
    model = build("kimi_k25", tmp_path)
    plan = audit(tmp_path)
    cut = [n for n in plan.names if n.also]
    assert cut
    for found in cut:
        parts = [model.get_parameter(name) for name in (found.into, *found.also)]
        assert sum(p.numel() for p in parts) == load(tmp_path)[found.name].numel()
    assert plan.verdict == "loads"


def test_index_only_borrows_shapes_and_says_so(moe):
    job = job_of(moe[0])
    bare = tuple(msgspec.structs.replace(t, shape=None, dtype=None) for t in job.tensors)
    plan = loader.run(msgspec.structs.replace(job, tensors=bare, index_only=True), lambda name: b"")
    assert plan.verdict == "loads"
    assert [u.topic for u in plan.unjudged] == ["shapes"]
    assert {n.fate for n in plan.names} == {"loaded"}
    assert {n.read for n in plan.names} == {None}
    less = tuple(t for t in bare if f"{EXPERTS}.3." not in t.name)  # the number of experts is in the names
    plan = loader.run(msgspec.structs.replace(job, tensors=less, index_only=True), lambda name: b"")
    assert {m.parameter for m in plan.mismatches} == {f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"}


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not None}))


def test_a_config_from_a_newer_release_is_told(copy):
    write, state = copy
    folder = write(state)
    edit(folder, transformers_version="5.99.0")
    assert notes(audit(folder), "config-newer") == [()]
    edit(folder, transformers_version="4.40.0")
    assert not notes(audit(folder), "config-newer")


def test_an_unknown_quantisation_is_told_and_the_load_goes_on(copy):
    write, state = copy
    folder = write(state)
    edit(folder, quantization_config={"quant_method": "made-up"})
    plan = audit(folder)
    assert notes(plan, "unknown-quantization") == [()]
    assert plan.verdict == "loads"


@pytest.fixture
def fp8(tmp_path):
    """A folder with a tiny llama, its projections in fp8 with a scale for each block of 32 by 32."""
    build("llama", tmp_path)
    state: dict[str, Any] = {}
    for name, tensor in load(tmp_path).items():
        state[name] = tensor
        if name.endswith("proj.weight"):
            state[name] = tensor.to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = torch.ones(-(-tensor.shape[0] // 32), -(-tensor.shape[1] // 32))
    save(state, tmp_path)
    edit(
        tmp_path,
        quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
    )
    return tmp_path, state


def test_fp8_is_dequantised_without_a_gpu_and_kept_with_one(fp8):
    folder, state = fp8
    name = "model.layers.0.mlp.down_proj.weight"
    plan = audit(folder)
    assert (plan.verdict, plan.mismatches, len(notes(plan, "dequantized"))) == ("loads", (), 1)
    assert fate(plan, f"{name}_scale_inv").into == name  # folded into the weight
    plan = audit(folder, device="cuda")
    assert (plan.verdict, notes(plan, "dequantized"), plan.environment["platform"]) == (
        "loads",
        [],
        "cuda sm90 (pretended)",
    )
    assert fate(plan, f"{name}_scale_inv").into == f"{name}_scale_inv"  # a parameter of its own
    assert len(state) == len(plan.names)


def test_an_fp8_weight_without_its_scale_is_cast_in_silence_and_told(fp8):
    from transformers import LlamaForCausalLM

    folder, state = fp8
    name = "model.layers.0.mlp.down_proj.weight"
    save({n: t for n, t in state.items() if n != f"{name}_scale_inv"}, folder)
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]  # the real loader has no word for it
    assert torch.equal(model.get_parameter(name), state[name].to(model.dtype))
    (mismatch,) = audit(folder).mismatches
    assert (mismatch.kind, mismatch.names, mismatch.found) == ("dtype", (name,), "F8_E4M3")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "no_such_model", "architectures": ["NoSuchModel"]}, "no_such_model"),
        ({"model_type": "no_such_model"}, "--class Qwen3MoeForCausalLM"),
        ({"model_type": "no_such_model", "auto_map": {"AutoModelForCausalLM": "m.M"}}, "--trust-remote-code"),
        ({"model_type": None, "_class_name": "FluxTransformer2DModel"}, "diffusers"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "optimum"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "gptqmodel"),
    ],
)
def test_what_stands_in_the_way_is_not_judged(copy, changes, says):
    write, state = copy
    folder = write(state)
    edit(folder, **changes)
    plan = audit(folder)
    assert plan.verdict == "not_judged"
    assert says in plan.not_judged
    assert plan.error is None


@pytest.mark.parametrize("config", [b"", b"[]", b"\xff", b"{", b'{"a":' * 9999 + b"1" + b"}" * 9999])
def test_a_config_that_is_no_config_is_not_judged(copy, config):
    write, state = copy
    folder = write(state)
    (folder / "config.json").write_bytes(config)
    assert audit(folder).verdict == "not_judged"


def test_infinity_in_a_config_is_read_as_transformers_reads_it(copy):
    """`"time_step_limit": [0.0, Infinity]` is in real Mamba configs: no JSON by the book, written and read by Python's json."""
    write, state = copy
    folder = write(state)
    config = json.loads((folder / "config.json").read_text()) | {"time_step_limit": [0.0, float("inf")]}
    (folder / "config.json").write_text(json.dumps(config))
    assert "Infinity" in (folder / "config.json").read_text()
    assert audit(folder).verdict == "loads"


def test_a_config_that_the_class_refuses_fails(copy):
    from transformers import Qwen3MoeForCausalLM

    write, state = copy
    folder = write(state)
    edit(folder, hidden_act="no_such_activation")
    with pytest.raises(Exception) as real:  # noqa: PT011  (whatever it is, the plan must have the same)
        Qwen3MoeForCausalLM.from_pretrained(folder)
    plan = audit(folder)
    assert plan.error.startswith(f"{type(real.value).__name__}: ")
    assert {n.fate for n in plan.names} == {"not_reached"}


def test_another_class_by_name(copy):
    write, state = copy
    plan = audit(write(state), class_name="Qwen3MoeModel")
    assert plan.architecture == "Qwen3MoeModel"
    assert {n.name for n in plan.names if n.fate == "unmatched"} == {"lm_head.weight"}
    assert "NoSuchClass" in audit(write(state), class_name="NoSuchClass").not_judged


REMOTE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class TinyConfig(PretrainedConfig):
    model_type = "tiny_remote"
    def __init__(self, size=4, **kw):
        self.size = size
        super().__init__(**kw)

class TinyModel(PreTrainedModel):
    config_class = TinyConfig
    def __init__(self, config):
        super().__init__(config)
        self.one = torch.nn.Linear(config.size, config.size)
        self.post_init()
"""


def test_code_of_the_repo_runs_only_when_asked(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "modeling_tiny.py").write_text(f"open({str(marker)!r}, 'w').close()\n{REMOTE}")
    auto_map = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"}
    config = {"model_type": "tiny_remote", "architectures": ["TinyModel"], "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save({"one.weight": torch.zeros(4, 4), "two.weight": torch.zeros(4)}, tmp_path)
    assert "--trust-remote-code" in audit(tmp_path).not_judged
    assert not marker.exists()
    plan = audit(tmp_path, trust_remote_code=True)
    assert marker.exists()
    assert plan.architecture == "TinyModel"
    assert {n.name: n.fate for n in plan.names} == {"one.weight": "loaded", "two.weight": "unmatched"}
    assert [p.name for p in plan.parameters if p.coverage == "none"] == ["one.bias"]


def test_an_auto_map_that_names_nothing_leaves_the_class_to_the_config(copy):
    write, state = copy
    folder = write(state)
    edit(folder, auto_map=["AutoModel"])
    assert (
        audit(folder, trust_remote_code=True).verdict == "loads"
    )  # AutoModel looks for its own name in it, and finds none


def test_a_mistake_of_the_observer_is_not_blamed_on_the_checkpoint(copy, monkeypatch):
    write, state = copy
    monkeypatch.setattr(observe._Hooks, "adjust_keys", lambda self, model, info: naming.printable(1))
    with pytest.raises(TypeError):  # which the worker tells as its own breakdown: not judged
        audit(write(state))


def test_files_of_the_repo_stay_in_their_folder(copy, tmp_path):
    write, state = copy
    job = job_of(write(state))
    texts = {
        **job.texts,
        "../escaped.json": b"{}",
        "/tmp/escaped-absolute.json": b"{}",
        "sub/../../escaped.json": b"{}",
    }
    assert loader.run(msgspec.structs.replace(job, texts=texts), lambda name: b"").verdict == "loads"
    assert not list(tmp_path.parent.rglob("escaped*"))
    assert not Path("/tmp/escaped-absolute.json").exists()


def test_mxfp4_blocks_without_their_scales_fail_as_they_do_for_real(tmp_path):
    build("gpt_oss", tmp_path)
    state: dict[str, Any] = {}
    for name, tensor in load(tmp_path).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = tensor.shape
            state[f"{name}_blocks"] = torch.zeros(experts, outer, inner // 32, 16, dtype=torch.uint8)
            state[f"{name}_scales"] = torch.zeros(experts, outer, inner // 32, dtype=torch.uint8)
        else:
            state[name] = tensor
    edit(tmp_path, quantization_config={"quant_method": "mxfp4"})
    save(state, tmp_path)
    plan = audit(tmp_path)
    assert plan.verdict == "loads"
    assert fate(plan, "model.layers.0.mlp.experts.down_proj_scales").into == "model.layers.0.mlp.experts.down_proj"
    lone = "model.layers.1.mlp.experts.down_proj_blocks"
    save({n: t for n, t in state.items() if n != lone.replace("blocks", "scales")}, tmp_path)
    from transformers import GptOssForCausalLM

    with pytest.raises(RuntimeError) as real:
        GptOssForCausalLM.from_pretrained(tmp_path)
    plan = audit(tmp_path)
    assert plan.error == f"RuntimeError: {real.value}"
    assert [f.names for f in plan.failures] == [(lone,)]


def test_a_second_shard_takes_part(copy, tmp_path):
    write, state = copy
    write({n: t for n, t in state.items() if "layers.1" not in n})
    half = audit(tmp_path)
    assert half.verdict == "loads_with_loss"
    save({n: t for n, t in state.items() if "layers.1" in n}, tmp_path, "other.safetensors")
    assert audit(tmp_path).verdict == "loads"


def test_names_and_dtypes_that_nobody_meant(moe):
    from ckaudit.checkpoint import TensorSpec

    job = job_of(moe[0])
    hostile = [
        "",
        ".",
        "..",
        "../../x",
        "a\0b",
        "model..norm",
        "model.norm.weight\n",
        "model.",
        "\x1b[31m",
        "model.layers.-1.x",
    ]
    extra = [TensorSpec(name, "model.safetensors", "F32", (1,), 4) for name in hostile]
    odd = [
        TensorSpec("six.bits", "model.safetensors", "F6_E2M3", (4,), 3),
        TensorSpec("no.dtype", "model.safetensors", "F99", (4,), 4),
        TensorSpec("too.big", "model.safetensors", "F32", (2**40, 2**40), None),
        TensorSpec("four.bits", "model.safetensors", "F4", (4, 8), 16),
    ]
    plan = loader.run(msgspec.structs.replace(job, tensors=(*job.tensors, *extra, *odd)), lambda name: b"")
    assert plan.not_judged is None
    assert {n.name for n in plan.names if n.fate == "unmatched"} == {*hostile, *(spec.name for spec in odd)}
    (unjudged,) = plan.unjudged
    assert unjudged.topic == "dtypes"
    assert "3 of" in unjudged.reason
