"""The documentation is true: every check has its page, every command parses, exit codes and samples are the program's own."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

from ckaudit import checks, cli
from ckaudit.checks.catalogue import CHECKS
from ckaudit.findings import Check

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "checks"
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
DOCUMENTS = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", "docs/ci.md", "docs/json.md", "docs/load.md", "docs/perplexity.md")
]


class TestCatalogue:
    def test_ids_are_used_once(self) -> None:
        assert len({c.id for c in CHECKS}) == len(CHECKS)

    def test_it_is_whole(self) -> None:
        """Every check of every module under `checks` is in it."""
        found: set[Check] = set()
        for module in walk_packages(checks.__path__, "ckaudit.checks."):
            found |= {v for v in vars(import_module(module.name)).values() if isinstance(v, Check)}
        assert {c.id for c in found} == {c.id for c in CHECKS}

    @pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.id)
    def test_every_check_has_a_page(self, check: Check) -> None:
        page = (PAGES / f"{check.id}.md").read_text(encoding="utf-8")
        assert page.splitlines()[0] == f"# {check.id}: {check.title}"

    def test_every_page_has_a_check(self) -> None:
        assert sorted(p.stem for p in PAGES.glob("*.md")) == [c.id for c in CHECKS]


def commands() -> list[tuple[str, str]]:
    """(where, command) of every `ckaudit …` line in the documents, those of CI jobs included."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```(?:console|sh|yaml)\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            lines = (re.sub(r"^\s*(\$|- run:|run:|-|command:) ", "", line) for line in block.splitlines())
            found += [(document.name, line) for line in lines if line.startswith("ckaudit ")]
    return found


def options(*command: str) -> set[str]:
    """Every long option that `--help` of the command names."""
    done = subprocess.run(
        [sys.executable, "-m", "ckaudit", *command, "--help"], capture_output=True, text=True, check=True
    )
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", done.stdout))


def test_there_are_commands_to_test() -> None:
    assert len(commands()) >= 24


@pytest.mark.parametrize(("where", "command"), commands(), ids=lambda v: v[:60])
def test_every_command_names_options_and_files_that_exist(where: str, command: str) -> None:
    words = shlex.split(command)[1:]
    verb = words[:2] if words[0] in ("rules", "engines") else words[:1]
    assert {w for w in words if w.startswith("--")} <= options(*verb)
    for word in words:
        if word.startswith(("fixtures/", "rules/", "tests/")):
            assert (ROOT / word).exists(), f"{where}: {word}"


def test_every_option_in_prose_exists() -> None:
    commands = ((), ("names",), ("load",), ("ppl",), ("diff",), ("explain",), ("rules", "lint"))
    known = set[str]().union(*(options(*c) for c in commands))
    for document in DOCUMENTS[:1] + DOCUMENTS[2:]:
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert set(re.findall(r"`(--[a-z][a-z-]+)", text)) <= known, document.name


@pytest.mark.parametrize("page", [README, CI], ids=["README", "ci"])
def test_exit_codes(page: str) -> None:
    assert re.findall(r"^\| ([0-9]) \|", page, re.MULTILINE) == ["0", "1", "2", "3"]
    assert [int(n) for n in re.findall(r"\b([0-9]) [a-z]", cli.EXIT_CODES)] == [0, 1, 2, 3]


def test_every_verdict_and_fate_is_explained() -> None:
    from ckaudit.plan import Fate, Verdict

    for word in (*Verdict.__args__, *Fate.__args__):  # type: ignore[attr-defined]
        assert f"`{word.replace('_', ' ')}`" in README, word


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_python_samples_run() -> None:
    for document in (ROOT / "README.md", ROOT / "docs" / "json.md"):
        for block in re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_samples_are_what_the_program_prints() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "regenerate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}run python docs/regenerate.py"
