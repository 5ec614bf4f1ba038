"""Statistics of every tensor as a table: CSV, or Parquet where pyarrow is installed; and by layer, for a chart."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ckaudit.checks.observed import TensorStats
from ckaudit.errors import UsageError
from ckaudit.naming import natural_key

COLUMNS = (
    "name", "dtype", "shape", "count", "nan", "inf", "zeros", "low", "high", "absmax", "mean", "std", "kurtosis",
)  # fmt: skip
_LAYER = re.compile(r"^(.*?\.[0-9]+)(?=\.)")


class Layer(msgspec.Struct, frozen=True):
    """The tensors of one layer together; `rms` is the root mean square of their finite elements."""

    path: str
    tensors: int
    elements: int
    absmax: float
    rms: float
    bad: int
    """Elements that are NaN or Inf."""


def check_target(path: Path) -> None:
    """Raise UsageError, before anything is loaded, for a file that `write` could not write."""
    if path.suffix not in (".csv", ".parquet"):
        raise UsageError(
            f"--stats {str(path)!r} is neither .csv nor .parquet.", "Name the file with one of these endings."
        )
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--stats {str(path)!r}: its folder does not exist.", "Make it, or name another.")
    if path.suffix == ".parquet":
        _pyarrow()


def write(stats: Iterable[TensorStats], path: Path) -> None:
    """One row a tensor, columns `COLUMNS`. Raises UsageError."""
    check_target(path)
    rows = [_row(s) for s in stats]
    try:
        if path.suffix == ".csv":
            with path.open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
        else:
            arrow, parquet = _pyarrow()
            parquet.write_table(arrow.table({c: [r[c] for r in rows] for c in COLUMNS}), path)
    except OSError as error:
        raise UsageError(
            f"--stats {str(path)!r} cannot be written: {error.strerror}.", "Name another file, or make room."
        ) from error


def by_layer(stats: Iterable[TensorStats]) -> tuple[Layer, ...]:
    """Layers in natural order. What belongs to no numbered module is a layer of its own, by the name of its module."""
    groups: dict[str, list[TensorStats]] = defaultdict(list)
    for tensor in stats:
        match = _LAYER.match(tensor.name)
        groups[match.group(1) if match else tensor.name.rpartition(".")[0] or tensor.name].append(tensor)
    return tuple(_layer(path, groups[path]) for path in sorted(groups, key=natural_key))


def _layer(path: str, tensors: list[TensorStats]) -> Layer:
    elements = sum(t.count for t in tensors)
    squares = sum(t.count * (t.std * t.std + t.mean * t.mean) for t in tensors)
    return Layer(
        path=path,
        tensors=len(tensors),
        elements=elements,
        absmax=max(t.absmax for t in tensors),
        rms=(squares / elements) ** 0.5 if elements else 0.0,
        bad=sum(t.nan + t.inf for t in tensors),
    )


def _row(tensor: TensorStats) -> dict[str, Any]:
    row = {c: getattr(tensor, c) for c in COLUMNS}
    row["shape"] = "x".join(map(str, tensor.shape))
    return row


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            "Parquet needs pyarrow, which is not installed.", "pip install pyarrow, or name a .csv file."
        ) from error
    return pyarrow, parquet
