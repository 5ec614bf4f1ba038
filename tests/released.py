"""Sources of released vLLM wheels for tests, fetched once from the package index; only the few files that tests read are kept.

A test that uses this is marked `wheel` and is skipped, with the reason, only where the index cannot be reached.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import platformdirs
import pytest

CACHE = Path(os.environ.get("CKAUDIT_TEST_CACHE") or platformdirs.user_cache_path("ckaudit-tests")) / "vllm"
KEEP = (
    "vllm/model_executor/models/",
    "vllm/model_executor/layers/linear.py",
    "vllm/lora/utils.py",
    "vllm/lora/peft_helper.py",
)
# The wheel need not run here, only be read: any tag will do.
TAGS = ("2_28", "2_31", "2_34", "2_35")


@cache
def source(release: str, path: str) -> str:
    """The text of `path` in the wheel of `release`."""
    return (_unpacked(release) / path).read_text("utf-8")


def classes(release: str, path: str, names: Iterable[str]) -> ast.Module:
    """The module of `path` cut down to the classes and functions `names`, in their order there."""
    wanted = set(names)
    tree = ast.parse(source(release, path))
    body = [n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name in wanted]
    assert {n.name for n in body} == wanted, f"{release}: {path} lacks {wanted - {n.name for n in body}}"
    return ast.Module(body, type_ignores=[])


def _unpacked(release: str) -> Path:
    folder = CACHE / release
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        wheel = _download(release, Path(scratch))
        fresh = Path(scratch) / "fresh"
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".py") and name.startswith(KEEP):
                    archive.extract(name, fresh)
        try:
            fresh.rename(folder)
        except OSError:  # another test process was quicker
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _download(release: str, into: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.11",
    ]
    command += [part for tag in TAGS for part in ("--platform", f"manylinux_{tag}_x86_64")]
    command += [
        "--platform",
        "manylinux1_x86_64",
        "--platform",
        "manylinux2014_x86_64",
        "-d",
        str(into),
        f"vllm=={release}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    found = list(into.glob("*.whl"))
    if found:
        return found[0]
    if any(
        text in done.stderr
        for text in ("Connection", "connection", "Could not fetch URL", "Temporary failure", "timed out")
    ):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    raise AssertionError(done.stderr)
