"""Released vLLM on whole architectures of many kinds, and that the checkpoints made for it are like published ones.

`docs/vllm-architectures.md` has all of them; these few keep it honest. What a name must be comes from indexes of published checkpoints,
what a verdict must be from the sources of vLLM 0.33.0, whose lines `published.py` names.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ckaudit.checkpoint import read_checkpoint
from ckaudit.engines import EngineOptions, select
from ckaudit.engines.vllm import stubs
from ckaudit.plan import Plan
from ckaudit.progress import NullProgress
from ckaudit.source import open_source
from tests.vllm import architectures
from tests.vllm.published import FACTS

PUBLIC = Path(__file__).parent.parent / "data" / "public" / "checkpoints.tar.xz"
INDEXES = {
    "gemma3-27b-medgemma": ("Gemma3ForConditionalGeneration", {}),
    "paligemma-3b": ("PaliGemmaForConditionalGeneration", {}),
    "gemma1-2b-tied": ("GemmaForCausalLM", {}),
    "granitemoe-1b-a400m": ("GraniteMoeForCausalLM", {"tie_word_embeddings": True}),
    "mixtral-8x22b": ("MixtralForCausalLM", {}),
    "phi3-mini-of-micro-shards": ("Phi3ForCausalLM", {}),
    "qwen2-7b": ("Qwen2ForCausalLM", {}),
    "qwen2_vl-7b-olmocr": ("Qwen2VLForConditionalGeneration", {}),
    "tinyllama-1.1b-singlefile-index": ("LlamaForCausalLM", {}),
}


def family(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "{}", name)


def test_made_checkpoints_have_the_names_of_published_ones() -> None:
    with tarfile.open(PUBLIC) as archive:
        for slug, (architecture, stated) in INDEXES.items():
            member = next(m for m in archive.getnames() if m.endswith(f"{slug}/model.safetensors.index.json"))
            published = json.load(archive.extractfile(member) or pytest.fail(member))["weight_map"]
            made = architectures.make(architecture, 2, **stated)
            assert {family(n) for n in made.tensors} == {family(n) for n in published}, slug


def test_layers_are_cut_and_nothing_else() -> None:
    whole, cut = (architectures.make("LlamaForCausalLM", layers) for layers in (None, 2))
    kept = {n: t for n, t in whole.tensors.items() if not re.search(r"layers\.([2-9]|\d\d)\.", n)}
    assert cut.tensors == kept
    assert len(whole.tensors) == 32 * 9 + 3  # Llama 7B: 32 layers, the embedding, the norm and the head


def test_what_cannot_be_made_says_why() -> None:
    with pytest.raises(architectures.UnmakeableError, match="no class of this name"):
        architectures.make("ChatGLMModel")
    with pytest.raises(architectures.UnmakeableError, match="a draft model"):
        architectures.make("MuseGlimmerAssistantModel")


def test_every_fact_is_of_an_architecture_and_explains_itself() -> None:
    for name, fact in FACTS.items():
        assert (fact.verdict != "loads") == bool(fact.why), name
        assert (
            fact.source or not (fact.config or fact.written or fact.renames or fact.also or fact.files) or fact.why
        ), name


def test_registered_is_read_without_an_import(tmp_path: Path) -> None:
    models = tmp_path / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (models / "registry.py").write_text(
        "import nothing.of.this.name\n_TEXT_MODELS = {'A': ('a', 'A'), **{k: 1 for k in ()}}\n"
        "_PREVIOUSLY_SUPPORTED_MODELS = {'Old': '0.1'}\n_OTHER: dict = {'B': ('b', 'B')}\n_VISION_MODELS: dict = {'C': ('c', 'C')}\n"
    )
    assert architectures.registered(tmp_path) == {"A": "_TEXT_MODELS", "C": "_VISION_MODELS"}


def test_bundled_kernels_are_the_compiled_packages_of_third_parties() -> None:
    files = map(PurePosixPath, [
        "vllm/third_party/deep_gemm/_C.cpython-311-x86_64-linux-gnu.so", "vllm/third_party/deep_gemm/__init__.py",
        "vllm/third_party/pynvml.py", "vllm/third_party/flash_linear_attention/ops/index.py",
        "vllm/_C.abi3.so", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/third_party/lone.so",
    ])  # fmt: skip
    assert stubs.bundled(files) == {"vllm.third_party.deep_gemm"}


def test_a_kernel_library_is_there_for_the_module_named_after_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a module is imported where the package was found; any other import of it asks whether it is there, and must hear no."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, stubs._Last()])
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    with pytest.raises(ModuleNotFoundError):
        exec("import flashinfer", {"__name__": "vllm.utils.import_utils"})
    exec("import flashinfer", {"__name__": "vllm.v1.attention.backends.flashinfer"})
    assert stubs.is_stub(sys.modules.pop("flashinfer"))


def test_compiled_operators_are_there_until_the_last_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    namespace = torch._ops._OpNamespace
    monkeypatch.setattr(namespace, "__getattr__", namespace.__getattr__)  # and so put back
    stubs.answer_for_compiled_ops()
    with stubs.building():
        with stubs.building():
            assert callable(torch.ops._C.rotary_embedding.default)
        assert callable(torch.ops._C.rms_norm)
    with pytest.raises(AttributeError):
        _ = torch.ops._C.rms_norm


@pytest.fixture(scope="module")
def release() -> Iterator[Any]:
    (engine,) = select("vllm==0.33.0")
    yield engine
    engine.close()  # type: ignore[attr-defined]


def plan_of(release: Any, made: architectures.Made, folder: Path) -> Plan:
    architectures.write(made, folder)
    plan: Plan = release.plan(read_checkpoint(open_source(str(folder))), EngineOptions(cache=False), NullProgress())
    return plan


@pytest.mark.wheel
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3ForCausalLM",  # dense
        "Qwen3MoeForCausalLM",  # experts, one tensor each
        "DeepseekV32ForCausalLM",  # latent and sparse attention: its layers refuse a machine without DeepGEMM
        "Gemma3ForConditionalGeneration",  # pictures
        "WhisperForConditionalGeneration",  # encoder and decoder
        "FalconH1ForCausalLM",  # attention beside a state space
        "MistralModel",  # an embedding model
        "HunYuanVLForConditionalGeneration",  # transformers' own modelling code, by way of its processor
    ],
)
def test_a_sound_checkpoint_loads(release: Any, architecture: str, tmp_path: Path) -> None:
    plan = plan_of(release, architectures.make(architecture, 2), tmp_path)
    assert (plan.verdict, plan.not_judged, plan.error) == ("loads", None, None)
    assert [n.name for n in plan.names if (n.fate, n.read) != ("loaded", 1.0) and not n.by_design] == []


@pytest.mark.wheel
@pytest.mark.timeout(1200)
def test_what_vllm_drops_is_a_loss(release: Any, tmp_path: Path) -> None:
    """bert.py:386 of 0.33.0 maps `pooler.` to nothing, and no more."""
    plan = plan_of(release, architectures.make("BertModel", 2), tmp_path)
    assert plan.verdict == "loads_with_loss"
    assert {n.name for n in plan.names if n.fate != "loaded"} == {"pooler.dense.weight", "pooler.dense.bias"}
    assert {n.fate for n in plan.names} == {"loaded", "dropped"}


@pytest.mark.wheel
@pytest.mark.timeout(1200)
def test_an_embedding_model_without_its_modules_is_another_class(release: Any, tmp_path: Path) -> None:
    """config/model.py:1290 of 0.33.0 asks `modules.json` first: without it the text model is built, whose names have a prefix."""
    made = architectures.make("MistralModel", 2)
    plan = plan_of(release, made._replace(files={"config.json": made.files["config.json"]}), tmp_path)
    assert plan.verdict == "fails"
    assert "embed_tokens" in (plan.error or "")
