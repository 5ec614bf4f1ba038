"""Sample outputs in the documentation, made by the program itself.

Every line `$ ckaudit …` of a ```console block in the files below is run in the repository's root, without a network, and what it prints is
put beneath it; and the picture in the README is drawn. `--check` changes nothing and exits 1 where something is out of step.
Releases of torch and transformers are written as X.Y.Z, for they differ from machine to machine.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parent.parent
FILES = ("README.md", "docs/ci.md")
PICTURE = ROOT / "docs/images/minicpm-v-4.6.svg"
PICTURED = "ckaudit names fixtures/minicpm-v-4.6 --engine rules:vllm==0.25.1"
WIDTH = 90

_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
_RELEASE = re.compile(r"\b(transformers|torch) \d+\.\d+\.\d+\S*")


def run(command: str, **env: str) -> str:
    """What `command` puts on stdout; it runs in the repository's root and writes its files to nowhere that is kept."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "NO_COLOR", "FORCE_COLOR"))}
    with tempfile.TemporaryDirectory() as scratch:
        words = [os.path.join(scratch, w) if w.endswith(".json") and "/" not in w else w for w in shlex.split(command)]
        if "--baseline" in words:  # the report of the command that the page shows before it
            first = [*words[: words.index("--baseline")], "--json", words[words.index("--baseline") + 1]]
            subprocess.run([sys.executable, "-m", *first], cwd=ROOT, env=kept, capture_output=True, check=False)
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=ROOT, env=kept | {"COLUMNS": str(WIDTH), "HF_HUB_OFFLINE": "1"} | env,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
        )  # fmt: skip
    return _RELEASE.sub(r"\1 X.Y.Z", done.stdout)


def filled(page: str) -> str:
    """The page with the output of every command beneath it."""

    def block(match: re.Match[str]) -> str:
        commands = [line for line in match[1].splitlines() if line.startswith("$ ")]
        shown = (f"{line}\n{run(line[2:])}" if line.startswith("$ ckaudit") else f"{line}\n" for line in commands)
        return "```console\n" + "\n".join(shown) + "```"

    return _BLOCK.sub(block, page)


def picture() -> str:
    """The output of one audit as SVG."""
    out = run(PICTURED, FORCE_COLOR="1")
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text.from_ansi(f"$ {PICTURED}\n\n{out}".rstrip()))
    svg = console.export_svg(title="ckaudit", theme=MONOKAI, unique_id="ckaudit")
    # No font from another host, and blanks that every renderer keeps.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace")
    svg = svg.replace('<svg class="rich-terminal"', '<svg class="rich-terminal" xml:space="preserve"', 1)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    check = "--check" in sys.argv
    subprocess.run([sys.executable, str(ROOT / "fixtures" / "make.py")], check=True, stdout=subprocess.DEVNULL)
    wanted = {ROOT / name: filled((ROOT / name).read_text(encoding="utf-8")) for name in FILES} | {PICTURE: picture()}
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'out of step' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
    sys.exit(check and bool(stale))


if __name__ == "__main__":
    main()
