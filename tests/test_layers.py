"""Imports point one way, and each heavy or outward-facing library has its fence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ckaudit"

# A module may import from its own row and the rows above it. Every module has a row: a new one has to be placed here on purpose.
ROWS = (
    ("ckaudit", "errors", "progress", "resources", "sniff", "jsonscan", "header"),
    ("naming", "patterns", "renames", "plan", "changes", "scores", "mapper"),
    ("source",),
    ("index", "checkpoint"),
    ("rulebook",),
    ("engines", "adapters"),
    ("findings", "suppressions"),
    ("checks",),
    ("diff",),
    ("materialize",),
    ("perplexity",),
    ("report",),
    ("pipeline",),
    ("cli", "__main__"),
)
ROW = {name: i for i, row in enumerate(ROWS) for name in row}

# Library -> the only places that may import it, late or not.
LOADERS = ("engines.transformers", "engines.vllm", "materialize", "perplexity")
FENCES = {
    "typer": ("cli",),
    "click": (),
    "rich": ("cli", "report.terminal"),
    "huggingface_hub": ("source.hub",),
    "httpx": ("source.hub",),
    "httpx2": ("source.hub",),
    "requests": (),
    "torch": LOADERS,
    "transformers": LOADERS,
    "accelerate": LOADERS,
    "safetensors": LOADERS,
    "vllm": ("engines.vllm", "materialize"),
    "pickle": (),
}


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__") or "ckaudit"


def _imports(path: Path) -> set[str]:
    """Every module that `path` imports, at its top or late; what is only for type checking is not imported."""
    found: set[str] = set()
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            stack += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        stack += ast.iter_child_nodes(node)
    return found


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts)


def test_the_package_was_found() -> None:
    assert len(MODULES) > 20


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_point_up(path: Path) -> None:
    top = _name(path).split(".")[0]
    assert top in ROW, f"{top} has no row in this test: decide where it belongs"
    for imported in _imports(path):
        if imported.startswith("ckaudit."):
            other = imported.split(".")[1]
            other = other if other in ROW else "ckaudit"  # a name of the package itself, such as __version__
            assert ROW[other] <= ROW[top], f"{_name(path)} imports {imported}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_fences(path: Path) -> None:
    name = _name(path)
    for imported in _imports(path):
        allowed = FENCES.get(imported.split(".")[0])
        if allowed is not None:
            assert any(name == a or name.startswith(f"{a}.") for a in allowed), f"{name} imports {imported}"


def test_the_reader_of_imports_sees_late_ones_and_skips_those_for_types(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import a\n"
        "def f():\n    from b.c import d\n    try:\n        import e\n    finally: pass\n"
    )
    assert _imports(file) == {"a", "b.c.d", "e"}
