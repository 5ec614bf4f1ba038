"""What is said of adapters is what the released PEFT does: tiny models of several kinds, adapters that it saved itself and spoilt ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="peft is not installed (it is in the extra `dev`)")
torch = pytest.importorskip("torch", reason="torch is not installed")

import transformers  # noqa: E402
from peft import (  # noqa: E402
    AdaLoraConfig,
    FourierFTConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PromptTuningConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file  # noqa: E402

from ckaudit.adapters import recognise  # noqa: E402
from ckaudit.adapters.base import Base  # noqa: E402
from ckaudit.adapters.binding import bind_all  # noqa: E402
from ckaudit.checkpoint import read_checkpoint  # noqa: E402
from ckaudit.checks import adapters as checks  # noqa: E402
from ckaudit.engines import EngineOptions, select  # noqa: E402
from ckaudit.plan import Plan  # noqa: E402
from ckaudit.progress import NullProgress  # noqa: E402
from ckaudit.source import open_source  # noqa: E402
from tests.adapter_toys import CONFIG, ROOT  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = SMALL | {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
MLA = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)),
    "qwen2_moe": lambda: transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(**EXPERTS, num_experts=4, shared_expert_intermediate_size=12)
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, head_dim=4)),
    "deepseek_v3": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **EXPERTS, **MLA, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1
        )
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4)),
    "gemma3": lambda: transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=SMALL | {"head_dim": 4}, mm_tokens_per_image=4,
            vision_config={
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14,
            },
        )
    ),
    "qwen2_vl": lambda: transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(
            text_config=SMALL | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}},
            vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2},
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Base, Plan]]:
    """A tiny model of each kind, saved, and what the transformers engine makes of it; each once."""

    @cache
    def make(kind: str) -> tuple[Base, Plan]:
        at = tmp_path_factory.mktemp(kind)
        MODELS[kind]().save_pretrained(at)
        checkpoint = read_checkpoint(open_source(str(at)))
        plan = select("transformers")[0].plan(checkpoint, EngineOptions(cache=False), NullProgress())
        assert plan.verdict == "loads", plan
        return Base(checkpoint), plan

    return make


def ours(at: Path, base: Base, plan: Plan) -> tuple[set[str], list[str], str | None]:
    """Paths of the base that ckaudit says are served, the checks that find something, and the error that is predicted."""
    found = recognise(read_checkpoint(open_source(str(at))))
    assert found is not None
    (binding,) = bind_all(found, base, [plan])
    findings, _ = checks.run(found, base, [binding])
    served = {o.into or "" for o in binding.outcomes if o.state == "bound"}
    return served, sorted(f.check for f in findings if f.severity != "note"), binding.plan.error


def theirs(at: Path, model: Any) -> set[str]:
    """Modules, or parameters of fused experts, whose first factor PEFT fills from the file. Factors in it are all ones."""
    loaded = PeftModel.from_pretrained(model, at)
    filled = set()
    for name, parameter in loaded.named_parameters():
        if ("lora_A" in name or "lora_embedding_A" in name) and bool((parameter == 1).all()):
            path = name.removeprefix(ROOT).partition(".lora_")[0]
            if path.endswith("experts.base_layer"):
                path = path.removesuffix("base_layer") + "gate_up_proj"
            filled.add(f"{path}.down_proj" if path.endswith("experts") else path)
    return filled


def write(at: Path, modules: Mapping[str, tuple[int, int]], root: str = ROOT, **config: Any) -> Path:
    """An adapter with these modules (outputs, inputs), every factor ones."""
    rank = config.get("rank", 4)
    tensors = {}
    for path, (out, inner) in modules.items():
        tensors[f"{root}{path}.lora_A.weight"] = torch.ones(rank, inner)
        tensors[f"{root}{path}.lora_B.weight"] = torch.ones(out, rank)
    save_file(tensors, at / "adapter_model.safetensors")
    (at / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return at


SAVES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    ("llama", {"target_modules": "all-linear"}),
    ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    ("llama", {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}),
    ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    ("llama", {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 2}, "exclude_modules": ["layers.0.self_attn.q_proj"]}),
    ("llama", {"target_modules": ["q_proj"], "bias": "lora_only", "lora_bias": False}),
    ("llama", {"target_modules": r".*layers\.\d+\.mlp\.(gate|up)_proj"}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ("gpt2", {"target_modules": ["c_attn"]}),
    ("qwen2_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    ("qwen2_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}),
    ("qwen2_vl", {"target_modules": ["q_proj", "v_proj"]}),
    ("qwen2_vl", {"target_modules": ["qkv", "q_proj", "fc1"]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "config"), SAVES, ids=lambda v: v if isinstance(v, str) else json.dumps(v)[:50])
def test_what_peft_saves_is_clean_and_binds_whole(
    kind: str, config: dict[str, Any], laid: Callable[[str], tuple[Base, Plan]], tmp_path: Path
) -> None:
    model = get_peft_model(MODELS[kind](), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.fill_(1)
    model.save_pretrained(tmp_path)
    served, found, error = ours(tmp_path, *laid(kind))
    assert found == []
    assert error is None
    assert served == theirs(tmp_path, MODELS[kind]())
    assert served


QV: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
SQUARE: dict[str, Any] = QV | {"target_modules": ["q_proj"]}
OTHERS: dict[str, tuple[Callable[[], Any], int]] = {
    "loha": (lambda: LoHaConfig(r=4, **QV), 4), "lokr": (lambda: LoKrConfig(r=4, **QV), 4), "vera": (lambda: VeraConfig(r=4, **SQUARE), 2),
    "oft": (lambda: OFTConfig(r=0, oft_block_size=4, **QV), 4), "fourier": (lambda: FourierFTConfig(n_frequency=10, **QV), 4),
    "vblora": (lambda: VBLoRAConfig(r=4, num_vectors=8, vector_length=8, topk=2, **QV), 4),
    "ia3": (lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"), 4),
    "adalora": (lambda: AdaLoraConfig(init_r=4, target_r=2, total_step=10, **QV), 4),
    "layer norms": (lambda: LNTuningConfig(target_modules=["input_layernorm", "norm"], task_type="CAUSAL_LM"), 3),
    "some tokens": (lambda: TrainableTokensConfig(token_indices=[1, 2], task_type="CAUSAL_LM"), 1),
    "some tokens beside": (lambda: LoraConfig(r=4, trainable_token_indices=[1, 2], **QV), 5),
}  # fmt: skip
"""Other methods than LoRA, with the number of modules that each adapts in a model of two layers."""


@pytest.mark.parametrize(("config", "modules"), OTHERS.values(), ids=OTHERS)
def test_other_methods_bind_as_peft_saved_them(
    config: Callable[[], Any], modules: int, laid: Callable[[str], tuple[Base, Plan]], tmp_path: Path
) -> None:
    get_peft_model(MODELS["llama"](), config()).save_pretrained(tmp_path)
    served, found, error = ours(tmp_path, *laid("llama"))
    assert (len(served), found, error) == (modules, [], None)


def test_a_method_that_adapts_no_module_is_not_judged(laid: Callable[[str], tuple[Base, Plan]], tmp_path: Path) -> None:
    get_peft_model(MODELS["llama"](), PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).save_pretrained(
        tmp_path
    )
    found = recognise(read_checkpoint(open_source(str(tmp_path))))
    assert found is not None
    base, plan = laid("llama")
    (first, *_) = bind_all(found, base, [plan])
    assert first.plan.verdict == "not_judged"
    assert "PROMPT_TUNING" in (first.plan.not_judged or "")


LAYERS = range(2)
Q = {"target_modules": ["q_proj"]}
SPOILT: dict[str, tuple[str, dict[str, tuple[int, int]], dict[str, Any], list[str]]] = {
    "a prefix twice": ("llama", {f"model.model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, Q, ["CK901"]),
    "no prefix": ("llama", {f"layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, Q, ["CK901"]),
    "one layer elsewhere": (
        "llama", {"model.layers.0.self_attn.q_proj": (16, 16), "layers.1.self_attn.q_proj": (16, 16)}, Q, ["CK902"],
    ),
    "not targeted": (
        "llama", {f"model.layers.{i}.self_attn.{p}_proj": (16, 16) for i in LAYERS for p in "qo"}, Q, ["CK909"],
    ),
    "a layer that was not saved": ("llama", {"model.layers.0.self_attn.q_proj": (16, 16)}, Q, ["CK907"]),
    "the text class's names": ("qwen2_vl", {f"model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, Q, ["CK901"]),
    "an older class's names": (
        "qwen2_vl", {f"language_model.model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, Q, ["CK901"],
    ),
    "an older class's names, which PEFT knows": (
        "gemma3", {f"language_model.model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}
        | {f"vision_tower.vision_model.encoder.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, Q, [],
    ),
    "this class's names": (
        "gemma3", {f"model.language_model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}
        | {f"model.vision_tower.encoder.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, Q, [],
    ),
    "Gemma's text class's names": (
        "gemma3", {f"model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, Q, ["CK901"],
    ),
    "a name that lacks the root alone": (
        "gemma3", {f"language_model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, Q, ["CK901"],
    ),
    "experts under an older path": (
        "mixtral", {f"model.layers.{i}.block_sparse_moe.experts.{e}.{w}": (16, 24) if w == "w2" else (24, 16)
                    for i in LAYERS for e in range(4) for w in ("w1", "w2", "w3")},
        {"target_modules": ["w1", "w2", "w3"]}, [],
    ),
    "a shared expert": (
        "deepseek_v3", {"model.layers.1.mlp.shared_experts.down_proj": (16, 8)},
        {"target_modules": ["model.layers.1.mlp.shared_experts.down_proj"]}, ["CK909"],
    ),
    "a shared expert and a dense layer": (
        "deepseek_v3", {"model.layers.1.mlp.shared_experts.down_proj": (16, 8), "model.layers.0.mlp.down_proj": (16, 24)},
        {"target_modules": ["down_proj"]}, ["CK909"],
    ),
    "single experts of a type that PEFT does not convert": (
        "qwen2_moe", {f"model.layers.{i}.mlp.experts.{e}.down_proj": (16, 8) for i in LAYERS for e in range(4)}
        | {f"model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS},
        {"target_modules": ["q_proj", "down_proj"]}, ["CK902"],
    ),
    "single experts of a type that PEFT converts": (
        "qwen3_moe", {f"model.layers.{i}.mlp.experts.{e}.{p}_proj": (16, 8) if p == "down" else (8, 16)
                      for i in LAYERS for e in range(4) for p in ("gate", "up", "down")},
        {"target_modules": ["gate_proj", "up_proj", "down_proj"]}, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT.values(), ids=SPOILT)
def test_what_peft_passes_over(
    case: tuple[str, dict[str, tuple[int, int]], dict[str, Any], list[str]], laid: Callable[[str], tuple[Base, Plan]], tmp_path: Path
) -> None:  # fmt: skip
    kind, modules, config, expected = case
    served, found, error = ours(write(tmp_path, modules, **config), *laid(kind))
    assert served == theirs(tmp_path, MODELS[kind]())
    assert (found, error) == (expected, None)


def test_no_configuration(laid: Callable[[str], tuple[Base, Plan]], tmp_path: Path) -> None:
    at = write(tmp_path, {f"model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, **Q)
    (at / "adapter_config.json").unlink()
    _, found, error = ours(at, *laid("llama"))
    assert found == ["CK910"]
    assert error is not None
    with pytest.raises(ValueError, match=r"Can't find 'adapter_config\.json'"):
        theirs(at, MODELS["llama"]())


def test_names_without_the_root(laid: Callable[[str], tuple[Base, Plan]], tmp_path: Path) -> None:
    at = write(tmp_path, {f"model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, root="", **Q)
    _, found, _ = ours(at, *laid("llama"))
    assert found == ["CK902"]
    assert theirs(at, MODELS["llama"]()) == set()
    model = MODELS["llama"]()
    model.load_adapter(str(at))
    assert all(bool((p == 1).all()) for n, p in model.named_parameters() if "lora_A" in n)


@pytest.mark.parametrize(
    "spoil",
    [{"r": 8}, {"rank_pattern": {"layers.0.self_attn.q_proj": 8}}, {"size": (16, 8)}],
    ids=["rank", "rank pattern", "size"],
)
def test_what_peft_raises_on(spoil: dict[str, Any], laid: Callable[[str], tuple[Base, Plan]], tmp_path: Path) -> None:
    size = spoil.pop("size", (16, 16))
    at = write(
        tmp_path, {f"model.layers.{i}.self_attn.q_proj": size for i in LAYERS}, target_modules=["q_proj"], **spoil
    )
    _, found, error = ours(at, *laid("llama"))
    assert found == ["CK903"]
    assert error is not None
    assert "size mismatch" in error
    with pytest.raises(RuntimeError, match="size mismatch"):
        theirs(at, MODELS["llama"]())


@pytest.mark.parametrize(
    ("config", "head", "error"),
    [
        ({"modules_to_save": ["lm_head"]}, (40, 16), RuntimeError), ({"modules_to_save": ["lm_head"]}, None, KeyError),
        ({"modules_to_save": ["lm_head"]}, (32, 16), None), ({}, (40, 16), RuntimeError), ({"peft_type": "lora"}, None, KeyError),
        ({"peft_type": "NEWER"}, None, KeyError),
    ],
)  # fmt: skip
def test_whole_tensors_and_methods(
    config: dict[str, Any], head: tuple[int, int] | None, error: type[Exception] | None, laid: Callable[[str], tuple[Base, Plan]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """A head that was trained whole, of another size, not there; a method that PEFT does not know."""
    at = write(tmp_path, {f"model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, **Q, **config)
    if head is not None:
        tensors = load_file(at / "adapter_model.safetensors")
        save_file(tensors | {f"{ROOT}lm_head.weight": torch.ones(*head)}, at / "adapter_model.safetensors")
    _, found, predicted = ours(at, *laid("llama"))
    if error is None:
        assert (found, predicted) == ([], None)
        assert theirs(at, MODELS["llama"]())
        return
    assert len(found) == 1
    assert predicted is not None
    assert error.__name__ in predicted
    with pytest.raises(error):
        theirs(at, MODELS["llama"]())


def test_the_key_mapping_that_is_told_works(laid: Callable[[str], tuple[Base, Plan]], tmp_path: Path) -> None:
    at = write(tmp_path, {f"model.layers.{i}.self_attn.q_proj": (16, 16) for i in LAYERS}, target_modules=["q_proj"])
    base, plan = laid("qwen2_vl")
    found = recognise(read_checkpoint(open_source(str(at))))
    assert found is not None
    findings, _ = checks.run(found, base, bind_all(found, base, [plan]))
    (mend,) = [f.mend for f in findings if f.check == "CK901"]
    mapping = json.loads(mend.partition("key_mapping=")[2].removesuffix(")."))
    loaded = PeftModel.from_pretrained(MODELS["qwen2_vl"](), at, key_mapping=mapping)
    factors = [p for n, p in loaded.named_parameters() if "lora_A" in n]
    assert len(factors) == 2
    assert all(bool((p == 1).all()) for p in factors)
