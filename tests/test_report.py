"""Counting, ordering, exit codes, and the terminal view."""

from __future__ import annotations

import re

import msgspec
import pytest
from reports import HOSTILE, cascade, finding, good, hostile, report, target, unjudged

from ckaudit.findings import Skip, ordered, tally
from ckaudit.plan import NameFate, Parameter
from ckaudit.report import terminal
from ckaudit.report.terminal import explain
from ckaudit.report.terminal.layout import short, size

TEXT_THAT_MUST_NOT_PASS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class TestTally:
    def test_every_tensor_is_counted_once(self) -> None:
        n = tally(cascade(), {"q_proj.weight": 2000, "norm.weight": 10})
        assert (n.loaded, n.unmatched, n.by_design, n.ignored, n.dropped, n.not_reached) == (1, 1, 1, 0, 0, 0)

    def test_lost_bytes_are_those_that_were_meant_to_be_read(self) -> None:
        # q_proj is unmatched: all of its 2000; norm is left by design: none of its 10.
        assert tally(cascade(), {"q_proj.weight": 2000, "norm.weight": 10}).bytes_lost == 2000

    def test_the_unread_share_of_a_loaded_tensor_is_lost(self) -> None:
        plan = good(names=(NameFate(name="a", fate="loaded", into="a", read=0.25),))
        assert tally(plan, {"a": 1000}).bytes_lost == 750

    def test_what_the_loader_never_came_to_is_not_lost(self) -> None:
        plan = good(names=(NameFate(name="a", fate="not_reached"),))
        assert tally(plan, {"a": 1000}).bytes_lost == 0

    def test_parameters_left_by_design_are_told_apart(self) -> None:
        n = tally(cascade(), {})
        assert (n.parameters, n.full, n.partial, n.none, n.unknown, n.unwritten_by_design) == (2, 0, 1, 1, 0, 1)


class TestExitCode:
    def test_clean(self) -> None:
        assert report(plans=(good(),), findings=()).exit_code == 0

    @pytest.mark.parametrize(
        ("severity", "fail_on", "code"),
        [
            ("error", "error", 1), ("warning", "error", 0), ("note", "error", 0),
            ("error", "warning", 1), ("warning", "warning", 1), ("note", "warning", 0),
            ("note", "note", 1), ("error", "never", 0),
        ],
    )  # fmt: skip
    def test_fail_on(self, severity: str, fail_on: str, code: int) -> None:
        assert report(findings=(finding(severity=severity),), fail_on=fail_on).exit_code == code

    def test_an_engine_asked_for_by_name_that_was_not_judged(self) -> None:
        asked = report(plans=(good(), unjudged()), findings=(), requested=frozenset({"vllm==0.33.0"}))
        assert asked.exit_code == 3
        assert msgspec.structs.replace(asked, allow_not_judged=True).exit_code == 0
        assert msgspec.structs.replace(asked, requested=frozenset()).exit_code == 0

    def test_a_layout_asked_for_that_was_not_judged(self) -> None:
        row = {"size": 8, "verdict": "not_judged", "error": "the budget of time was used up before rank 3"}
        asked = report(plans=(msgspec.structs.replace(good(), tp=(row,)),), findings=())
        assert asked.exit_code == 3
        assert msgspec.structs.replace(asked, allow_not_judged=True).exit_code == 0
        loads = msgspec.structs.replace(good(), tp=(row | {"verdict": "loads", "error": None},))
        assert report(plans=(loads,), findings=()).exit_code == 0

    def test_nothing_judged_at_all(self) -> None:
        assert report(plans=(unjudged(),), findings=()).exit_code == 3
        assert report(plans=(), findings=()).exit_code == 3

    def test_findings_come_before_what_was_not_judged(self) -> None:
        assert report(plans=(unjudged(),), findings=(finding(engine=None),)).exit_code == 1

    def test_a_load_that_was_stopped_is_no_verdict(self) -> None:
        stopped = report(plans=(good(),), findings=(finding(),), stopped=True, fail_on="never")
        assert stopped.exit_code == 2
        assert "exit 2: the load was stopped" in terminal.render(stopped)

    def test_a_suppressed_finding_does_not_count(self) -> None:
        hushed = report(findings=(finding(suppressed_by="known"), finding(severity="note")))
        assert hushed.exit_code == 0
        assert hushed.worst == "note"
        assert (hushed.summary.errors, hushed.summary.notes, hushed.summary.suppressed) == (0, 1, 1)


def test_findings_stand_worst_first_then_files_then_engines_in_their_order() -> None:
    made = [
        finding(severity="note", engine=None, check="CK101"),
        finding(severity="error", engine="b", check="CK201"),
        finding(severity="error", engine="a", check="CK202"),
        finding(severity="error", engine=None, check="CK109"),
    ]
    found = ordered(made, ["a", "b"])
    assert [(f.severity, f.engine, f.check) for f in found] == [
        ("error", None, "CK109"),
        ("error", "a", "CK202"),
        ("error", "b", "CK201"),
        ("note", None, "CK101"),
    ]
    assert ordered(reversed(made), ["a", "b"]) == found


class TestTerminal:
    def test_verdicts_come_before_findings(self) -> None:
        lines = terminal.render(report()).splitlines()
        loads = next(i for i, line in enumerate(lines) if line.startswith("✓ loads"))
        fails = next(i for i, line in enumerate(lines) if line.startswith("✗ fails"))
        first = next(i for i, line in enumerate(lines) if "CK201" in line)
        assert loads < fails < first

    def test_a_rules_verdict_says_that_it_is_provisional(self) -> None:
        (line,) = (line for line in terminal.render(report()).splitlines() if line.startswith("✗ fails"))
        assert "provisional" in line
        assert "provisional" not in terminal.render(report(plans=(good(),), findings=()))

    def test_the_chain_is_told_step_by_step(self) -> None:
        out = terminal.render(report())
        steps = [
            "q_proj.weight\n",
            "→ qkv_proj.weight  (stacked 'q_proj' in attn",
            "→ qkqkv_proj.weight  (stacked 'v_proj' in attn",
        ]
        places = [out.index(step) for step in steps]
        assert places == sorted(places)

    def test_cause_and_cure(self) -> None:
        out = terminal.render(report())
        for text in (
            "wanted",
            "found",
            "Serve with 0.33.0.",
            "blame: engine",
            "There is no parameter named 'qkqkv_proj'",
        ):
            assert text in out

    def test_one_cause_in_two_engines_is_told_once(self) -> None:
        both = (finding(engine="transformers"), finding(engine="rules:vllm==0.25.1"))
        out = terminal.render(report(findings=both))
        assert out.count("CK201") == 1
        assert "transformers · rules:vllm==0.25.1" in out

    def test_different_causes_stay_apart(self) -> None:
        assert terminal.render(report(findings=(finding(), finding(found="other")))).count("CK201") == 2

    def test_many_names_are_folded_and_cut_unless_all_are_asked_for(self) -> None:
        names = tuple(f"layers.{i}.{leaf}" for i in range(24) for leaf in "abcdefgh")
        made = report(findings=(finding(names=names, count=len(names), bytes=0),))
        assert "layers.{0..23}.a" in terminal.render(made)
        assert "… and 3 more lines" in terminal.render(made)
        assert "layers.{0..23}.h" in terminal.render(made, verbose=True)

    def test_quiet_keeps_verdicts_and_summary(self) -> None:
        out = terminal.render(report(), quiet=True)
        assert "✗ fails" in out
        assert "1 error" in out
        assert "CK201" not in out

    def test_verbose_shows_what_is_left_by_design_rules_and_versions(self) -> None:
        out = terminal.render(report(), verbose=True)
        assert re.search(r"1 tensor +computed +norm\.weight", out)
        assert re.search(r"tied-twice +both are stored; the later one wins +norm\.weight", out)
        assert re.search(r"0 +stacked +\.z +y +attn", out)
        assert re.search(r"torch +2\.13\.0", out)

    def test_every_name_with_its_fate(self) -> None:
        out = terminal.render(report(), names=True)
        assert "  unmatched    q_proj.weight → qkqkv_proj.weight (v)\n" in out
        assert "  loaded       norm.weight\n" in out  # it went where it is called
        assert "  ignored      norm.weight  computed\n" in out

    def test_skips_with_one_reason_share_a_line(self) -> None:
        checks = ("CK301", "CK302", "CK303", "CK306", "CK307", "rules")
        skips = tuple(Skip(check=c, engine="transformers", reason="no shapes") for c in checks)
        out = terminal.render(report(skips=skips))
        assert "  transformers: no shapes  CK301–CK303 CK306 CK307 rules\n" in out
        assert "6 not judged" in out

    def test_the_reason_of_a_verdict_that_is_missing_is_told_once(self) -> None:
        skip = Skip(check="CK203", engine="vllm==0.33.0", reason="no compressed_tensors")
        out = terminal.render(report(plans=(unjudged(),), findings=(), skips=(skip,)))
        assert out.count("no compressed_tensors") == 1

    def test_a_verdict_on_names_does_not_hide_broken_files(self) -> None:
        out = terminal.render(report(plans=(good(),), findings=(finding(engine=None, check="CK103"),)))
        assert "by names and shapes alone: the files themselves are faulty, see CK103" in out
        assert "by names and shapes alone" not in terminal.render(report())

    def test_the_exit_code_is_explained(self) -> None:
        assert "exit 1: findings at or above error" in terminal.render(report())
        assert "exit 3: something asked for could not be judged" in terminal.render(
            report(plans=(unjudged(),), findings=())
        )

    @pytest.mark.parametrize("width", [40, 80, 120])
    @pytest.mark.parametrize("verbose", [False, True])
    def test_no_line_is_wider_than_asked(self, width: int, verbose: bool) -> None:
        long = report(findings=(finding(names=("x" * 500,), message="word " * 100),), target=target(name="n" * 300))
        assert max(map(len, terminal.render(long, width=width, verbose=verbose).splitlines())) <= width

    @pytest.mark.parametrize(
        ("verdicts", "told"),
        [
            ("0.24.0+ 0.25.1- 0.27.1- 0.33.0+", "first bad release 0.25.1, good again from 0.33.0"),
            ("0.24.0+ 0.9.0+ 0.25.1-", "first bad release 0.25.1, still bad in 0.25.1"),
            ("0.25.1- 0.33.0+", "bad from the first release asked, 0.25.1, good again from 0.33.0"),
            ("0.24.0+ 0.33.0+", None),
            ("0.25.1-", None),
            ("0.24.0? 0.25.1-", None),
        ],
    )
    def test_of_several_releases_the_first_bad_and_good_ones(self, verdicts: str, told: str | None) -> None:
        made = {"+": None, "-": {"error": "raises"}, "?": {"not_judged": "no time"}}
        plans = tuple(
            good(id=f"vllm=={v[:-1]}", engine="vllm", release=v[:-1], **(made[v[-1]] or {})) for v in verdicts.split()
        )
        out = terminal.render(report(plans=plans, findings=()))
        assert (f"  vllm: {told}" in out) if told else ("release" not in out)

    def test_colours_only_when_asked(self) -> None:
        assert "\x1b" not in terminal.render(report())
        assert "\x1b[1;31m" in terminal.render(report(), colour=True)

    @pytest.mark.parametrize("verbose", [False, True])
    def test_hostile_text_cannot_touch_the_terminal(self, verbose: bool) -> None:
        out = terminal.render(hostile(), width=4000, verbose=verbose, names=verbose)
        assert not TEXT_THAT_MUST_NOT_PASS.search(out)
        assert r"a\x1b[31m\n\u202e[red]b[/red]\\x" in out  # markup is printed, not obeyed

    def test_hostile_text_cannot_touch_an_explanation(self) -> None:
        out = explain.render(hostile(), HOSTILE, width=4000)
        assert not TEXT_THAT_MUST_NOT_PASS.search(out)


class TestExplain:
    def test_a_tensor(self) -> None:
        out = explain.render(explain.about(report(), "q_proj.weight"), "q_proj.weight")
        for text in ("→ qkv_proj.weight", "→ qkqkv_proj.weight", "unmatched", "CK201", "no rule changes the name"):
            assert text in out

    def test_a_parameter(self) -> None:
        out = explain.render(explain.about(report(), "qkv_proj.weight"), "qkv_proj.weight")
        assert "partly written (33.3%)" in out
        assert "k_proj.weight" in out
        assert "CK201" not in out  # that finding names the tensor, not the parameter

    def test_known_names(self) -> None:
        assert explain.known(report(), "norm.weight")
        assert explain.known(report(plans=(cascade(),)), "qkv_proj.weight")
        assert not explain.known(report(), "q_proj")


@pytest.mark.parametrize(
    ("count", "shown"), [(999, "999"), (1_300_659_440, "1.3 B"), (494_000_000, "494 M"), (1_000_000_000_000, "1 T")]
)
def test_short(count: int, shown: str) -> None:
    assert short(count) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(1, "1 byte"), (999, "999 bytes"), (1000, "1.0 kB"), (2_601_318_880, "2.6 GB")]
)
def test_size(count: int, shown: str) -> None:
    assert size(count) == shown


def test_an_empty_report_renders() -> None:
    empty = report(plans=(), findings=(), target=target(tensors=0, parameters=None, bytes=None, shards=0, dtypes={}))
    assert "not judged" in terminal.render(empty)


def test_without_a_tensor_all_that_is_open_is_told_in_one_line() -> None:
    many = tuple(Skip(f"CK{n}", f"reason {n}") for n in range(301, 310))
    nothing = report(plans=(), findings=(), skips=many, target=target(tensors=0))
    assert "no tensor could be read  9 checks" in terminal.render(nothing)
    assert "reason 305" not in terminal.render(nothing)
    assert "reason 305" in terminal.render(nothing, verbose=True)
    assert "reason 305" in terminal.render(report(plans=(), findings=(), skips=many))


def test_engines_without_a_verdict_share_a_line() -> None:
    plans = (unjudged(), unjudged(id="vllm==1", not_judged="no room"))
    skips = tuple(Skip("CK203", p.not_judged or "", p.id) for p in plans)
    out = terminal.render(report(plans=plans, skips=skips))
    assert f"{plans[0].id}, vllm==1: no verdict, see above  CK203" in out


@pytest.mark.parametrize("width", [40, 60, 70, 80, 100])
def test_the_last_line_breaks_before_the_exit_code_or_not_at_all(width: int) -> None:
    lines = terminal.render(report(), width=width).splitlines()
    end = next(line for line in reversed(lines) if "exit 1" in line)
    assert end.endswith("exit 1: findings at or above error")
    assert max(map(len, lines[-2:])) <= width


def test_a_partly_read_parameter_without_share_renders() -> None:
    plan = cascade(parameters=(Parameter(name="qkv_proj.weight", coverage="partial"),))
    assert "partly written" in explain.render(report(plans=(plan,)), "qkv_proj.weight")
