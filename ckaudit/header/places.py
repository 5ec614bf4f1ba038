"""Where tensors lie: shapes against bytes, and offsets against each other and the end of the file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from math import prod

from ckaudit.header.model import DTYPE_BITS, MAX_SIZE, Defect, TensorInfo


def misplaced(tensors: dict[str, TensorInfo], data_size: int | None, *, complete: bool, most: int) -> list[Defect]:
    """What is wrong with sizes and places. `complete`: every tensor of the file is in `tensors`, so that a gap is a gap.

    No more than `most` and one are looked for.
    """
    at = 0
    bits = DTYPE_BITS
    for info in tensors.values():
        begin, end = info.begin, info.end
        if begin != at or prod(info.shape) * bits.get(info.dtype, 0) != (end - begin) * 8 or begin == end:
            break
        at = end
    else:
        if at == data_size or (data_size is None and at * 8 <= MAX_SIZE):
            return []
    wrong = chain(_sizes_wrong(tensors), _places_wrong(tensors, data_size, complete=complete))
    return list(islice(wrong, most + 1))


def _sizes_wrong(tensors: dict[str, TensorInfo]) -> Iterator[Defect]:
    for name, info in tensors.items():
        begin, end = info.begin, info.end
        if end < begin:
            yield Defect("offsets", name, "data_offsets in order", f"[{begin}, {end}]")
            continue
        if info.dtype not in DTYPE_BITS:
            continue
        bits = _checked_bits(info)
        what = f"{info.dtype} {list(info.shape)}"
        if bits is None:
            yield Defect("overflow", name, "fewer than 2**64 bits", what)
        elif bits % 8:
            yield Defect("sub-byte", name, "a whole number of bytes", f"{what} is {bits} bits")
        elif bits // 8 != end - begin:
            yield Defect("shape", name, f"{bits // 8} bytes for {what}", f"{end - begin} bytes")


def _checked_bits(info: TensorInfo) -> int | None:
    """Bits that the shape needs; None where the 64-bit product that readers take, dimension after dimension, overflows."""
    elements = 1
    for dim in info.shape:
        elements *= dim
        if max(elements, dim) > MAX_SIZE:
            return None
    bits = elements * DTYPE_BITS[info.dtype]
    return None if bits > MAX_SIZE else bits


def _places_wrong(tensors: dict[str, TensorInfo], data_size: int | None, *, complete: bool) -> Iterator[Defect]:
    at, last = 0, ""
    order = sorted(tensors, key=lambda name: tensors[name].end)
    order.sort(key=lambda name: tensors[name].begin)
    for name in order:
        info = tensors[name]
        begin, end = info.begin, info.end
        if end < begin:
            complete = False
            continue
        if begin < at:
            yield Defect("overlap", name, f"to begin at {at} or later, after {last}", f"begins at {begin}")
        elif begin > at and complete:
            yield Defect(
                "hole", name, f"to begin at {at}", f"begins at {begin}: {begin - at} bytes belong to no tensor"
            )
        if end > at:
            at, last = end, name
    if data_size is not None and at > data_size:
        yield Defect(
            "data-truncated", None, f"{at} bytes of data", f"{max(data_size, 0)} bytes: {at - data_size} are missing"
        )
    elif data_size is not None and at < data_size and complete:
        yield Defect(
            "trailing-bytes", None, f"{at} bytes of data", f"{data_size} bytes: {data_size - at} belong to no tensor"
        )
    elif data_size is None and at > MAX_SIZE:
        yield Defect("overflow", last, "offsets below 2**64", str(at))
