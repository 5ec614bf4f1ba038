"""The real program as a subprocess: exit codes, and what goes to stdout and to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import jsonschema
import pytest
from make_fixtures import llama

from ckaudit.report import schema_v1

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "fixtures"
LLAMA = "fixtures/llama-good"


@pytest.fixture
def book() -> str:
    """An engine without torch and without a process: a rule book for the fixtures' Llama."""
    return f"rules:{Path(__file__).parent / 'llama.toml'}"


def ckaudit(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the program with a scrubbed environment, 100 columns wide, off line."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HF_", "CKAUDIT_", "COLUMNS", "NO_COLOR", "FORCE_COLOR"))
    }
    return subprocess.run(
        [sys.executable, "-m", "ckaudit", *args], env=kept | {"COLUMNS": "100", "HF_HUB_OFFLINE": "1"} | env, cwd=cwd or ROOT,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def good() -> str:
    return str(FIXTURES / "llama-good")


class TestUsage:
    @pytest.mark.parametrize("command", [[], ["names"], ["explain"], ["checks"]])
    def test_help(self, command: list[str]) -> None:
        done = ckaudit(*command, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith("Usage: ckaudit")
        assert done.stderr == ""

    def test_version(self) -> None:
        done = ckaudit("--version")
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(r"ckaudit \d+\.\d+\.\d+\S*\n", done.stdout)

    @pytest.mark.parametrize(
        "args",
        [
            ["nonsense"],
            ["names"],
            ["names", "x", "--no-such-option"],
            ["names", "x", "--jobs", "0"],
            ["names", "x", "--fail-on", "sometimes"],
            ["names", "x", "--budget", "soon"],
        ],
    )
    def test_usage_errors(self, args: list[str]) -> None:
        done = ckaudit(*args)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr

    @pytest.mark.parametrize(
        "args",
        [
            ["names", "/no/such/folder"],
            ["names", "fixtures/llama-good", "--engine", "vlm==1"],
            ["names", "fixtures/llama-good", "--ignore", "CK205"],
            ["names", "fixtures/llama-good", "--baseline", "/no/such/file"],
            ["names", "fixtures/llama-good", "--config", "/no/such/file"],
            ["names", "fixtures/llama-good", "--json", "/no/such/folder/x.json"],
            ["names", "fixtures/llama-good", "--json", "/"],
            ["names", "fixtures/llama-good", "--engine", "rules:/no/such/book.toml"],
            ["names", "fixtures/llama-good", "--quiet", "--verbose"],
            ["load", "fixtures/llama-good", "--quiet", "--verbose"],
            ["ppl", "fixtures/llama-good", "--quiet", "--verbose"],
            ["diff", "fixtures/llama-good", "fixtures/llama-good", "--quiet", "--verbose"],
            ["names", "fixtures/llama-good", "--tp", "two"],
            ["names", "fixtures/llama-good", "--fetch"],
            ["names", "fixtures/llama-good", "--engine", "vllm==0.33.0", "--fetch"],
            ["names", "fixtures/llama-good", "--engine", "vllm>=x", "--fetch"],
            ["names", "fixtures/llama-good", "--engine", "vllm>=0.33", "--fetch", "--offline"],
            ["names", "fixtures/llama-good", "--hf-overrides", "[1]"],
            ["names", "fixtures/llama-good", "--pp", "2"],
            ["load", "fixtures/llama-good", "--engine", "vllm", "--stats", "x.csv"],
            ["load", "fixtures/llama-good", "--engine", "vllm", "--expect", "x.json"],
            ["engines", "remove", "vllm==0.0.1"],
            ["engines", "add", "torch==1"],
            ["checks", "CK999"],
        ],
    )
    def test_circumstances_are_one_line_and_exit_2(self, args: list[str]) -> None:
        done = ckaudit(*args)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"ckaudit: .+\n", done.stderr), done.stderr

    def test_one_rank_counts_where_the_model_is_spread_over_stages(self) -> None:
        from ckaudit.cli.options import sizes

        assert sizes("4,1,2") == (2, 4)  # one alone is what every replay loads
        assert sizes("4,1,2", spread=True) == (1, 2, 4)

    def test_debug_shows_the_traceback(self) -> None:
        done = ckaudit("names", "/no/such/folder", "--debug")
        assert done.returncode == 2
        assert "Traceback" in done.stderr


class TestHelpIsLight:
    @pytest.mark.parametrize("args", [["--help"], ["names", "--help"]])
    def test_no_heavy_import(self, args: list[str]) -> None:
        code = (
            "import sys, ckaudit.cli\n"
            f"sys.argv = ['ckaudit', *{args!r}]\n"
            "try: ckaudit.cli.main()\n"
            "except SystemExit: pass\n"
            "assert not {'torch', 'transformers', 'huggingface_hub', 'rich'} & sys.modules.keys()"
        )
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


class TestGuard:
    """What a command may end in, told by commands that do nothing else."""

    @staticmethod
    def run(body: str, *args: str) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys, typer\n"
            "from ckaudit import cli\n"
            "from ckaudit.cli.guard import guarded\n"
            "from ckaudit.errors import SourceError\n"
            "def boom(debug: bool = False) -> None:\n"
            f"    {body}\n"
            "cli.app.command()(guarded(boom))\n"
            f"sys.argv = ['ckaudit', 'boom', *{args!r}]\n"
            "cli.main()\n"
        )
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    def test_a_crash_is_not_a_finding(self) -> None:
        done = self.run("{}['x']")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "ckaudit: crashed: KeyError: 'x'; run with --debug to see where\n"

    def test_a_crash_with_debug(self) -> None:
        done = self.run("{}['x']", "--debug")
        assert done.returncode == 2
        assert "Traceback" in done.stderr

    def test_an_error_says_what_to_do(self) -> None:
        done = self.run("raise SourceError('No such repo.', 'Check the name.')")
        assert (done.returncode, done.stderr) == (2, "ckaudit: No such repo. Check the name.\n")

    def test_an_error_that_quotes_a_hostile_name(self) -> None:
        done = self.run(r"raise SourceError('bad \x1b[2J name\nckaudit: all is well')")
        assert done.stderr == "ckaudit: bad \\x1b[2J name ckaudit: all is well\n"

    def test_ctrl_c(self) -> None:
        done = self.run("raise KeyboardInterrupt")
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "ckaudit: interrupted\n")

    @pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
    def test_a_second_signal_breaks_off_nothing_that_is_due_at_exit(self, name: str, code: int) -> None:
        again = f"import atexit, os, signal; kill = lambda: os.kill(os.getpid(), signal.{name})"
        done = self.run(f"{again}; atexit.register(print, 'closed'); atexit.register(kill); kill()")
        assert (done.returncode, done.stdout) == (code, "closed\n")
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
    def test_a_signal_that_ends_the_program_runs_what_is_due_at_exit(self, name: str) -> None:
        done = self.run(
            f"import os, signal, atexit; atexit.register(print, 'closed'); os.kill(os.getpid(), signal.{name})"
        )
        assert (done.returncode, done.stdout) == (128 + signal.Signals[name], "closed\n")

    def test_a_connection_that_drops_and_then_ends_the_job_is_one_end(self) -> None:
        kill = "import atexit, os, signal; kill = lambda number: os.kill(os.getpid(), number)"
        done = self.run(
            f"{kill}; atexit.register(print, 'closed'); atexit.register(kill, signal.SIGTERM); kill(signal.SIGHUP)"
        )
        assert (done.returncode, done.stdout) == (129, "closed\n")

    @pytest.mark.skipif(shutil.which("nohup") is None, reason="needs nohup")
    def test_nohup_is_respected(self) -> None:
        code = (
            "import os, signal, sys; from ckaudit import cli; sys.argv = ['ckaudit', '--version']\n"
            "try: cli.main()\n"
            "finally: os.kill(os.getpid(), signal.SIGHUP)"
        )
        done = subprocess.run(["nohup", sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0


class TestNames:
    """On rule books, which need no torch: the engine of the tests that are about the command line."""

    def test_stdout_is_the_report_and_stderr_is_silent(self, book: str) -> None:
        done = ckaudit("names", good(), "--engine", book)
        assert done.returncode == 0, done.stderr
        assert "✓ loads" in done.stdout
        assert done.stderr == ""
        assert "\x1b" not in done.stdout

    def test_json_to_stdout_is_json_alone(self, book: str) -> None:
        done = ckaudit("names", good(), "--engine", book, "--json", "-")
        made = json.loads(done.stdout)
        jsonschema.Draft202012Validator(json.loads(schema_v1.SCHEMA.read_text())).validate(made)
        assert (done.returncode, made["exit_code"], done.stderr) == (0, 0, "")

    def test_json_to_a_file_beside_the_text(self, book: str, tmp_path: Path) -> None:
        file = tmp_path / "report.json"
        done = ckaudit("names", good(), "--engine", book, "--json", str(file), "--names")
        assert "✓ loads" in done.stdout
        assert len(json.loads(file.read_text())["engines"][0]["names"]) == 21
        assert [p.name for p in tmp_path.iterdir()] == ["report.json"]

    def test_an_audit_that_fails_leaves_an_old_report_alone(self, tmp_path: Path) -> None:
        file = tmp_path / "report.json"
        file.write_text("old")
        assert ckaudit("names", "/no/such/folder", "--json", str(file)).returncode == 2
        assert file.read_text() == "old"

    def test_json_through_a_link_and_into_a_pipe(self, book: str, tmp_path: Path) -> None:
        """What is no plain file, such as /dev/stdout, is written to; it is not put aside for a file of ours."""
        (tmp_path / "link.json").symlink_to("new.json")
        os.mkfifo(tmp_path / "pipe")
        reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE)
        for file in ("link.json", "pipe"):
            assert ckaudit("names", good(), "--engine", book, "--json", str(tmp_path / file)).returncode == 0
        (tmp_path / "new.json").rename(tmp_path / "old.json")
        assert (tmp_path / "link.json").is_symlink()
        assert (tmp_path / "pipe").is_fifo()
        assert reader.communicate(timeout=60)[0] == (tmp_path / "old.json").read_bytes()

    @pytest.mark.parametrize(("length", "code"), [(255, 0), (256, 2)])
    def test_json_to_the_longest_name(self, book: str, tmp_path: Path, length: int, code: int) -> None:
        done = ckaudit("names", good(), "--engine", book, "--json", str(tmp_path / ("x" * length)))
        assert done.returncode == code
        assert "crashed" not in done.stderr

    def test_two_runs_give_the_same_bytes(self, book: str) -> None:
        first, second = (ckaudit("names", good(), "--engine", book, "--json", "-", "--names").stdout for _ in range(2))
        assert first == second

    def test_quiet(self, book: str) -> None:
        done = ckaudit("names", str(FIXTURES / "llama-extra-bias"), "--engine", book, "--quiet")
        lines = done.stdout.splitlines()
        assert lines[0].startswith("! loads with loss")  # vLLM passes over a bias that it does not know
        assert f"exit {done.returncode}:" in lines[-1]
        assert "CK2" not in done.stdout

    def test_fail_on(self, book: str) -> None:
        target = str(FIXTURES / "llama-extra-bias")
        codes = {f: ckaudit("names", target, "--engine", book, "--fail-on", f).returncode for f in ("note", "never")}
        assert codes == {"note": 1, "never": 0}

    def test_a_reader_that_goes_away_is_no_error(self, book: str) -> None:
        command = [sys.executable, "-m", "ckaudit", "names", good(), "--engine", book, "--json", "-", "--names"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as run:
            assert run.stdout is not None
            assert run.stderr is not None
            run.stdout.close()
            assert run.stderr.read() == ""
            assert run.wait(60) == 0

    @pytest.mark.skipif(not Path("/bin/sh").exists(), reason="closes streams as a shell does")
    @pytest.mark.parametrize(
        ("streams", "target", "code"),
        [
            (">&-", "llama-good", 0),
            ("2>&-", "llama-good", 0),
            ("<&- >&- 2>&-", "llama-good", 0),
            ("<&- >&- 2>&-", "llama-misspelt", 1),
            (">&- 2>&-", "no-such-folder", 2),
            ("2>/dev/full", "no-such-folder", 2),
            ("2>/dev/full", "llama-good --no-such-option", 2),
            ("2>/dev/full", "llama-good --ignore CK203=never", 0),
        ],
    )
    def test_streams_that_take_nothing_change_no_verdict(
        self, book: str, tmp_path: Path, streams: str, target: str, code: int
    ) -> None:
        command = f"{sys.executable} -m ckaudit names fixtures/{target} --engine {book} --json {tmp_path / 'r.json'}"
        done = subprocess.run(f"{command} {streams}", shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert "ckaudit:" not in done.stdout  # what is for stderr never ends up in the report
        if code < 2:
            assert json.loads((tmp_path / "r.json").read_text())["exit_code"] == code

    @pytest.mark.skipif(not Path("/bin/sh").exists(), reason="closes streams as a shell does")
    @pytest.mark.parametrize(
        "args",
        [f"names {LLAMA} --engine {{book}}", f"load {LLAMA}", f"diff {LLAMA} {LLAMA}", f"ppl {LLAMA}"],
    )
    def test_a_report_for_programs_that_nobody_can_read_is_no_success(self, book: str, args: str) -> None:
        command = f"{sys.executable} -m ckaudit {args.format(book=book)} --json - >&-"
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
        said = "ckaudit: Cannot write to stdout: it is closed. Make room there, or send it elsewhere.\n"
        assert (done.returncode, done.stderr) == (2, said)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
    @pytest.mark.parametrize("args", ["names fixtures/llama-good", "names fixtures/llama-good --json -", "--help"])
    def test_a_report_that_cannot_be_written_is_no_success(self, book: str, args: str) -> None:
        command = f"{sys.executable} -m ckaudit {args}" + (f" --engine {book}" if "names" in args else "")
        done = subprocess.run(f"{command} >/dev/full", shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (
            2,
            "ckaudit: Cannot write to stdout: no space left on device. Make room there, or send it elsewhere.\n",
        )

    def test_colours_on_a_terminal_unless_no_color(self, book: str) -> None:
        assert "\x1b[1;32m✓ loads" in _on_a_terminal("names", good(), "--engine", book)
        assert "\x1b[" not in _on_a_terminal("names", good(), "--engine", book, "--quiet", NO_COLOR="1").replace(
            "\x1b[?25", ""
        )

    def test_an_output_that_is_not_unicode(self, book: str) -> None:
        done = ckaudit("names", good(), "--engine", book, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert done.returncode == 0
        assert "loads" in done.stdout

    def test_neither_torch_nor_transformers_is_imported(self, book: str) -> None:
        code = (
            "import sys, ckaudit.cli\n"
            f"sys.argv = ['ckaudit', 'names', {good()!r}, '--engine', {book!r}]\n"
            "try: ckaudit.cli.main()\n"
            "except SystemExit as done: assert done.code == 0\n"
            "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()"
        )
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_audit_leaves_no_worker(sent: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "ckaudit", "names", good(), "--engine", "transformers", "--no-cache"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as run:
        deadline = time.monotonic() + 60
        while not (workers := _children(run.pid)) and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(sent)
        out, _ = run.communicate(timeout=60)
    assert workers, "no worker was started"
    assert (run.returncode, out) == (code, "")
    # One that was just being started sees its pipe close and ends by itself.
    while (left := [pid for pid in workers if _runs(pid)]) and time.monotonic() < deadline + 60:
        time.sleep(0.05)
    assert left == []


def _runs(pid: int) -> bool:
    """Whether the process is there and not only its exit code."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _children(pid: int) -> list[int]:
    """Processes that the threads of `pid` have started."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


class TestExplain:
    def test_one_tensor(self, book: str) -> None:
        done = ckaudit("explain", good(), "model.norm.weight", "--engine", book)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("model.norm.weight\n")
        assert re.search(r"fate +loaded", done.stdout)

    def test_a_name_that_is_not_there(self, book: str) -> None:
        done = ckaudit("explain", good(), "model.norn.weight", "--engine", book)
        assert done.returncode == 2
        assert "Did you mean 'model.norm.weight'?" in done.stderr


class TestRulesLint:
    BOOK = str(Path(__file__).parent / "llama.toml")

    def test_without_names_what_needs_them_is_not_judged(self) -> None:
        done = ckaudit("rules", "lint", self.BOOK)
        assert done.returncode == 0, done.stderr
        assert "no names were given" in done.stdout

    def test_on_a_target_and_on_a_list(self, tmp_path: Path) -> None:
        names = tmp_path / "names.txt"
        names.write_text("".join(f"{n}\n" for n in llama()))
        on_target = ckaudit("rules", "lint", self.BOOK, "--target", good())
        on_list = ckaudit("rules", "lint", self.BOOK, "--names-file", str(names))
        assert (on_target.returncode, on_list.returncode) == (0, 0)
        assert "tried on 21 names" in on_target.stdout
        assert on_list.stdout == on_target.stdout

    def test_a_book_that_cascades(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.toml"
        bad.write_text(Path(self.BOOK).read_text().replace('".', '"'))  # keys lose their dot, as in vLLM 0.25
        done = ckaudit("rules", "lint", str(bad), "--target", good())
        assert done.returncode == 1
        assert "CK701" in done.stdout

    def test_two_lists_of_names(self) -> None:
        done = ckaudit("rules", "lint", self.BOOK, "--target", good(), "--names-file", "x")
        assert (done.returncode, done.stdout) == (2, "")


class TestChecks:
    def test_the_catalogue(self) -> None:
        done = ckaudit("checks")
        assert done.returncode == 0
        assert re.search(r"CK201 +error +cascading substitution", done.stdout)

    def test_a_page(self) -> None:
        done = ckaudit("checks", "ck201")
        assert done.returncode == 0
        assert "CK201" in done.stdout


def test_what_goes_to_a_pager_is_as_wide_as_the_terminal() -> None:
    read, write = pty.openpty()
    termios.tcsetwinsize(write, (24, 72))  # rows, columns
    kept = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    command = [sys.executable, "-m", "ckaudit", "checks", "CK201"]
    widths = [
        max(map(len, subprocess.run(command, stdout=subprocess.PIPE, stderr=err, text=True, env=kept, cwd=ROOT).stdout.splitlines()))
        for err in (write, subprocess.PIPE)
    ]  # fmt: skip
    os.close(read)
    os.close(write)
    assert widths[0] <= 72 < widths[1] <= 100


def _on_a_terminal(*args: str, **env: str) -> str:
    """What the program writes to a terminal of 100 columns."""
    read, write = pty.openpty()
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    run = subprocess.Popen(
        [sys.executable, "-m", "ckaudit", *args], stdout=write, stderr=subprocess.PIPE,
        env=kept | {"TERM": "xterm", "COLUMNS": "100"} | env, cwd=ROOT,
    )  # fmt: skip
    os.close(write)
    out = b""
    while True:
        try:
            chunk = os.read(read, 65536)
        except OSError:  # the other end was closed
            break
        if not chunk:
            break
        out += chunk
    run.communicate(timeout=60)
    os.close(read)
    return out.decode()
