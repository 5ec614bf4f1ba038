"""`ckaudit --help` from start to end, beside a bare `python -c pass`: seconds, best and median of 20 runs each, in turn.

Must reach: 0.25 s, with neither torch, transformers nor huggingface_hub imported.
Run with `python benchmarks/help.py`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode

RUNS = 20
LIMIT = 0.25
HEAVY = ("torch", "transformers", "huggingface_hub", "rich", "msgspec")

COMMANDS = {
    "ckaudit --help": [sys.executable, "-m", "ckaudit", "--help"],
    "ckaudit names --help": [sys.executable, "-m", "ckaudit", "names", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def seconds(command: list[str]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def imported() -> list[str]:
    """Which of HEAVY `--help` pulls in."""
    code = (
        "import sys, ckaudit.cli\n"
        "sys.argv = ['ckaudit', '--help']\n"
        "try: ckaudit.cli.main()\n"
        "except SystemExit: pass\n"
        f"print(*[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stderr.split()


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    print(f"{'command':<24}{'best':>8}{'median':>8}")
    for name, found in times.items():
        print(f"{name:<24}{min(found):>7.3f}s{statistics.median(found):>7.3f}s")
    heavy = imported()
    print(f"heavy imports: {', '.join(heavy) or 'none'}")
    reached = statistics.median(times["ckaudit --help"]) <= LIMIT and not heavy
    print(f"limit {LIMIT} s: {'reached' if reached else 'MISSED'}")
    sys.exit(not reached)


if __name__ == "__main__":
    main()
