"""Loads for real: every architecture, every planted fault, and every way for a load to end early."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from ckaudit.checkpoint import Checkpoint, read_checkpoint  # noqa: E402
from ckaudit.checks import behaviour, values  # noqa: E402
from ckaudit.errors import CkauditError, UsageError  # noqa: E402
from ckaudit.materialize import LoadOptions, LoadResult, child, host, load, needed_files, processed  # noqa: E402
from ckaudit.materialize import loading as loading_module  # noqa: E402
from ckaudit.materialize.classes import pick  # noqa: E402
from ckaudit.materialize.estimate import estimate, require  # noqa: E402
from ckaudit.materialize.job import Event  # noqa: E402
from ckaudit.materialize.layout import Stored  # noqa: E402
from ckaudit.materialize.stream import DeviceStream  # noqa: E402
from ckaudit.materialize.watch import Watch  # noqa: E402
from ckaudit.source import open_source  # noqa: E402
from tests import tiny_models  # noqa: E402

KINDS = {
    "gpt2": ["text"], "qwen3_moe": ["text"], "mixtral": ["text"], "deepseek_v3": ["text"], "mamba": ["text"], "bert": ["text"],
    "t5": ["text"], "bart": ["text"], "vit": ["image"], "clip": ["image"], "whisper": ["audio"], "wav2vec2": ["audio"],
    "llava": ["text", "image"], "qwen2_vl": ["text", "image", "video"], "gemma3": ["text", "image"], "qwen2_audio": ["text", "audio"],
    "minicpm": ["text", "image", "video"], "llama": ["text"],
}  # fmt: skip


def checkpoint(folder: Path) -> Checkpoint:
    return read_checkpoint(open_source(str(folder)))


def run(folder: Path, **options: Any) -> LoadResult:
    """A load in this process: what the child does, without the seconds that it takes to start one."""
    job = host.make_job(checkpoint(folder), folder if folder.is_dir() else folder.parent, LoadOptions(**options))
    told: dict[str, Any] = {"load": None, "forward": None, "observed": None}
    last: list[Event] = []

    def hear(event: Event) -> None:
        for key in told:
            told[key] = getattr(event, key) or told[key]
        last.append(event)

    child.run(job, hear)
    end = last[-1]
    assert end.done
    told["load"] |= {"error": end.error, "blame": end.blame}
    seen, unread = values.run(told["observed"]) if told["observed"] is not None else ((), ())
    behaved, not_run = behaviour.run(told["load"], told["forward"], values=seen)
    findings, skips = (*seen, *behaved), (*unread, *not_run)
    return LoadResult(**told, findings=findings, skips=skips, error=end.error, environment=end.blame == "environment")


def spoil(folder: Path, change: Any) -> None:
    """Rewrite the one shard of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def checks(result: LoadResult) -> dict[str, tuple[str, ...]]:
    return {f.check: f.names for f in result.findings}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"))


def copied(source: Path, folder: Path) -> Path:
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_loads_as_in_the_stock_loader_and_runs(kind: str, tmp_path: Path) -> None:
    tiny_models.save(kind, tmp_path)
    result = run(tmp_path)
    assert result.error is None
    assert result.load["status"] == "complete"
    assert (result.load["missing"], result.load["unexpected"], result.load["mismatched"]) == ([], [], [])
    assert result.load["bytes"] == sum(t.nbytes or 0 for t in checkpoint(tmp_path).tensors.values())
    assert result.forward is not None
    runs = {r["kind"]: r for r in result.forward["runs"]}
    assert {k: (r["status"], r["finite"]) for k, r in runs.items()} == dict.fromkeys(KINDS[kind], ("ran", True))
    assert all(r["inputs"].get("input_ids", [1, 64])[1] >= 64 for r in runs.values())
    assert result.findings == ()


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral", "deepseek_v3", "minicpm"])
@pytest.mark.parametrize("ahead", [1 << 62, 4096])
def test_the_stream_gives_the_loader_what_its_own_reader_gives(
    kind: str, ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a GPU, on the CPU: the same threads, layouts and joins, and copies that are not asynchronous."""
    tiny_models.save(kind, tmp_path, shard="20KB")
    from ckaudit.materialize.handover import handed_over, join_patterns, settle
    from ckaudit.materialize.hostmap import MappedFiles
    from ckaudit.materialize.layout import plan

    job = host.make_job(checkpoint(tmp_path), tmp_path, LoadOptions())
    cls, config = pick(job.folder, job.options)
    joins = join_patterns([c.model_type for c in loading_module.sub_configs(config)])
    layout = plan(job.tensors, loading_module_key(), joins, 1000)
    files = MappedFiles(job.files)
    with DeviceStream(layout, job.files, torch.device("cpu"), readers=3, ahead=ahead) as stream:
        with handed_over(layout, job.files, job.tensors, stream, files.read):
            model, info = cls.from_pretrained(
                job.folder, config=config, output_loading_info=True, device_map={"": "cpu"}
            )
            settle(model)
        stream.join()
    stock = cls.from_pretrained(job.folder)
    ours, theirs = model.state_dict(), stock.state_dict()
    assert ours.keys() == theirs.keys()
    assert [k for k in theirs if not torch.equal(ours[k], theirs[k])] == []
    assert all(p.is_contiguous() for p in model.parameters())
    assert not info["missing_keys"]
    if kind in ("qwen3_moe", "mixtral", "deepseek_v3"):
        # Fused without a copy: the parameter fills the allocation that its experts were read into.
        fused = next(p for n, p in model.named_parameters() if n.endswith("experts.gate_up_proj"))
        assert fused.untyped_storage().nbytes() == fused.nbytes
        assert len(layout.arenas) < len(layout.tensors)


def as_fp8(folder: Path, block: int = 128) -> None:
    """A checkpoint of FP8 weights with a scale for each block of 128 x 128, as DeepSeek's are, or of another size."""

    def change(tensors: dict[str, Any]) -> None:
        for name in [n for n, t in tensors.items() if t.dim() == 2 and "proj" in n]:
            rows, columns = (-(-size // block) for size in tensors[name].shape)
            tensors[f"{name}_scale_inv"] = torch.full((rows, columns), 0.001)
            tensors[name] = (tensors[name].float() / 0.001).clamp(-448, 448).to(torch.float8_e4m3fn)

    spoil(folder, change)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_fp8_is_made_into_what_the_stock_loader_makes_of_it(kind: str, tmp_path: Path) -> None:
    import transformers

    tiny_models.save(kind, tmp_path)
    as_fp8(tmp_path)
    result = run(tmp_path)
    assert (result.error, result.findings) == (None, ())
    assert result.load["estimate"]["casts"]
    assert result.observed is not None
    assert {s.dtype for s in result.observed.stats} == {"BF16", "F32", "F8_E4M3"}  # values as they are stored
    job = host.make_job(checkpoint(tmp_path), tmp_path, LoadOptions())
    cls, config = pick(job.folder, job.options)
    needed = loading_module.expected_memory(job, config)
    ours = loading_module.load(job, cls, config, needed, Watch(lambda _event: None)).model.state_dict()
    theirs = getattr(transformers, cls.__name__).from_pretrained(tmp_path).state_dict()
    assert [k for k in theirs if not torch.equal(ours[k], theirs[k])] == []


@pytest.mark.parametrize("lost", ["all of it", "one of its rows"])
def test_a_scale_of_zero_leaves_nothing_of_a_weight_and_a_row_of_zeros_leaves_the_others(
    lost: str, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"

    def plant(tensors: dict[str, Any]) -> None:
        (tensors[name] if lost == "all of it" else tensors[name][0]).zero_()

    tiny_models.save("llama", tmp_path)
    as_fp8(tmp_path, block=16)
    spoil(tmp_path, plant)
    result = run(tmp_path)
    assert checks(result) == ({"CK502": (name,)} if lost == "all of it" else {})
    assert [f.severity for f in result.findings] == (["error"] if lost == "all of it" else [])


def loading_module_key() -> Any:
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key


DIFFUSION: dict[str, dict[str, Any]] = {
    "DiTTransformer2DModel": {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "norm_num_groups": 4},
    "SD3Transformer2DModel": {
        "sample_size": 16, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 32,
        "caption_projection_dim": 16, "pooled_projection_dim": 16, "in_channels": 4, "pos_embed_max_size": 16,
    },
    "FluxTransformer2DModel": {
        "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": [4, 4, 8], "guidance_embeds": True,
    },
    "PixArtTransformer2DModel": {
        "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 16, "cross_attention_dim": 16,
        "caption_channels": 24, "norm_num_groups": 4, "in_channels": 4, "use_additional_conditions": False,
    },
    "WanTransformer3DModel": {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16,
        "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
    },
    "UNet2DConditionModel": {
        "sample_size": 16, "block_out_channels": [16, 32], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "layers_per_block": 1, "cross_attention_dim": 16, "attention_head_dim": 4,
        "norm_num_groups": 4,
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # diffusers warns of its own future
@pytest.mark.parametrize("kind", DIFFUSION)
def test_a_diffusion_model_loads_and_runs_on_latents(kind: str, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**DIFFUSION[kind])
    for parameter in model.parameters():  # as if trained: the last projections start at zero
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(tmp_path)
    result = run(tmp_path)
    assert result.error is None
    assert (result.load["engine"], result.load["class"], result.load["missing"]) == ("diffusers", kind, [])
    assert result.forward is not None
    assert [(r["kind"], r["status"], r["finite"]) for r in result.forward["runs"]] == [("latent", "ran", True)]
    assert result.findings == ()
    name = next(n for n, p in model.named_parameters() if p.dim() > 1)
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors[name].flatten()[3] = math.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    assert checks(run(tmp_path))["CK501"] == (name,)


# --- faults in values


def test_values_that_are_not_finite_are_found_though_they_are_one_in_ten_thousand(llama: Path, tmp_path: Path) -> None:
    def plant(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.self_attn.q_proj.weight"][3, 5] = math.nan

    spoil(copied(llama, tmp_path), plant)
    result = run(tmp_path)
    assert checks(result)["CK501"] == ("model.layers.1.self_attn.q_proj.weight",)
    assert checks(result)["CK603"] == ("model.layers.1.self_attn.q_proj",)
    assert {f.blame for f in result.findings if f.check == "CK603"} == {"checkpoint"}


def test_inf_is_told_where_it_comes_from_and_not_where_it_becomes_nan(llama: Path, tmp_path: Path) -> None:
    def plant(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = math.inf

    spoil(copied(llama, tmp_path), plant)
    found = checks(run(tmp_path))
    assert (found["CK501"], found["CK603"]) == (
        ("model.layers.0.mlp.down_proj.weight",),
        ("model.layers.0.mlp.down_proj",),
    )


@pytest.mark.parametrize(
    ("raised", "environment"),
    [
        (
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
            True,
        ),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_memory_that_runs_out_in_the_forward_pass_is_no_fault_of_the_model(
    raised: str, environment: bool, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, use_cache: bool = False) -> Any:
        raise RuntimeError(raised)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    result = run(llama)
    assert result.environment is environment
    assert ("CK602" in checks(result)) is not environment


def test_a_dtype_that_the_device_cannot_compute_is_a_skip(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FNet's Fourier transform of half precision on a CPU."""
    from transformers import LlamaForCausalLM

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, use_cache: bool = False) -> Any:
        raise RuntimeError("Unsupported dtype Half")

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    result = run(llama)
    assert result.forward is not None
    assert [r["status"] for r in result.forward["runs"]] == ["not_run"]
    assert "CK602" not in checks(result)
    assert {s.check for s in result.skips} >= {"CK602", "CK603"}


def test_sound_weights_that_give_nan_are_not_the_culprit(llama: Path, tmp_path: Path) -> None:
    """A mean square of at most 1, less 2: there is no root."""
    config = copied(llama, tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": -2.0}))
    result = run(tmp_path)
    assert {f.check: f.blame for f in result.findings} == {"CK603": "undecidable"}


def test_a_matrix_of_zeros_and_a_constant_one(llama: Path, tmp_path: Path) -> None:
    def plant(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].zero_()
        tensors["model.layers.1.mlp.up_proj.weight"].fill_(0.5)

    spoil(copied(llama, tmp_path), plant)
    assert checks(run(tmp_path, forward=False)) == {
        "CK502": ("model.layers.0.mlp.up_proj.weight",),
        "CK503": ("model.layers.1.mlp.up_proj.weight",),
    }


def test_a_layer_stored_twice_is_found_by_its_bytes(llama: Path, tmp_path: Path) -> None:
    def plant(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].clone()

    spoil(copied(llama, tmp_path), plant)
    pair = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")
    assert checks(run(tmp_path, forward=False)) == {"CK507": pair}


def test_a_parameter_without_a_tensor_keeps_its_initialisation(llama: Path, tmp_path: Path) -> None:
    spoil(copied(llama, tmp_path), lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert checks(run(tmp_path, forward=False)) == {"CK505": ("model.layers.1.mlp.up_proj.weight",)}


def test_a_tie_that_the_checkpoint_contradicts(llama: Path, tmp_path: Path) -> None:
    config = json.loads((copied(llama, tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    pair = ("lm_head.weight", "model.embed_tokens.weight")
    assert checks(run(tmp_path, forward=False)) == {"CK508": pair}
    spoil(tmp_path, lambda t: t.__setitem__("lm_head.weight", t["model.embed_tokens.weight"].clone()))
    assert checks(run(tmp_path, forward=False)) == {}  # both stored, and equal: a tie that holds


def test_an_untrained_model_says_so(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=300
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    found = checks(run(tmp_path, forward=False))
    assert set(found) == {"CK506"}
    assert "model.layers.0.mlp.up_proj.weight" in found["CK506"]
    spoil(tmp_path, lambda t: [v.mul_(1.05) for v in t.values() if v.dim() == 2])
    assert checks(run(tmp_path, forward=False)) == {}  # the same shape of distribution, another deviation


# --- behaviour


def test_a_fingerprint_is_the_same_again_and_another_with_another_weight(llama: Path, tmp_path: Path) -> None:
    first = run(llama)
    assert first.forward is not None
    expected = behaviour.fingerprints({"forward": first.forward})
    again = run(llama)
    assert again.forward is not None
    assert behaviour.compare(again.forward, expected, 1e-6)["matched"]
    spoil(copied(llama, tmp_path), lambda t: t["lm_head.weight"].mul_(1.5))
    other = run(tmp_path)
    assert other.forward is not None
    assert not behaviour.compare(other.forward, expected, 0.05)["matched"]


def test_pictures_that_a_config_has_no_placeholder_for_are_looked_at_all_the_same(tmp_path: Path) -> None:
    """As MiniCPM-V 4.6's config stands in transformers: no ids for image and video. One stands in, and the vision tower runs."""
    tiny_models.save("minicpm", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["image_token_id"] is None
    result = run(tmp_path, modalities=("video",))
    assert result.forward is not None
    (one,) = result.forward["runs"]
    assert (one["kind"], one["status"], one["finite"]) == ("video", "ran", True)
    assert "pixel_values_videos" in one["inputs"]
    if result.load["release"] != "5.17.0":  # which keeps to itself what the vision tower gave
        assert any(name.startswith("video_outputs") for name in one["outputs"])


def test_nan_in_the_vision_tower_is_found_by_the_pictures(tmp_path: Path) -> None:
    tiny_models.save("minicpm", tmp_path)
    name = "model.vision_tower.encoder.layers.0.self_attn.k_proj.weight"
    spoil(tmp_path, lambda t: t[name].fill_(math.nan))
    result = run(tmp_path)
    assert checks(result)["CK501"] == (name,)
    assert result.forward is not None
    assert {r["kind"]: r["finite"] for r in result.forward["runs"]} == {"text": True, "image": False, "video": False}


def tokenizer(**tokens: int) -> Any:
    """A tokenizer of whole words for the sentence that inputs are made of, with these tokens besides."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", *processed._SENTENCE.replace(".", " .").replace(",", " ,").split()]
    vocabulary = {w: i for i, w in enumerate(dict.fromkeys(words))} | {f"<{name}>": i for name, i in tokens.items()}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"<{name}>" for name in tokens}
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", extra_special_tokens=special)


IN_PARTS = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{{ '<image> ' if c['type'] == 'image' else c['text'] }}{% endfor %}{% endfor %}"
)


def llava_with_processor(folder: Path, patch_size: int = 8, template: str = IN_PARTS) -> Path:
    """A tiny LLaVA and its processor, which puts as many placeholders as patches of this size fill an image of 32 x 32."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    tiny_models.save("llava", folder)
    pictures = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    LlavaProcessor(
        pictures, tokenizer(image=300), patch_size=patch_size, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=template,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_the_repos_own_tokenizer_and_chat_template_make_the_text(llama: Path, tmp_path: Path) -> None:
    words = tokenizer(user=310)
    words.chat_template = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}{% endfor %}"
    words.save_pretrained(copied(llama, tmp_path))
    result = run(tmp_path)
    assert result.forward is not None
    (one,) = result.forward["runs"]
    assert (one["status"], one["inputs_from"], one["reason"]) == ("ran", "processor", None)
    assert one["inputs"]["input_ids"][1] >= 64
    made = processed.make(str(tmp_path), "text", 64, 0, trust_remote_code=False)
    assert made["input_ids"][0, 0] == 310  # the template was applied


def test_the_repos_own_processor_makes_the_picture(tmp_path: Path) -> None:
    result = run(llava_with_processor(tmp_path), values=False)
    assert result.forward is not None
    ran = {r["kind"]: (r["status"], r["inputs_from"], r["reason"]) for r in result.forward["runs"]}
    assert ran == {"text": ("ran", "processor", None), "image": ("ran", "processor", None)}
    assert not result.findings


def test_a_processor_that_does_not_fit_the_model_is_found_though_the_config_makes_a_picture(tmp_path: Path) -> None:
    # Patches of 4 fill the picture with 64 placeholders, and the vision tower, whose patches are of 8, makes 16 features.
    result = run(llava_with_processor(tmp_path, patch_size=4), values=False)
    assert result.forward is not None
    ran = {r["kind"]: (r["status"], r["inputs_from"], r["raised_from"]) for r in result.forward["runs"]}
    assert ran == {"text": ("ran", "processor", []), "image": ("ran", "config", ["processor"])}
    (found,) = result.findings
    assert (found.check, found.blame) == ("CK602", "config")
    assert "image input from the repo's processor: " in found.message


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}",  # of a model of text: raises on parts
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}",  # the same, and it prints Python's list
        "{% for m in messages %}{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}{% endfor %}",
    ],
)
def test_a_chat_template_without_a_place_for_pictures(template: str, tmp_path: Path) -> None:
    """The picture is tried all the same, behind the placeholder that its user would have to write."""
    result = run(llava_with_processor(tmp_path, template=template), values=False)
    assert result.forward is not None
    ran = {r["kind"]: (r["status"], r["inputs_from"], r["reason"]) for r in result.forward["runs"]}
    assert ran == {"text": ("ran", "processor", None), "image": ("ran", "processor", None)}
    assert [(f.check, f.severity, f.blame) for f in result.findings] == [("CK605", "warning", "config")]
    assert "chat template has no place for image input" in result.findings[0].message


def test_frames_are_not_to_be_sampled_from_a_video_that_has_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MiniCPM-V 4.6's processor wants it (transformers 5.17, `video_processing_minicpmv4_6.py`): metadata, or no sampling."""

    class Processor:
        chat_template = None
        video_token = "<video>"

        def __call__(self, *, text: str, videos: list[Any], do_sample_frames: bool = True, return_tensors: str) -> Any:
            if do_sample_frames:
                raise ValueError("complete video metadata with `duration` and `fps` is required")
            assert text.startswith("<video>")
            return {
                "input_ids": torch.zeros((1, len(text)), dtype=torch.long),
                "pixel_values_videos": torch.ones(len(videos)),
            }

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda *_args, **_more: Processor())
    assert "pixel_values_videos" in processed.make("repo", "video", 64, 0, trust_remote_code=False)


def test_a_tokenizer_whose_ids_the_model_does_not_have(llama: Path, tmp_path: Path) -> None:
    words = tokenizer(user=320)  # the model has rows for 0 to 319
    words.chat_template = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}{% endfor %}"
    words.save_pretrained(copied(llama, tmp_path))
    result = run(tmp_path, values=False)
    (found,) = result.findings
    assert (found.check, found.blame) == ("CK602", "config")
    assert "text input from the repo's processor: IndexError" in found.message


def test_a_tokenizer_that_cannot_be_read_is_no_fault_of_the_weights(llama: Path, tmp_path: Path) -> None:
    (copied(llama, tmp_path) / "tokenizer.json").write_text("not json")
    result = run(tmp_path)
    assert result.forward is not None
    (one,) = result.forward["runs"]
    assert (one["status"], one["inputs_from"], one["raised_from"]) == ("ran", "config", [])
    assert one["reason"].startswith("processor: ")
    assert not result.findings


def test_a_kind_that_the_model_does_not_take_is_not_passed(llama: Path) -> None:
    result = run(llama, modalities=("image",))
    assert result.forward is not None
    assert [r["status"] for r in result.forward["runs"]] == ["not_run"]
    assert {s.check for s in result.skips} >= {"CK602", "CK603"}


# --- early ends


def test_a_shape_that_does_not_fit_is_the_checkpoints_fault(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    spoil(copied(llama, tmp_path), lambda t: t.__setitem__(name, t[name][:10].clone()))
    result = run(tmp_path)
    assert (result.load["status"], result.environment) == ("failed", False)
    assert list(checks(result)) == ["CK601"]


def test_a_trial_of_some_shards_is_told_as_one(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path, shard="20KB")
    result = run(tmp_path, shards=1, forward=False)
    assert (result.load["status"], result.load["shards"]) == ("partial", 1)
    assert result.load["missing"]
    assert "CK505" not in checks(result)  # what lies in the other shards was not asked for
    assert "CK505" in {s.check for s in result.skips}


def test_a_file_with_another_name_is_the_one_that_is_loaded(llama: Path, tmp_path: Path) -> None:
    copied(llama, tmp_path)
    (tmp_path / "other.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    spoil(tmp_path, lambda t: t["lm_head.weight"].fill_(math.nan))  # beside it, and found first by the loader itself
    result = run(tmp_path / "other.safetensors")
    assert (result.error, result.findings) == (None, ())


def test_what_has_to_be_downloaded(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path, shard="20KB")
    for name in ("pytorch_model.bin", "modeling.py", "tokenizer.json", "picture.png"):
        (tmp_path / name).write_bytes(b"{}")
    seen = checkpoint(tmp_path)
    one = {p for p in needed_files(seen, LoadOptions(shards=1)) if not p.endswith("json")}
    assert one == {seen.shards[0].path}
    everything = set(needed_files(seen, LoadOptions(trust_remote_code=True)))
    assert everything >= {s.path for s in seen.shards} | {"config.json", "tokenizer.json", "modeling.py"}
    assert not everything & {"pytorch_model.bin", "picture.png"}


def test_a_kind_that_is_none(llama: Path) -> None:
    with pytest.raises(UsageError, match="--modality 'smell' is no kind of input"):
        load(checkpoint(llama), llama, LoadOptions(modalities=("smell",)))


def test_a_device_that_is_not_there(llama: Path) -> None:
    for device in ("cuda", "no-such-device"):
        result = run(llama, device=device)
        assert result.environment
        assert "device" in (result.error or "").lower()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "meta"}, "'meta' is not known here"),
        ({"devices": 2}, "2 devices asked for, and the device is the CPU"),
        ({"dtype": "floatx"}, "cannot be loaded as 'floatx'"),
        ({"dtype": "int8"}, "cannot be loaded as 'int8'"),
        ({"attention": "nosuch"}, "This attention is refused: "),
    ],
)
def test_an_option_that_does_not_fit_is_no_fault_of_the_checkpoint(
    llama: Path, options: dict[str, Any], words: str
) -> None:
    result = run(llama, values=False, forward=False, **options)
    assert (result.load["status"], result.environment, result.findings) == ("failed", True, ())
    assert words in (result.error or "")


def test_a_config_that_is_not_there(llama: Path, tmp_path: Path) -> None:
    (copied(llama, tmp_path) / "config.json").unlink()
    assert "config.json: No such file or directory" in (run(tmp_path).error or "")


def test_a_config_that_the_release_does_not_know(llama: Path, tmp_path: Path) -> None:
    (copied(llama, tmp_path) / "config.json").write_text('{"model_type": "of_tomorrow"}')
    result = run(tmp_path)
    assert result.environment
    assert "transformers does not know model_type" in (result.error or "")


@pytest.mark.parametrize(
    ("error", "environment", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True, "Out of memory in stage 'load'"),
        (MemoryError("no room"), True, "Out of memory"),
        (RuntimeError("CUDA error: unspecified launch failure"), True, "The device was lost"),
        (ImportError("This model needs gptqmodel"), True, "gptqmodel"),
        (KeyboardInterrupt(), True, "Interrupted in stage 'load'"),
        (ValueError("the loader says no"), False, "the loader says no"),
        (KeyError("of_tomorrow"), False, "KeyError: 'of_tomorrow'"),
        (OSError("no such\n  field"), True, "OSError: no such field"),
    ],
)
def test_whose_matter_an_error_is(
    llama: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, environment: bool, words: str
) -> None:
    def fails(*_args: Any) -> Any:
        _args[-1].current = "load"
        raise error

    monkeypatch.setattr(loading_module, "load", fails)
    result = run(llama)
    assert words in (result.error or "")
    assert result.environment is environment
    assert result.load["estimate"]["read"] > 0  # what was known by then


def test_memory_is_estimated_before_anything_is_loaded() -> None:
    tensors = [Stored("a", 0, "F32", (1000, 1000), 0, 4_000_000), Stored("b", 0, "I64", (10,), 4_000_000, 4_000_080)]
    as_stored = estimate(tensors, None, None, device="cuda")
    assert (as_stored.steady, as_stored.read, as_stored.casts) == (4_000_080, 4_000_080, False)
    halved = estimate(tensors, "BF16", None, device="cuda")
    assert (halved.steady, halved.casts) == (2_000_080, True)
    assert halved.peak - halved.steady >= 4_000_000  # both forms of the largest tensor
    assert (as_stored.ahead, halved.ahead > 0) == (0, True)
    half = [Stored("a", 0, "BF16", (1000, 1000), 0, 2_000_000)]
    other = estimate(half, "F16", None, device="cuda")
    assert (other.steady, other.casts, other.ahead > 0) == (2_000_000, True, True)  # of one size, and another tensor
    assert estimate(half, "F16", None, device="cpu").peak >= 2_000_000  # no view of the file any more
    assert not estimate(half, "BF16", None, device="cuda").casts
    fp8 = [Stored("w", 0, "F8_E4M3", (1000, 1000), 0, 1_000_000)]
    assert (
        estimate(fp8, "BF16", {"quant_method": "fp8"}, device="cpu").steady == 2_000_000
    )  # no CPU kernels: dequantised
    assert estimate(fp8, "BF16", {"quant_method": "fp8"}, device="cuda").steady == 1_000_000
    with pytest.raises(CkauditError, match=r"needs about .* 5\.0 MB are free"):
        require(as_stored, 5_000_000, "cuda:0")


def test_a_model_that_does_not_fit_is_a_clear_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_module, "_free_memory", lambda: 1000)
    result = run(llama)
    assert result.environment
    assert "needs about" in (result.error or "")


# --- the child process itself


def test_a_load_in_a_child_process(llama: Path, tmp_path: Path) -> None:
    report = tmp_path / "expected.json"
    here = run(llama)
    assert here.forward is not None
    report.write_text(json.dumps({"forward": here.forward}))
    result = load(checkpoint(llama), llama, LoadOptions(expect=str(report)))
    assert result.error is None
    assert result.load["status"] == "complete"
    assert result.forward is not None
    assert result.forward["expect"]["matched"]
    assert result.observed is not None
    assert len(result.observed.stats) == result.load["tensors"]
    json.dumps([result.load, result.forward])  # sections are plain


def test_a_file_that_is_cut_under_the_load(llama: Path, tmp_path: Path) -> None:
    seen = checkpoint(copied(llama, tmp_path))
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 2000)
    result = load(seen, tmp_path, LoadOptions())
    assert result.environment
    assert "inside a tensor" in (result.error or "")
    assert result.load["status"] == "failed"
    assert result.load["class"] == "LlamaForCausalLM"  # the partial report


TALKER = """
import os, signal, sys, time
sys.stdin.readline()
print('{"stage":"load","load":{"status":"failed","class":"X","stages":{}}}', flush=True)
print('last words', file=sys.stderr)
%s
"""


def talker(act: str) -> tuple[str, ...]:
    """A child that says one thing and then does this."""
    return (sys.executable, "-c", TALKER % act)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (out of memory?)"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "killed by SIGBUS (a file was cut"),
        ("os._exit(7)", "ended with status 7"),
        ("print('{\"stage\": ', end='', flush=True); os._exit(0)", "ended with status 0"),
    ],
)
def test_a_child_that_dies_is_one_clear_line(llama: Path, act: str, words: str) -> None:
    result = load(checkpoint(llama), llama, LoadOptions(), argv=talker(act))
    assert result.environment
    assert words in (result.error or "")
    assert "last words" in (result.error or "")
    assert "\n" not in (result.error or "")
    assert (result.load["status"], result.load["class"]) == ("failed", "X")


def test_ctrl_c_gives_what_is_known_and_leaves_no_child(llama: Path) -> None:
    started: list[int] = []

    class Listening:
        def note(self, text: str) -> None:
            raise AssertionError(text)

        def task(self, label: str, total: int | None = None) -> Any:
            from ckaudit.progress import NullProgress

            if label == "load: load":
                started.append(1)
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            return NullProgress().task(label, total)

    begin = time.monotonic()
    result = load(checkpoint(llama), llama, LoadOptions(), progress=Listening(), argv=talker("time.sleep(60)"))
    assert time.monotonic() - begin < 30
    assert started
    assert result.load["status"] == "interrupted"
    assert "interrupted in stage 'load'" in (result.error or "")


def test_ctrl_c_while_the_child_ends_loses_nothing(llama: Path) -> None:
    begin = time.monotonic()
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    done = '{"load":{"status":"complete","stages":{}},"done":true}'
    ending = f"print({done!r}, flush=True); os.close(1); time.sleep(60)"
    result = load(checkpoint(llama), llama, LoadOptions(), argv=talker(ending))
    assert time.monotonic() - begin < 30
    assert (result.load["status"], result.error) == ("complete", None)


ORPHAN = """
import os, sys, time
from ckaudit.materialize.process import started

waits = "from ckaudit.materialize.child import end_with_parent; end_with_parent(); print(flush=True); import time; time.sleep(60)"
with started((sys.executable, "-c", waits)) as child:
    child._process.stdout.readline()
    print(child._process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_child_does_not_outlive_its_parent() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)  # it is there
        parent.kill()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.1)
    raise AssertionError("the child is still there")


@pytest.mark.parametrize("text", [None, "not json", "{}", '{"forward": null}'])
def test_an_expected_fingerprint_that_is_none(llama: Path, tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "e.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError):
        load(checkpoint(llama), llama, LoadOptions(expect=str(path)))


RANK = """
import os, sys
from pathlib import Path
import msgspec
from ckaudit.checkpoint import read_checkpoint
from ckaudit.materialize import LoadOptions, child, host
from ckaudit.source import open_source

folder = Path(sys.argv[1])
events = []
child.run(host.make_job(read_checkpoint(open_source(str(folder))), folder, LoadOptions(tp=True)), events.append)
Path(sys.argv[2], os.environ["RANK"]).write_bytes(msgspec.json.encode(events[-1]))
"""


def test_two_processes_hold_a_part_each_and_compute_the_same(llama: Path, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(script), str(llama), str(tmp_path)], check=True, env=env, capture_output=True)
    ranks = [msgspec.json.decode((tmp_path / r).read_bytes(), type=Event) for r in "01"]
    alone = run(llama)
    for rank in ranks:
        assert rank.error is None
        assert rank.load is not None
        assert rank.load["tp"] == 2
        assert rank.load["steady_bytes"] < alone.load["steady_bytes"]
        assert rank.observed is not None
        shapes = {s.name: s.shape for s in rank.observed.stats}
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (16, 32)  # 32 rows over two processes
        assert rank.forward is not None
        assert alone.forward is not None
        expected = behaviour.fingerprints({"forward": alone.forward})
        assert behaviour.compare(rank.forward, expected, 0.02)["matched"]


def test_tensor_parallelism_without_torchrun_says_how(llama: Path) -> None:
    result = run(llama, tp=True)
    assert result.environment
    assert "several processes" in (result.error or "")


def test_one_process_under_torchrun_loads_as_without_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' plan places nothing for a single process: its model would stay on the CPU, whatever was asked for."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    result = run(llama, tp=True)
    assert (result.error, result.load["tp"]) == (None, 1)
    assert result.observed is not None
    assert result.observed.compared


def test_more_processes_than_devices(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "99", "LOCAL_WORLD_SIZE": "99"}.items():
        monkeypatch.setenv(name, value)
    result = run(llama, device="cuda", tp=True)
    assert result.environment
    assert "99 CUDA devices asked for" in (result.error or "")
