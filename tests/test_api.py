"""The Python API: audit() from target to Report, with engines that are only told."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from make_fixtures import llama, single

import ckaudit
from ckaudit.checkpoint import Checkpoint
from ckaudit.engines import EngineOptions
from ckaudit.errors import EngineError, SourceError, UsageError
from ckaudit.pipeline import stages
from ckaudit.plan import NameFate, Parameter, Plan
from ckaudit.progress import NullProgress, Progress
from tests.helpers import safetensors_file


class Told:
    """An engine that loads every tensor into a parameter of the same name, less what `change` says."""

    def __init__(self, id: str = "told", **change: object) -> None:
        self.id = id
        self.change = change
        self.options: EngineOptions | None = None

    def plan(self, checkpoint: Checkpoint, options: EngineOptions, progress: Progress) -> Plan:
        self.options = options
        names = tuple(NameFate(name=t, fate="loaded", into=t, read=1.0) for t in checkpoint.tensors)
        parameters = tuple(
            Parameter(name=t.name, coverage="full", shape=t.shape, dtype=t.dtype, sources=(t.name,))
            for t in checkpoint.tensors.values()
        )
        plan = Plan(id=self.id, engine=self.id, release="1", method="live", names=names, parameters=parameters)
        return msgspec.structs.replace(plan, **self.change)


@pytest.fixture
def llama_folder(tmp_path: Path) -> str:
    for name, content in single(llama()).items():
        (tmp_path / name).write_bytes(content)
    return str(tmp_path)


def test_a_sound_checkpoint(llama_folder: str) -> None:
    report = ckaudit.audit(llama_folder, [Told()])
    assert [p.verdict for p in report.plans] == ["loads"]
    assert report.standing == ()
    assert report.exit_code == 0


def test_the_target_in_numbers(llama_folder: str) -> None:
    # By hand: embeddings and head 32x8 each; a layer 8 + 64 + 32 + 32 + 64 + 8 + 128 + 128 + 128 = 592; last norm 8; two bytes each.
    target = ckaudit.audit(llama_folder, [Told()]).target
    assert (target.tensors, target.shards, target.dtypes) == (21, 1, {"BF16": 21})
    assert target.parameters == 2 * 256 + 2 * 592 + 8
    assert target.bytes == 2 * target.parameters
    assert (target.architectures, target.model_type, target.source) == (("LlamaForCausalLM",), "llama", "local")


def test_a_sum_with_a_gap_is_unknown() -> None:
    target = ckaudit.audit(str(Path(__file__).parent.parent / "fixtures" / "llama-missing-shard"), [Told()]).target
    assert (target.tensors, target.parameters, target.bytes) == (21, None, None)


def test_options_reach_the_engine(llama_folder: str) -> None:
    engine = Told()
    ckaudit.audit(llama_folder, [engine], class_name="X", device="cuda", budget=5.0, cache=False, offline=True)
    assert engine.options == EngineOptions(class_name="X", device="cuda", budget=5.0, cache=False, offline=True)


def test_engines_run_side_by_side_and_stand_in_order(llama_folder: str) -> None:
    both = threading.Barrier(2, timeout=30)  # breaks unless both engines are at work at once

    class Meets(Told):
        def plan(self, checkpoint: Checkpoint, options: EngineOptions, progress: Progress) -> Plan:
            both.wait()
            return super().plan(checkpoint, options, progress)

    report = ckaudit.audit(llama_folder, [Meets("b"), Meets("a")])
    assert [p.id for p in report.plans] == ["b", "a"]


def test_an_engine_named_twice_runs_once(llama_folder: str) -> None:
    assert [p.id for p in ckaudit.audit(llama_folder, [Told(), Told()]).plans] == ["told"]


def test_an_engine_that_was_asked_for_and_not_judged(llama_folder: str) -> None:
    report = ckaudit.audit(llama_folder, [Told(), Told("other", not_judged="no GPU")])
    assert report.requested == {"told", "other"}
    assert report.exit_code == 3
    assert ckaudit.audit(llama_folder, [Told("other", not_judged="no GPU")], allow_not_judged=True).exit_code == 0


def test_an_engine_that_raises_stops_the_audit(llama_folder: str) -> None:
    class Raises(Told):
        def plan(self, checkpoint: Checkpoint, options: EngineOptions, progress: Progress) -> Plan:
            raise EngineError("no such release")

    with pytest.raises(EngineError, match="no such release"):
        ckaudit.audit(llama_folder, [Told(), Raises("raises")])


def test_a_misspelt_engine_is_told_before_the_target_is_opened() -> None:
    with pytest.raises(EngineError, match="vlm"):
        ckaudit.audit("/no/such/folder", ["vlm"])


def test_a_target_that_is_not_there() -> None:
    with pytest.raises(ckaudit.CkauditError) as caught:
        ckaudit.audit("/no/such/folder", [Told()])
    assert not isinstance(caught.value, EngineError)
    assert caught.value.hint


def test_hostile_config_values_are_no_crash(tmp_path: Path) -> None:
    for name, content in single(llama(), architectures=[1, None, "A"], model_type=["x"]).items():
        (tmp_path / name).write_bytes(content)
    target = ckaudit.audit(str(tmp_path), [Told()]).target
    assert (target.architectures, target.model_type) == (("A",), None)


def test_side_by_side_raises_the_first_error_in_order() -> None:
    def run(engine: Told) -> Plan:
        raise SourceError(engine.id)

    with pytest.raises(SourceError, match="first"):
        stages.side_by_side([Told("first"), Told("second")], run)  # type: ignore[list-item,arg-type]


def test_progress_is_silent_by_default(llama_folder: str, capfd: pytest.CaptureFixture[str]) -> None:
    ckaudit.audit(llama_folder, [Told()], progress=NullProgress())
    assert capfd.readouterr() == ("", "")


def test_the_public_names_are_there() -> None:
    assert sorted(ckaudit.__all__) == sorted(["CkauditError", "Finding", "Report", "Skip", "__version__", "audit"])
    for name in ckaudit.__all__:
        assert getattr(ckaudit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ckaudit.nothing  # noqa: B018


def test_import_is_light() -> None:
    heavy = "{'torch', 'transformers', 'huggingface_hub', 'rich', 'msgspec', 'typer'}"
    code = f"import ckaudit, sys; sys.exit(str(sorted({heavy} & sys.modules.keys())) if {heavy} & sys.modules.keys() else 0)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_path_and_a_single_spec_are_taken(llama_folder: str) -> None:
    report = ckaudit.audit(Path(llama_folder), "rules:vllm==0.33.0")
    assert [p.id for p in report.plans] == ["rules:vllm==0.33.0"]


@pytest.mark.parametrize("engines", [None, ["transformers", "rules:vllm==0.33.0"]])
def test_options_that_no_engine_heeds_are_refused_before_anything_is_read(engines: list[str] | None) -> None:
    with pytest.raises(UsageError, match="quantization: only vLLM has such options"):
        ckaudit.audit("/no/such/folder", engines, vllm={"quantization": "fp8"})


def test_a_class_is_not_passed_over_by_engines_that_go_by_the_config(llama_folder: str) -> None:
    with pytest.raises(UsageError, match="Only transformers can be asked to load as LlamaModel"):
        ckaudit.audit("/no/such/folder", ["rules:vllm==0.33.0", "vllm==0.33.0"], class_name="LlamaModel")
    report = ckaudit.audit(llama_folder, class_name="LlamaModel")
    assert [p.id for p in report.plans] == ["transformers"]
    assert "rules" in [s.check for s in report.skips]


def test_ranks_that_no_engine_loads_over_are_not_judged(llama_folder: str) -> None:
    """Seven ranks cannot share its heads; a rule book knows of none."""
    report = ckaudit.audit(llama_folder, "rules:vllm==0.33.0", tp=(7,))
    assert ("CK310", None) in [(s.check, s.engine) for s in report.skips]
    assert report.exit_code == 3
    assert ckaudit.audit(llama_folder, "rules:vllm==0.33.0", tp=(7,), allow_not_judged=True).exit_code == 0


@pytest.mark.parametrize("engine", ["rules:vllm==0.33.0", Told()])
def test_one_rank_is_what_every_engine_judges_and_an_engine_of_ones_own_may_know_more(
    llama_folder: str, engine: str | Told
) -> None:
    report = ckaudit.audit(llama_folder, [engine], tp=(1,) if isinstance(engine, str) else (2,))
    assert not [s for s in report.skips if s.check == "CK310"]
    assert report.exit_code == 0


def test_the_ranks_of_an_adapters_base_are_not_judged(tmp_path: Path, llama_folder: str) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]})
    )
    factors = {f"{at}.lora_A.weight": ("F32", [2, 8]), f"{at}.lora_B.weight": ("F32", [8, 2])}
    (folder / "adapter_model.safetensors").write_bytes(safetensors_file(factors))
    report = ckaudit.audit(folder, [Told()], base=llama_folder, tp=(2,))
    assert [s.reason for s in report.skips if s.check == "CK310"] == [
        "whether it loads over several ranks: an adapter's base is judged on one rank alone; audit the base by itself"
    ]
    assert (report.standing, report.exit_code) == ((), 3)


@pytest.mark.parametrize("wrong", [{"tp": (0,)}, {"tp": (2, -2)}, {"fail_on": "fatal"}])
def test_arguments_that_make_no_sense_are_refused_before_anything_is_read(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        ckaudit.audit("nowhere", [Told()], **wrong)
