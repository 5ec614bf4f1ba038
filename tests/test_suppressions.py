"""Ignore rules and baselines: what they hush, what still stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from reports import finding, report

from ckaudit.errors import UsageError
from ckaudit.findings import Finding
from ckaudit.report import json_v1
from ckaudit.suppressions import Suppressions, apply, parse, read

NAMES = ("layers.0.rotary.inv_freq", "layers.1.rotary.inv_freq", "head.bias")
SIZES = {NAMES[0]: 8, NAMES[1]: 8, NAMES[2]: 100}


def of(*options: str, made: Finding | None = None) -> list[tuple[str | None, tuple[str, ...], int, int]]:
    """(reason, names, count, bytes) of every finding after the `--ignore` options."""
    made = made or finding(check="CK205", names=NAMES, count=3, bytes=116)
    found, _ = apply([made], Suppressions(tuple(map(parse, options))), "org/model", SIZES)
    return [(f.suppressed_by, f.names, f.count, f.bytes) for f in found]


def test_all_names() -> None:
    assert of("CK205=known") == [("known", NAMES, 3, 116)]


def test_a_finding_is_split_and_the_rest_stands() -> None:
    assert of("CK205:layers.*.inv_freq=a buffer") == [("a buffer", NAMES[:2], 2, 16), (None, NAMES[2:], 1, 100)]


@pytest.mark.parametrize("family", ["CK2xx=x", "CK20x=x"])
def test_a_family(family: str) -> None:
    assert of(family)[0][0] == "x"


@pytest.mark.parametrize("other", ["CK206=x", "CK3xx=x", "CK205:tail.*=x", "CK205:Layers.*=x"])
def test_near_misses_hush_nothing(other: str) -> None:
    assert of(other) == [(None, NAMES, 3, 116)]


def test_a_finding_without_names_goes_by_its_message() -> None:
    made = finding(check="CK401", names=(), message="config is newer")
    assert of("CK401:*newer=x", made=made)[0][0] == "x"
    assert of("CK401:*older=x", made=made)[0][0] is None


def test_rules_that_hush_nothing_are_told() -> None:
    rules = (parse("CK205=x"), parse("CK999=y"))
    _, unused = apply([finding(check="CK205")], Suppressions(rules), "org/model", {})
    assert unused == rules[1:]


@pytest.mark.parametrize(
    "option", ["CK205", "CK205=", "CK205:a= ", "205=x", "CK2=x", "CKxxx=x", "ck205=x", "CK2055=x", ""]
)
def test_no_rule_without_check_and_reason(option: str) -> None:
    with pytest.raises(UsageError):
        parse(option)


class TestConfig:
    def test_rules(self, tmp_path: Path) -> None:
        file = tmp_path / "c.toml"
        file.write_text('[[ignore]]\ncheck = "CK205"\nreason = "r"\nengine = "vllm*"\ntarget = "org/*"\n')
        by = read(config=file)
        made = [finding(check="CK205", engine=e) for e in ("vllm==0.25.1", "transformers", None)]
        assert [f.suppressed_by for f in apply(made, by, "org/model", {})[0]] == ["r", None, None]
        assert [f.suppressed_by for f in apply(made, by, "other/model", {})[0]] == [None, None, None]

    @pytest.mark.parametrize(
        "text",
        [
            "[[ignore]]\ncheck = 'CK205'\n",  # no reason
            "[[ignore]]\ncheck = 'CK205'\nreason = ' '\n",
            "[[ignore]]\ncheck = 'CK205'\nreason = 'r'\nname = 'typo'\n",  # unknown key
            "[[ignored]]\ncheck = 'CK205'\nreason = 'r'\n",
            "[[ignore]]\ncheck = 5\nreason = 'r'\n",
            "not toml",
            "a = " + "9" * 5000,  # more digits than Python reads
            "a = " + "[" * 9999,
        ],
    )
    def test_what_is_wrong_is_refused(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "c.toml"
        file.write_text(text)
        with pytest.raises(UsageError, match=r"c\.toml"):
            read(config=file)

    def test_it_is_found_in_the_working_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert read() == Suppressions()
        Path("ckaudit.toml").write_text('[[ignore]]\ncheck = "CK205"\nreason = "r"\n')
        assert [rule.check for rule in read().ignores] == ["CK205"]


class TestBaseline:
    def test_old_names_are_hushed_and_new_ones_stand(self, tmp_path: Path) -> None:
        file = tmp_path / "old.json"
        file.write_text(json_v1.render(report(findings=(finding(names=("a", "b")),))))
        by = read(baseline=file)
        found, _ = apply([finding(names=("a", "b", "c"))], by, "t", {})
        assert [(f.suppressed_by, f.names) for f in found] == [("in the baseline", ("a", "b")), (None, ("c",))]

    def test_the_same_names_under_another_check_or_engine_stand(self, tmp_path: Path) -> None:
        file = tmp_path / "old.json"
        file.write_text(json_v1.render(report(findings=(finding(names=("a",)),))))
        made = [finding(names=("a",), check="CK202"), finding(names=("a",), engine="transformers")]
        assert [f.suppressed_by for f in apply(made, read(baseline=file), "t", {})[0]] == [None, None]

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"schema_version": 1}', '{"schema_version": 1, "findings": [1]}', "\xff", "[" * 99999]
    )
    def test_what_is_no_report_is_refused(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "old.json"
        file.write_text(text)
        with pytest.raises(UsageError, match="no ckaudit report"):
            read(baseline=file)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="Cannot read"):
            read(baseline=tmp_path / "none.json")
