"""Ways in which a loader writes a parameter, and what must be seen of each. `p` has 4 x 8 elements; `a`, `b`, `c` are checkpoint tensors.

Each expectation is (loaded, constant, unknown) elements of `p` and the elements read of `a` and `b`, by reasoning on the line.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from ckaudit.engines.vllm.coverage import Result  # noqa: E402
from ckaudit.engines.vllm.provenance import Provenance  # noqa: E402

nn = torch.nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.empty(4, 8, device="meta"), requires_grad=False)


def observe(load: Callable[..., None], shape: tuple[int, ...] = (4, 8), dtype: torch.dtype = torch.float32,
            read: Callable[[str], bytes] | None = None) -> Result:  # fmt: skip
    model = Model()
    seen = Provenance(read)
    seen.watch("p", model.p)
    tensors = {k: seen.yielded(k, torch.empty(shape, dtype=dtype, device="meta")) for k in "abc"}
    with seen:
        load(model, tensors["a"], tensors["b"])
    return seen.result(model.named_parameters())


def scratch(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    t = torch.empty(4, 8)
    t[:2].copy_(a[:2])
    t[2:].copy_(b[2:])
    m.p.data.copy_(t)


def half_scratch(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    t = torch.zeros(4, 8)
    t[:2].copy_(a[:2])
    m.p.data.copy_(t)


def reused_scratch(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    t = torch.empty(2, 8)
    t.copy_(a[:2])
    m.p.data[:2].copy_(t)
    t.copy_(b[2:])
    m.p.data[2:].copy_(t)


def pointed(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data = a


def pointed_view(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data = m.p.data.unsqueeze(1)
    m.p.data.copy_(a.unsqueeze(1))


def replaced(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p = nn.Parameter(a, requires_grad=False)


def swapped(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.utils.swap_tensors(m.p, nn.Parameter(a, requires_grad=False))


def foreach(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    torch._foreach_copy_([m.p.data[:2], m.p.data[2:]], [a[:2], b[:2]])


def cat_out(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.cat([a[:2], b[:2]], out=m.p.data)


def one_row(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data[torch.tensor([2])] = a[:1]


def chosen_rows(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data[torch.tensor([0, 1, 3])] = a[:3]


def rows_by_data(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data[b[:, 0].long()] = a


def masked(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.masked_scatter_(b > 0, a)


def masked_after_full(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(a)
    m.p.data.masked_fill_(b > 0, 0.0)


def full_after_masked(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.masked_scatter_(b > 0, b)
    m.p.data.copy_(a)


def undone(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(a)
    m.p.data.zero_()


def padded(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data[:3].copy_(a[:3])
    m.p.data[3:].fill_(0)


def interleaved(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data[::2].copy_(a[:2])
    m.p.data[1::2].copy_(b[:2])


def stacked(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(torch.stack([a[0], b[0], a[1], b[1]]))


def narrowed_cat(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(torch.cat([a, b])[:4])


def transposed(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(a.t().contiguous()[:, :2].t().repeat(2, 1))


def scaled(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(-torch.exp(a.float()) * b)


def added_in_place(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(a)
    m.p.data.add_(1)


def summed(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(a.sum(0))


def multiplied(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_((a @ b.t())[:, :1].expand(4, 8))


def flipped(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(a.flip(0))


def half_flipped(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data[:2].copy_(a.flip(0)[:2])


def padded_tensor(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(torch.nn.functional.pad(a[:, :6], (1, 1)))


def raw_bytes(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.view(torch.uint8)[:, :16].copy_(a.view(torch.uint8)[:, :16])


def swap_of_halves(m: Model, a: torch.Tensor, b: torch.Tensor) -> None:
    m.p.data.copy_(torch.cat(a.chunk(2)[::-1]))


CASES = [
    ("copy_ of all", lambda m, a, b: m.p.data.copy_(a), (32, 0, 0), 32, 0),
    ("nothing written", lambda m, a, b: a.sum(), (0, 0, 0), 0, 0),
    ("set to zero only", lambda m, a, b: m.p.data.zero_(), (0, 32, 0), 0, 0),
    ("the second wins", lambda m, a, b: (m.p.data.copy_(a), m.p.data.copy_(b)), (32, 0, 0), 0, 32),
    ("scratch filled in steps", scratch, (32, 0, 0), 16, 16),
    ("scratch half filled: the rest is its zeros", half_scratch, (16, 16, 0), 16, 0),
    ("scratch used twice, as it was each time", reused_scratch, (32, 0, 0), 16, 16),
    (".data =", pointed, (32, 0, 0), 32, 0),
    (".data = a view of itself, then copy_", pointed_view, (32, 0, 0), 32, 0),
    ("a new Parameter", replaced, (32, 0, 0), 32, 0),
    ("swap_tensors", swapped, (32, 0, 0), 32, 0),
    ("set_", lambda m, a, b: m.p.data.set_(a), (0, 0, 0), 0, 0),  # `.data` is another tensor: p keeps its own storage
    ("_foreach_copy_", foreach, (32, 0, 0), 16, 16),
    ("cat out=", cat_out, (32, 0, 0), 16, 16),
    ("index of one row", one_row, (8, 0, 0), 8, 0),
    ("index of three rows", chosen_rows, (24, 0, 0), 24, 0),
    ("index_copy_", lambda m, a, b: m.p.data.index_copy_(0, torch.tensor([3]), a[:1]), (8, 0, 0), 8, 0),
    ("rows chosen by data: unknown, never full", rows_by_data, (0, 0, 32), None, 0),
    ("masked_scatter_: unknown", masked, (0, 0, 32), None, None),
    ("masked fill after a full copy: still all from a", masked_after_full, (32, 0, 0), 32, None),
    ("a full copy after a masked one: certain again", full_after_masked, (32, 0, 0), 32, 0),
    ("undone by zero_", undone, (0, 32, 0), 0, 0),
    ("the rest filled with zeros", padded, (24, 8, 0), 24, 0),
    ("every other row", interleaved, (32, 0, 0), 16, 16),
    ("stack", stacked, (32, 0, 0), 16, 16),
    ("cat, then half of it", narrowed_cat, (32, 0, 0), 32, 0),
    ("transpose, copy, narrow, repeat", transposed, (32, 0, 0), 16, 0),
    ("computed of both", scaled, (32, 0, 0), 32, 32),
    ("changed in place afterwards", added_in_place, (32, 0, 0), 32, 0),
    ("a sum of all rows", summed, (32, 0, 0), 32, 0),
    ("one column of a matmul", multiplied, (32, 0, 0), 32, 32),
    ("flip", flipped, (32, 0, 0), 32, 0),
    ("half of a flip: which half was read is not followed", half_flipped, (16, 0, 0), None, 0),
    ("pad", padded_tensor, (24, 8, 0), 24, 0),
    ("a view of other bytes", raw_bytes, (16, 0, 0), 16, 0),
    ("halves swapped", swap_of_halves, (32, 0, 0), 32, 0),
    ("broadcast of one row", lambda m, a, b: m.p.data.copy_(a[:1]), (32, 0, 0), 8, 0),
]  # fmt: skip


@pytest.mark.parametrize(("load", "place", "read_a", "read_b"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_elements_written_and_read(load, place, read_a, read_b) -> None:
    result = observe(load)
    p = result.parameters["p"]
    assert (p.loaded, p.constant, p.unknown) == place
    assert (result.tensors["a"].read, result.tensors["b"].read) == (read_a, read_b)
    assert result.tensors["c"].read == 0


def test_the_name_that_was_overwritten_is_not_lost() -> None:
    p = observe(lambda m, a, b: (m.p.data.copy_(a), m.p.data[:1].copy_(b[:1]))).parameters["p"]
    assert [(x.lost, x.kept) for x in p.lost] == [(("a",), ("b",))]


@pytest.mark.parametrize(
    "load", [scratch, added_in_place, interleaved, lambda m, a, b: (m.p.data.copy_(a), m.p.data.copy_(a))]
)
def test_no_collision_where_nothing_is_lost(load) -> None:
    assert observe(load).parameters["p"].lost == ()


def test_a_write_undone_is_lost_to_nothing() -> None:
    assert [(x.lost, x.kept) for x in observe(undone).parameters["p"].lost] == [(("a",), ())]


def test_a_name_on_data_that_the_parameter_no_longer_has_is_lost() -> None:
    def load(m, a, b):
        m.p.data.copy_(a)
        m.p.data = b

    p = observe(load).parameters["p"]
    assert (p.loaded, p.sources) == (32, ("b",))
    assert [(x.lost, x.kept) for x in p.lost] == [(("a",), ("b",))]


@pytest.mark.parametrize(
    ("dtype", "cast"),
    [
        (torch.int8, (("a", "int8", "float32"),)),
        (torch.float8_e4m3fn, (("a", "float8_e4m3fn", "float32"),)),
        (torch.bfloat16, ()),
    ],
)
def test_casts_between_kinds(dtype, cast) -> None:
    assert observe(lambda m, a, b: m.p.data.copy_(a), dtype=dtype).parameters["p"].casts == cast


def test_broadcasts_are_told_from_copies() -> None:
    assert observe(lambda m, a, b: m.p.data.copy_(a[:1])).parameters["p"].broadcast == ("a",)
    assert observe(lambda m, a, b: m.p.data.copy_(a)).parameters["p"].broadcast == ()


def test_item_asks_for_the_real_bytes() -> None:
    asked = []

    def read(name: str) -> bytes:
        asked.append(name)
        return struct.pack("<f", 2.5) * 32

    got = []
    result = observe(lambda m, a, b: (got.append((a * 2)[1].max().item()), m.p.data.fill_(a[0, 0].item())), read=read)
    assert (got, asked) == ([5.0], ["a"])
    assert result.parameters["p"].loaded == 32  # filled with a value that was read from `a`


def test_lists_and_truth_come_from_the_real_bytes() -> None:
    got = []
    asked = lambda a: [torch.equal(a, a), torch.allclose(a, a), torch.allclose(a, a + 1)]  # noqa: E731
    load = lambda m, a, b: got.extend([a[0, :2].tolist(), bool((a == a[0, 0]).all()), *asked(a)])  # noqa: E731
    observe(load, read=lambda name: struct.pack("<f", 2.5) * 32)
    assert got == [[2.5, 2.5], True, True, True, False]


def test_values_that_cannot_be_known_are_refused() -> None:
    from ckaudit.engines.vllm.values import NoValues

    with pytest.raises(NoValues):
        observe(lambda m, a, b: a[0, 0].item())


def test_indices_made_by_the_engine_are_known() -> None:
    def load(m, a, b):
        m.p.data.copy_(a[torch.arange(3, -1, -1)])

    result = observe(load)
    assert (result.parameters["p"].loaded, result.tensors["a"].read) == (32, 32)


def test_two_names_of_one_parameter_are_both_covered() -> None:
    seen = Provenance()
    p = nn.Parameter(torch.empty(4, 8, device="meta"), requires_grad=False)
    seen.watch("p", p)
    seen.watch("tied", p)
    a = seen.yielded("a", torch.empty(4, 8, device="meta"))
    with seen:
        p.data.copy_(a)
    result = seen.result([("p", p), ("tied", p)])
    assert {n: c.loaded for n, c in result.parameters.items()} == {"p": 32, "tied": 32}
    assert result.tensors["a"].into == ("p", "tied")
