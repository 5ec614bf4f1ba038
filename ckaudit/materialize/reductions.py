"""The sums that the health of a tensor is worked out from, on whatever device it lies, in as few calls and copies as torch allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ckaudit.header import FLOATS
from ckaudit.materialize.dtypes import torch_dtype

_WIDE = frozenset(
    {"F64", "F8_E8M0", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "F6_E2M3", "F6_E3M2"}
)
"""Decoded to float64: a power of two up to 2^127, or an integer, must not lose what is looked for."""
_BLOCK = 1 << 26
"""Elements of a tensor reduced at once: few enough for float32 sums."""
_DECODED_BLOCK = 1 << 23
"""Elements decoded at once: the copy costs no memory to speak of."""
CPU_BLOCK = 1 << 20
"""On a CPU: a block that stays in the cache while it is reduced six times."""
SMALL = 1 << 16
"""Elements of a row that are few: reduced around their mean, and not worth a launch of their own."""
_LONG = 1 << 20
"""Elements of a row whose 4th powers are enough, with a 16th of more: on a GPU all would take as long as everything else together."""
# E2M1 by nibble. Source: OCP Microscaling Formats (MX) 1.0, section 5.3.3.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXACT = 1 << 24
"""Elements that float32 can count one by one."""


class Rows(NamedTuple):
    """Reductions of one block, on the device: tensors `members`, `count` elements of each, and an element per tensor in everything else."""

    members: tuple[int, ...]
    elements: int
    centred: bool
    """Whether mean and variance stand in place of sum and 2-norm."""
    tail: int
    """Elements that the 4-norm is over: all, or some of many."""
    low: Any
    high: Any
    total: Any
    square: Any
    """The 2-norm."""
    fourth: Any
    """The 4-norm of the first `tail` elements."""
    nonzero: Any
    digest: Any
    """int64: the sum of the bytes as 64-bit words, which no order of adding changes."""


def blocks(members: tuple[int, ...], dtype: str, flat: torch.Tensor) -> Iterator[Rows]:
    """The reductions of the rows of `flat` (tensors, bytes), block by block."""
    if flat.device.type != "cpu" and dtype in FLOATS:
        size = _BLOCK  # of each row: nothing is copied
    else:
        size = max(1, (CPU_BLOCK if flat.device.type == "cpu" else _DECODED_BLOCK) // flat.shape[0])
    digest: Any = digest_of(flat)
    for values in decoded(dtype, flat, size):
        yield _reductions(members, values, digest)
        digest = torch.zeros_like(digest)  # counted with the first block alone


def _reductions(members: tuple[int, ...], x: torch.Tensor, digest: Any) -> Rows:
    """Of each row of `x`, without a copy of it and in as few calls as torch allows: with readers at work each waits for the interpreter."""
    n = x.shape[1]
    centred = n <= SMALL
    if x.device.type == "cpu" or centred:
        x = x if x.dtype == torch.float64 else x.float()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    low, high = torch.aminmax(x, dim=1)
    if centred:
        square, total = torch.var_mean(x, dim=1, correction=0)
    else:
        total = torch.sum(x, dim=1, dtype=wide)
        square = torch.linalg.vector_norm(x, 2, dim=1, dtype=wide)
    tail = min(n, max(_LONG, n // 16))
    fourth = torch.linalg.vector_norm(x[:, :tail], 4, dim=1, dtype=wide)
    return Rows(members, n, centred, tail, low, high, total, square, fourth, _nonzero(x, wide), digest)


def _nonzero(x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """How many elements of each row are not zero, exactly."""
    n = x.shape[1]
    cuts = -(-n // _EXACT)
    if cuts == 1:
        return torch.linalg.vector_norm(x, 0, dim=1, dtype=wide)
    if n % cuts == 0:
        return torch.linalg.vector_norm(x.unflatten(1, (cuts, -1)), 0, dim=2, dtype=wide).double().sum(dim=1)
    return torch.stack([_nonzero(part, wide) for part in x.split(_EXACT, dim=1)]).double().sum(dim=0)


def decoded(dtype: str, flat: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """The rows of `flat` as numbers, `size` elements of each row at a time: views of plain floats, else decoded copies."""
    if dtype == "F4":
        table = torch.tensor(_E2M1, device=flat.device)
        for part in flat.split(max(1, size // 2), dim=1):
            yield torch.stack([table[(part & 15).long()], table[(part >> 4).long()]], dim=2).flatten(1)
        return
    values = flat.view(torch_dtype(dtype))
    if dtype == "C64":
        values = torch.view_as_real(values).flatten(1)
    for part in values.split(size, dim=1):
        yield (
            part if dtype in FLOATS or dtype == "C64" else part.to(torch.float64 if dtype in _WIDE else torch.float32)
        )


def digest_of(flat: torch.Tensor) -> Any:
    """The bytes of each row as 64-bit words, added up modulo 2^64; bytes beyond the last whole word are left to an exact comparison."""
    words = flat.shape[1] // 8
    if not words:
        return torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    if flat.shape[0] == 1:  # on its own: a row's stride, which a view must divide, may be odd
        return flat[0, : words * 8].view(torch.int64).sum(dim=0, keepdim=True)
    if flat.shape[1] % 8:
        flat = flat[:, : words * 8].contiguous()
    return flat.view(torch.int64).sum(dim=1)
