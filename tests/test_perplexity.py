"""`ckaudit ppl` on the tiny trained model: the number, both sides, references, planted faults, bad input.

Expected numbers come from `OpenAIServer`, which shares no scoring code with ckaudit, from plain torch, or from reasoning beside them.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from openai_server import OpenAIServer
from PIL import Image
from transformers import Qwen2VLForConditionalGeneration

from ckaudit.checks import perplexity as checks
from ckaudit.errors import CkauditError, EngineError, SourceError, UsageError
from ckaudit.perplexity import data, references
from ckaudit.perplexity.compare import compare
from ckaudit.perplexity.encode import Encoder
from ckaudit.perplexity.journal import Journal
from ckaudit.perplexity.processor import load_processor
from ckaudit.perplexity.run import Repo, run, save_reference
from ckaudit.perplexity.score import load_model, score_rows
from ckaudit.perplexity.server import Server
from ckaudit.progress import NullProgress
from ckaudit.scores import Outcome, PplOptions, RowScore, Score, Settings, Skipped

TINY = Path(__file__).parent.parent / "fixtures" / "tiny-qwen2-vl"
FLOAT = Settings(dtype="float32")
QUIET = NullProgress()


def ppl(**options: object) -> Outcome:
    return run(Repo("tiny", TINY, "v1"), PplOptions(**{"settings": FLOAT, **options}), QUIET)


@pytest.fixture(scope="module")
def healthy() -> Outcome:
    return ppl()


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(load_processor(TINY))


# --- data ---------------------------------------------------------------------------------------------------------


def test_the_shipped_set_has_sixty_rows_of_three_kinds() -> None:
    rows = data.load("builtin").rows
    assert len(rows) == 60
    assert {r.kind for r in rows} == {"picture", "dialogue", "text"}
    assert all(len(r.images) == 1 for r in rows if r.kind != "text")


def write(tmp_path: Path, *rows: object) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return str(path)


CHAT = {"messages": [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "hi"}]}


def test_a_changed_word_or_pixel_changes_the_hash(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    shown = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "hi"}]
    Image.new("RGB", (8, 8), "red").save(picture)
    path = write(tmp_path, {"messages": shown, "images": ["a.png"]}, {"text": "one two"})
    first = data.load(path).hash
    assert data.load(path).hash == first
    Image.new("RGB", (8, 8), "blue").save(picture)
    second = data.load(path).hash
    write(tmp_path, {"messages": shown, "images": ["a.png"]}, {"text": "one too"})
    assert len({first, second, data.load(path).hash}) == 3


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{not json", "line 1 is not JSON"),
        ("[1]", "not a JSON object"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "neither a text nor a conversation"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}, "a message without"),
        ({"messages": list(reversed(CHAT["messages"]))}, "not an answer of the assistant"),
        ({**CHAT, "images": ["a.png"]}, "0 image parts in the messages, 1 images"),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "video"}]}, CHAT["messages"][1]]},
            "a message without",
        ),
    ],
)
def test_a_row_of_another_form_is_named_with_its_line(tmp_path: Path, row: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        data.load(write(tmp_path, row))


def test_a_picture_outside_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    shown = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "hi"}]
    with pytest.raises(UsageError, match="outside"):
        data.load(write(tmp_path / "in", {"messages": shown, "images": ["../secret.png"]}))


def test_two_rows_of_one_id_and_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two rows with the id"):
        data.load(write(tmp_path, {**CHAT, "id": "a"}, {**CHAT, "id": "a"}))
    with pytest.raises(UsageError, match="no rows"):
        data.load(write(tmp_path))
    with pytest.raises(SourceError, match="cannot be read"):
        data.load(str(tmp_path / "none.jsonl"))


# --- the number ---------------------------------------------------------------------------------------------------


def test_only_the_answer_is_scored(encoder: Encoder) -> None:
    row = next(r for r in data.load("builtin").rows if r.kind == "dialogue")
    encoded = encoder.encode(row)
    assert encoder.tokenizer.decode(encoded.scored) == row.answer
    # Earlier answers are context, the last one alone is scored.
    assert encoder.tokenizer.decode(encoded.ids[: encoded.start]).endswith("<|im_start|>assistant\n")


def test_a_text_is_scored_from_its_second_token(encoder: Encoder) -> None:
    encoded = encoder.encode(data.Row("t", "text", text="The tide leaves"))
    assert encoded.start == 1
    assert encoded.ids == tuple(encoder.tokenizer("The tide leaves")["input_ids"])


def test_perplexity_is_that_of_plain_torch(healthy: Outcome, encoder: Encoder) -> None:
    """The definition written out with the model's own loss: mean over the scored tokens of all rows, then exp."""
    model = Qwen2VLForConditionalGeneration.from_pretrained(TINY, dtype="float32").eval()
    total, tokens = 0.0, 0
    for row in data.load("builtin").rows[30:52]:
        encoded = encoder.encode(row)
        inputs = encoder.inputs([encoded])
        labels = inputs["input_ids"].clone()
        labels[:, : encoded.start] = -100
        with torch.no_grad():
            total += model(**inputs, labels=labels).loss.item() * len(encoded.scored)
        tokens += len(encoded.scored)
    ours = healthy.score.rows[30:52]
    assert sum(r.tokens for r in ours) == tokens
    assert sum(r.nll or 0 for r in ours) == pytest.approx(total, rel=1e-4)


def test_batching_does_not_change_the_number(healthy: Outcome) -> None:
    batched = ppl(settings=msgspec.structs.replace(FLOAT, batch=7))
    assert batched.score.perplexity == pytest.approx(healthy.score.perplexity, rel=1e-3)
    assert [r.id for r in batched.score.rows] == [r.id for r in healthy.score.rows]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_healthy_runs_stay_within_the_tolerance(healthy: Outcome, dtype: str, attention: str) -> None:
    settings = Settings(dtype=dtype, attention=attention)
    for batch in (1, 2, 3, 5, 8):
        score = ppl(settings=msgspec.structs.replace(settings, batch=batch)).score
        assert compare(healthy.score, score, 0.01).within


def test_pixel_limits_and_template_are_part_of_the_result(healthy: Outcome) -> None:
    assert healthy.score.settings["min_pixels"] == 56 * 56
    assert len(healthy.score.settings["template_hash"]) == 16
    smaller = ppl(max_pixels=56 * 56, rows=2)
    assert smaller.score.settings["max_pixels"] == 56 * 56
    # A 112 x 112 picture shrinks to 56 x 56: 2 x 2 tokens instead of 4 x 4, so the ids differ.
    assert smaller.score.rows[0].ids_hash != healthy.score.rows[0].ids_hash


# --- two sides ----------------------------------------------------------------------------------------------------


def test_a_server_gives_the_same_number(healthy: Outcome) -> None:
    server = OpenAIServer(TINY)
    with server as url:
        served = ppl(against=url)
    assert served.comparison is not None
    assert abs(served.comparison.relative or 1) < 1e-3
    assert len(served.score.rows) == 60
    assert not served.drifts
    assert {path for path, _, _ in server.requests} == {"/v1/chat/completions", "/v1/completions"}


def test_a_server_without_token_ids_or_prompt_logprobs_is_scored_by_what_it_has() -> None:
    with OpenAIServer(TINY, token_ids=False, prompt_logprobs=False) as url:
        served = ppl(against=url)
    assert served.comparison is not None
    assert abs(served.comparison.relative or 1) < 1e-3
    assert len(served.score.rows) == 60


def test_a_server_with_another_template_is_a_drift_and_not_a_number(encoder: Encoder) -> None:
    other = str(encoder.template).replace("<|im_start|>{{", "<|im_start|> {{")
    with OpenAIServer(TINY, template=other) as url:
        served = ppl(against=url, rows=50)
    findings, _ = checks.run(served)
    drift = next(f for f in findings if f.check == "CK652")
    assert drift.count == 48  # every conversation; the two texts know no template
    assert {r.id for r in served.score.rows} == {"text-00", "text-01"}


def test_a_server_without_logprobs_says_what_to_use() -> None:
    with OpenAIServer(TINY, logprobs=False) as url, pytest.raises(EngineError, match="prompt_logprobs"):
        ppl(against=url, rows=1)


@pytest.mark.parametrize(
    ("status", "says"), [(401, "OPENAI_API_KEY"), (404, "/v1 address"), (302, "redirects"), (500, "log")]
)
def test_what_a_server_refuses_becomes_one_line(encoder: Encoder, status: int, says: str) -> None:
    with OpenAIServer(TINY, status=status) as url:
        row = encoder.encode(data.load("builtin").rows[0])
        with pytest.raises(EngineError, match=says) as caught:
            next(Server(url).score([row]))
    assert "\n" not in str(caught.value)


def test_an_address_where_nothing_listens() -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        Server("http://127.0.0.1:9/v1")
    with pytest.raises(UsageError, match="not an http address"):
        Server("file:///etc/passwd")


# --- references ---------------------------------------------------------------------------------------------------


def test_a_reference_is_kept_and_compared_without_the_reference_model(healthy: Outcome, tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    save_reference(path, "tiny", healthy, PplOptions(tolerance=0.02, tolerance_reason="bf16 on another card"))
    save_reference(path, "other", healthy, PplOptions())
    again = ppl(reference=path, settings=Settings(dtype="bfloat16"))
    assert again.comparison is not None
    assert again.comparison.tolerance == 0.02
    assert again.comparison.tolerance_reason == "bf16 on another card"
    assert again.comparison.within
    assert sorted(references.read(path).entries) == ["other", "tiny"]


def test_other_rows_are_an_error_and_not_a_drift(healthy: Outcome, tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    save_reference(path, "tiny", healthy, PplOptions())
    with pytest.raises(UsageError, match="other rows"):
        ppl(reference=path, rows=10)


def test_a_tolerance_of_its_own_needs_a_reason(healthy: Outcome, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a reason"):
        save_reference(tmp_path / "r.json", "tiny", healthy, PplOptions(tolerance=0.5))


@pytest.mark.parametrize("text", ["", "{}x", '{"entries": {"a": 1}}', '{"schema_version": 2}'])
def test_a_file_that_is_no_reference(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(CkauditError):
        references.entry(path, "tiny")


# --- comparison ---------------------------------------------------------------------------------------------------


def score(*rows: RowScore, data_hash: str = "h") -> Score:
    from ckaudit.scores import perplexity

    return Score(side="s", perplexity=perplexity(rows), tokens=1, rows=rows, data="d", data_hash=data_hash)


def rows(*nll: float | None, tokens: int = 10) -> tuple[RowScore, ...]:
    return tuple(RowScore(f"r{i}", value, tokens, "ids") for i, value in enumerate(nll))


def test_the_sign_is_kept_and_a_lower_perplexity_is_no_less_wrong() -> None:
    # Mean nll falls from 1.0 to 0.8 a token: exp(-0.2) - 1 = -18.1 %.
    found = compare(score(*rows(10.0, 10.0)), score(*rows(8.0, 8.0)), 0.01)
    assert found.relative == pytest.approx(math.exp(-0.2) - 1)
    finding = checks.run(Outcome(score=score(*rows(8.0, 8.0)), comparison=found))[0][0]
    assert finding.check == "CK651"
    assert "18.13% lower" in finding.message


def test_a_difference_within_the_tolerance_is_no_finding() -> None:
    found = compare(score(*rows(10.0, 10.0)), score(*rows(10.05, 10.05)), 0.01)  # exp(0.005) - 1 = 0.5 %
    assert checks.run(Outcome(score=score(*rows(10.05, 10.05)), comparison=found))[0] == ()


def test_noise_is_the_spread_between_rows() -> None:
    """Every row moves alike: no noise. Half the rows move up and half down: the mean is chance, and a tight tolerance says so."""
    alike = compare(score(*rows(*[10.0] * 20)), score(*rows(*[10.1] * 20)), 0.05)
    assert alike.noise == pytest.approx(0, abs=1e-9)
    apart = compare(score(*rows(*[10.0] * 20)), score(*rows(*[12.0, 8.0] * 10)), 0.01)
    # Standard deviation of a row is 0.2 a token, of the mean of 20 rows 0.2 / sqrt(20) = 0.045; times 1.96 is 0.088.
    assert apart.noise == pytest.approx(0.088, rel=0.15)
    found = checks.run(Outcome(score=score(*rows(10.0)), comparison=apart))[0]
    assert [f.check for f in found] == ["CK655"]
    assert not checks.run(Outcome(score=score(*rows(10.0)), comparison=alike))[0]


def test_rows_that_moved_most_come_first() -> None:
    found = compare(score(*rows(10.0, 10.0, 10.0)), score(*rows(10.0, 13.0, 9.0)), 0.01)
    assert [m.id for m in found.moved] == ["r1", "r2", "r0"]


def test_a_row_that_is_not_finite_is_a_finding_and_no_number() -> None:
    broken = score(*rows(10.0, None))
    assert broken.perplexity is None
    found = checks.run(Outcome(score=broken, comparison=compare(score(*rows(10.0, 10.0)), broken, 0.01)))[0]
    assert [(f.check, f.names) for f in found] == [("CK653", ("r1",))]


def test_a_reference_that_is_not_finite_is_no_pass() -> None:
    broken, sound = score(*rows(10.0, None)), score(*rows(10.0, 10.0))
    outcome = Outcome(score=sound, reference=broken, comparison=compare(broken, sound, 0.01))
    (finding,) = checks.run(outcome)[0]
    assert (finding.check, finding.names) == ("CK653", ("r1",))
    assert finding.message == "1 of 2 rows of the reference give NaN or Inf."
    assert outcome.nothing_compared


def test_a_perplexity_past_every_number_is_a_finding() -> None:
    found = checks.run(Outcome(score=score(*rows(10.0 * 800))))[0]  # exp(800) overflows
    assert [(f.check, f.names) for f in found] == [("CK653", ())]


def test_sides_without_a_row_in_common_are_not_judged() -> None:
    left, right = score(*rows(10.0, 10.0)[:1]), score(*rows(10.0, 10.0)[1:])
    findings, skips = checks.run(Outcome(score=right, reference=left, comparison=compare(left, right, 0.01)))
    assert findings == ()
    assert [s.check for s in skips] == ["CK651"]
    assert "nothing was compared" in skips[0].reason
    sound = Outcome(score=left, reference=left, comparison=compare(left, left, 0.01))
    assert checks.run(sound) == ((), ())


def test_what_two_sides_and_a_reference_to_keep_do_not_go_with(tmp_path: Path) -> None:
    other = msgspec.structs.replace(FLOAT, dtype="bfloat16")
    with pytest.raises(UsageError, match="two comparisons"):
        ppl(against="http://127.0.0.1:9/v1", candidate_settings=other)
    for comparison in ({"against": "http://127.0.0.1:9/v1"}, {"candidate_settings": other}):
        with pytest.raises(UsageError, match="the target's own score"):
            ppl(save_reference=tmp_path / "r.json", **comparison)


def test_a_row_that_the_reference_skipped_is_told() -> None:
    part = msgspec.structs.replace(score(*rows(1.0)), skipped=(Skipped("p", "no image processor"),))
    whole = score(*rows(1.0))
    told = checks.run(Outcome(score=whole, reference=part, comparison=compare(part, whole, 0.01)))[1]
    assert [s.reason for s in told] == ["row p of the reference: no image processor"]
    both = checks.run(Outcome(score=part, reference=part, comparison=compare(part, part, 0.01)))[1]
    assert [s.reason for s in both] == ["row p: no image processor"]


def test_a_skipped_row_is_a_skip() -> None:
    part = msgspec.structs.replace(score(*rows(1.0)), skipped=(Skipped("p", "no image processor"),))
    assert checks.run(Outcome(score=part))[1][0].reason == "row p: no image processor"


# --- faults -------------------------------------------------------------------------------------------------------


def test_every_planted_fault_is_seen_and_the_model_is_healthy_again() -> None:
    from ckaudit.perplexity import faults

    outcome = ppl(prove=True)
    assert [p.fault for p in outcome.faults] == [name for name, _ in faults.FAULTS]
    assert {p.fault: p.seen for p in outcome.faults} == dict.fromkeys((name for name, _ in faults.FAULTS), True)
    assert all(abs(p.relative or 1) > 0.01 for p in outcome.faults)
    assert checks.run(outcome)[0] == ()


def test_a_fault_that_hides_is_reported_with_its_size() -> None:
    """On texts alone no picture is shown: swapped channels cannot move the number, and that must be said."""
    outcome = ppl(prove=True, data=str(texts_only()))
    hidden = [f for f in checks.run(outcome)[0] if f.check == "CK654"]
    assert {f.names[0] for f in hidden} >= {"RGB to BGR", "image tokens shuffled"}
    assert "+0.000%" in next(f for f in hidden if f.names == ("RGB to BGR",)).message


def texts_only() -> Path:
    import tempfile

    path = Path(tempfile.mkdtemp()) / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"id": r.id, "text": r.text}) for r in data.load("builtin").rows if r.text))
    return path


def test_planting_restores_every_weight(encoder: Encoder) -> None:
    from ckaudit.perplexity import faults

    model = load_model(TINY, FLOAT)
    before = {k: v.clone() for k, v in [*model.state_dict().items(), *model.named_buffers()]}
    changed = 0
    for _, plant in faults.FAULTS:
        with plant(model, encoder):
            now = dict([*model.state_dict().items(), *model.named_buffers()])
            changed += any(not torch.equal(now[k], v) for k, v in before.items())
        now = dict([*model.state_dict().items(), *model.named_buffers()])
        assert all(torch.equal(now[k], v) for k, v in before.items())
    assert changed == 4  # the other two change pictures and image tokens, not weights


# --- resume -------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_where_it_stopped(encoder: Encoder, tmp_path: Path) -> None:
    encoded = [encoder.encode(r) for r in data.load("builtin", 6).rows]
    model, asked = load_model(TINY, FLOAT), []

    def fresh(left: list[object], stop_after: int = 99) -> Iterator[RowScore]:
        asked.append(len(left))
        for n, row in enumerate(score_rows(model, encoder, left, FLOAT)):  # type: ignore[arg-type]
            if n == stop_after:
                raise KeyboardInterrupt
            yield row

    with pytest.raises(KeyboardInterrupt):
        list(Journal(tmp_path, ["k"]).score(encoded, lambda left: fresh(left, 4)))
    journal = Journal(tmp_path, ["k"])
    resumed = list(journal.score(encoded, fresh))
    assert asked == [6, 2]
    assert sorted(r.id for r in resumed) == sorted(e.row.id for e in encoded)
    journal.finish()
    assert list(tmp_path.iterdir()) == []
    # Another key (other weights, other settings) must not find these rows.
    list(Journal(tmp_path, ["k"]).score(encoded, lambda left: fresh(left)))
    list(Journal(tmp_path, ["other"]).score(encoded, fresh))
    assert asked == [6, 2, 6, 6]


# --- bad circumstances --------------------------------------------------------------------------------------------


def test_an_unknown_dtype_and_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="No dtype"):
        ppl(settings=Settings(dtype="float33"), rows=1)
    with pytest.raises(EngineError, match="No processor or tokenizer"):
        load_processor(tmp_path)


class Table(list[dict[str, object]]):
    """What `datasets.load_dataset` gives, as far as it is read."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])


def test_a_data_set_of_the_hub_is_read_by_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns as in llava-bench-in-the-wild: question, reference answer, picture; a row without a picture is a chat."""
    red = Image.new("RGB", (8, 8), "red")
    table = Table(
        [
            {"question": "Which colour?", "gpt_answer": "Red.", "image": red},
            {"question": "Say hi.", "gpt_answer": ["hi", "hello"], "image": None},
        ]
    )
    library = type(sys)("datasets")
    library.load_dataset = lambda repo, split=None: {"train": table} if split is None else table  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    rows = data.load("hub:org/set").rows
    assert [(r.kind, r.answer, len(r.images)) for r in rows] == [("picture", "Red.", 1), ("chat", "hi", 0)]
    assert Image.open(io.BytesIO(rows[0].images[0])).getpixel((0, 0)) == (255, 0, 0)
    assert data.load("hub:org/set:train").hash == data.load("hub:org/set").hash
    library.load_dataset = lambda *_a, **_k: Table([{"a": 1, "b": 2}])  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="columns a, b"):
        data.load("hub:org/set")


def test_a_data_set_of_the_hub_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match="need the package datasets"):
        data.load("hub:org/set")


def test_what_stops_a_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    shown = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "hi"}]
    with pytest.raises(UsageError, match="cannot be decoded"):
        ppl(data=write(tmp_path, {"messages": shown, "images": ["bad.png"]}))
    with pytest.raises(UsageError, match="folder does not exist"):
        ppl(save_reference=tmp_path / "none" / "ref.json")
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match="does not load"):
            ppl(settings=Settings(device="cuda"), rows=1)
