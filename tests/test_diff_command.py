"""`ckaudit diff` as a whole: real saves, the Hub's two revisions, exit codes, JSON, and what a person sees."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest
from hub_server import HubServer
from huggingface_hub import constants
from test_cli import FIXTURES, ckaudit

from ckaudit.findings import Report
from ckaudit.pipeline import diff as pipeline
from ckaudit.report import json_v1, schema_v1
from ckaudit.report.terminal import render_diff
from tests.diff_examples import decoder, one, told
from tests.helpers import Entries, checkpoint_files, index_file
from tests.real_checkpoints import build, load, save


def folder(path: Path, entries: Entries, config: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    for name, data in checkpoint_files({"model.safetensors": entries}, config).items():
        (path / name).write_bytes(data)
    return path


def index_only(path: Path, names: list[str]) -> Path:
    path.mkdir()
    (path / "model.safetensors.index.json").write_bytes(
        index_file(dict.fromkeys(names, "model-00001-of-00001.safetensors"))
    )
    (path / "config.json").write_text("{}")
    return path


class TestRealSaves:
    """transformers' own loader and saver: what the two write of one model, in the two formats it knows."""

    @staticmethod
    def resaved(model_type: str, path: Path, **options: Any) -> tuple[Path, Path]:
        source, target = path / "source", path / "target"
        source.mkdir()
        model = build(model_type, source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            type(model).from_pretrained(source).save_pretrained(target, **options)
        return source, target

    @pytest.mark.parametrize("model_type", ["llama", "mixtral"])
    def test_a_save_is_a_round_trip(self, model_type: str, tmp_path: Path) -> None:
        source, target = self.resaved(model_type, tmp_path)
        report = pipeline.diff(str(source), str(target), roundtrip=True)
        assert (report.diff and report.diff.changes, report.exit_code) == ((), 0)

    @pytest.mark.parametrize(
        "model_type", ["mixtral", "qwen3_moe", "qwen2_vl", "llava", "phimoe", "qwen3_omni_moe_thinker"]
    )
    def test_the_other_format_is_explained_and_no_round_trip(self, model_type: str, tmp_path: Path) -> None:
        """Every tensor is accounted for, and each link holds the same numbers on both sides: the values say that it is right."""
        source, target = self.resaved(model_type, tmp_path, save_original_format=False)
        report = pipeline.diff(str(source), str(target))
        assert report.diff is not None
        assert (report.findings, report.exit_code) == ((), 0)
        assert {c.kind for c in report.diff.changes} <= {"renamed", "relaid"}
        ours, theirs = load(source), load(target)
        links = [link for c in report.diff.changes for link in c.links]
        assert {n for link in links for n in link.old} | (ours.keys() & theirs.keys()) == ours.keys()
        assert {n for link in links for n in link.new} | (ours.keys() & theirs.keys()) == theirs.keys()
        for link in links:
            kept = sorted(v for n in link.old for v in ours[n].flatten().tolist())
            assert kept == sorted(v for n in link.new for v in theirs[n].flatten().tolist()), link
        assert pipeline.diff(str(source), str(target), roundtrip=True).exit_code == 1

    def test_tied_head_stored_again(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        build("llama", source, tie_word_embeddings=True)
        target = tmp_path / "target"
        target.mkdir()
        state = load(source)
        assert "lm_head.weight" not in state
        save(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, target)
        (target / "config.json").write_text((source / "config.json").read_text())
        report = pipeline.diff(str(source), str(target))
        assert report.diff is not None
        assert [(c.kind, c.rule, c.new) for c in report.diff.changes] == [("added", "tied", ("lm_head.weight",))]


class TestRevisions:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # other tests put their process off line
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        with HubServer({"org/name": checkpoint_files({"model.safetensors": decoder()})}) as server:
            monkeypatch.setenv("HF_ENDPOINT", server.url)
            yield server

    def test_two_revisions_of_one_repo(self, hub: HubServer) -> None:
        repo = hub.repos["org/name"]
        first = repo.head
        second = repo.push(checkpoint_files({"model.safetensors": dict(list(decoder().items())[1:])}), "v2")
        report = pipeline.diff(f"org/name@{first}", "org/name@v2")
        assert report.source is not None
        assert (report.source.revision, report.target.revision) == (first, second)
        assert [(f.check, f.names) for f in report.findings] == [("CK801", ("model.embed_tokens.weight",))]
        shown = render_diff(report)
        assert first[:12] in shown
        assert second[:12] in shown


class TestExitCodes:
    def test_clean_findings_and_round_trip(self, tmp_path: Path) -> None:
        a = folder(tmp_path / "a", decoder())
        b = folder(tmp_path / "b", {n.removeprefix("model."): e for n, e in decoder().items()})
        c = folder(tmp_path / "c", dict(list(decoder().items())[3:]))
        assert [pipeline.diff(str(a), str(x)).exit_code for x in (a, b, c)] == [0, 0, 1]
        assert [pipeline.diff(str(a), str(x), roundtrip=True).exit_code for x in (a, b, c)] == [0, 1, 1]
        assert pipeline.diff(str(a), str(c), fail_on="never").exit_code == 0

    def test_a_round_trip_cannot_be_told_from_an_index(self, tmp_path: Path) -> None:
        a, b = (index_only(tmp_path / x, list(decoder())) for x in "ab")
        assert pipeline.diff(str(a), str(b)).exit_code == 0
        report = pipeline.diff(str(a), str(b), roundtrip=True)
        assert (report.exit_code, {s.check for s in report.skips}) == (3, {"CK803", "CK804"})
        assert pipeline.diff(str(a), str(b), roundtrip=True, allow_not_judged=True).exit_code == 0

    @pytest.mark.parametrize(
        ("target", "said"),
        [("llama-sharded", "✓ identical  "), ("llama-missing-shard", "✓ identical, as far as could be read  ")],
    )
    def test_what_could_not_be_read_is_not_called_identical(self, target: str, said: str) -> None:
        assert said in ckaudit("diff", str(FIXTURES / "llama-sharded"), str(FIXTURES / target)).stdout

    def test_a_faulty_file_is_told_and_is_no_round_trip(self) -> None:
        """The header is whole, the data behind it is cut off."""
        a, b = (str(FIXTURES / f"llama-{x}") for x in ("good", "truncated"))
        report = pipeline.diff(a, b)
        assert report.diff is not None
        assert (report.diff.changes, report.exit_code) == ((), 0)
        assert [(s.check, "the files of B are faulty" in s.reason) for s in report.skips] == [("files", True)]
        assert pipeline.diff(a, b, roundtrip=True).exit_code == 3
        assert pipeline.diff(a, a, roundtrip=True).exit_code == 0

    def test_nothing_to_compare(self) -> None:
        report = pipeline.diff(str(FIXTURES / "llama-good"), str(FIXTURES / "pickle-only"))
        assert (report.exit_code, report.diff) == (3, None)
        assert "B: no safetensors file is here" in render_diff(report)


class TestNewNames:
    """A consistent change of names is explained only where an engine has a place for the new ones."""

    SIZES: ClassVar[dict[str, Any]] = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    }  # fmt: skip

    def compared(self, tmp_path: Path, old: str, new: str, **config: Any) -> Report:
        a = folder(tmp_path / "a", decoder(), self.SIZES)
        b = folder(tmp_path / "b", {n.replace(old, new): e for n, e in decoder().items()}, self.SIZES | config)
        return pipeline.diff(str(a), str(b))

    def test_names_that_nothing_loads(self, tmp_path: Path) -> None:
        report = self.compared(tmp_path, ".mlp.", ".ffn.")
        assert [(f.check, f.severity, f.blame, f.count) for f in report.findings] == [
            ("CK806", "error", "checkpoint", 12)
        ]
        assert "transformers" in report.findings[0].message
        assert "rules:vllm" in report.findings[0].message

    def test_names_that_one_engine_loads(self, tmp_path: Path) -> None:
        """transformers puts the base model's prefix before names without it; vLLM does not."""
        report = self.compared(tmp_path, "model.", "")
        assert report.diff is not None
        assert [(c.rule, [e.partition("==")[0] for e in c.engines]) for c in report.diff.changes] == [
            ("rename", ["transformers"])
        ]
        assert (report.findings, report.skips, report.exit_code) == ((), (), 0)

    def test_a_class_that_nobody_knows(self, tmp_path: Path) -> None:
        report = self.compared(tmp_path, ".mlp.", ".ffn.", model_type="mine", architectures=["MineForCausalLM"])
        assert report.diff is not None
        assert ([c.rule for c in report.diff.changes], report.findings) == (["rename"], ())
        assert [(s.check, "whether the new names load" in s.reason) for s in report.skips] == [("CK806", True)]

    def test_no_engine_is_asked_for_a_round_trip(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckaudit.engines.select", lambda spec: pytest.fail(spec))
        a, b = (folder(tmp_path / x, {n.replace("mlp", x): e for n, e in decoder().items()}) for x in "ab")
        assert pipeline.diff(str(a), str(b), roundtrip=True).exit_code == 1

    def test_an_adapter_is_not_asked_about(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckaudit.engines.select", lambda spec: pytest.fail(spec))
        for x in "ab":
            names = [f"base_model.model.{x}.layers.{i}.q_proj.lora_{f}.weight" for i in range(4) for f in "AB"]
            folder(tmp_path / x, dict.fromkeys(names, ("F32", [4, 4])))
            (tmp_path / x / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
        report = pipeline.diff(str(tmp_path / "a"), str(tmp_path / "b"))
        assert [s.check for s in report.skips] == ["CK806"]


class TestProgram:
    def test_text_and_json(self, tmp_path: Path) -> None:
        file = tmp_path / "report.json"
        done = ckaudit("diff", "fixtures/llama-good", "fixtures/llama-missing-tensor", "--json", str(file))
        assert (done.returncode, done.stderr) == (1, "")
        assert "CK801 tensors lost" in done.stdout
        document = json.loads(file.read_text())
        jsonschema.validate(document, json.loads(schema_v1.SCHEMA.read_text()))
        assert document["diff"]["source"]["name"] == "fixtures/llama-good"
        assert document["target"]["name"] == "fixtures/llama-missing-tensor"
        lost = [c for c in document["diff"]["changes"] if c["rule"] is None]
        assert [n for c in lost for link in c["links"] for n in link["from"]] == document["findings"][0]["names"]

    def test_json_to_stdout(self) -> None:
        done = ckaudit("diff", "fixtures/llama-good", "fixtures/llama-compiled-prefix", "--json", "-")
        assert done.returncode == 1
        change, document = json.loads(done.stdout)["diff"]["changes"][0], json.loads(done.stdout)
        assert (change["kind"], change["rule"], len(change["engines"])) == ("renamed", None, 2)
        assert [f["check"] for f in document["findings"]] == ["CK806"]

    def test_usage(self) -> None:
        assert ckaudit("diff", "fixtures/llama-good", "nowhere/at/all").returncode == 2
        assert ckaudit("diff", "-q", "-v", "fixtures/llama-good", "fixtures/llama-good").returncode == 2

    def test_sharding_is_none(self) -> None:
        assert ckaudit("diff", "fixtures/llama-good", "fixtures/llama-sharded", "--roundtrip").returncode == 0


def compared(**options: Any) -> Report:
    a, b = (
        one(decoder()),
        one({f"module.{n}": e for n, e in list(decoder().items())[2:]} | {"\x1b[31m.weight": ("BF16", [7])}),
    )
    from ckaudit.diff import compare

    return told(compare(a, b, **options), a, b)


class TestView:
    @pytest.mark.parametrize("width", [40, 80, 120])
    def test_it_keeps_to_the_width_and_escapes(self, width: int) -> None:
        for options in ({}, {"quiet": True}, {"verbose": True}):
            shown = render_diff(compared(), width=width, **options)
            assert max(map(len, shown.split("\n"))) <= width
            assert "\x1b" not in shown

    def test_names_of_what_is_explained_are_there_with_verbose_alone(self) -> None:
        name = "module.model.layers.{0..3}.mlp.down_proj.weight"
        assert name not in render_diff(compared())
        assert name in render_diff(compared(), verbose=True)

    def test_quiet_has_no_findings(self) -> None:
        assert "mend" not in render_diff(compared(), quiet=True)
        assert "CK801" in render_diff(compared(), quiet=True)

    def test_the_same_input_gives_the_same_bytes(self) -> None:
        assert json_v1.render(compared()) == json_v1.render(compared())
