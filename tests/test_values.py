"""Statistics of values in every dtype, held against numbers worked out by hand or by numpy."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from ckaudit.checks.observed import TensorStats  # noqa: E402
from ckaudit.errors import UsageError  # noqa: E402
from ckaudit.materialize import moments, reductions, values  # noqa: E402
from ckaudit.materialize import stats as tables  # noqa: E402
from ckaudit.materialize.dtypes import torch_dtype, torch_shape  # noqa: E402
from ckaudit.materialize.layout import Stored, plan  # noqa: E402
from ckaudit.naming import natural_key  # noqa: E402

CPU = torch.device("cpu")


def scan(dtype: str, raw: Any, shape: tuple[int, ...] | None = None) -> TensorStats:
    """One tensor's statistics, from its bytes: a torch tensor, or a list of bytes."""
    data = (
        raw.contiguous().view(torch.uint8).flatten()
        if isinstance(raw, torch.Tensor)
        else torch.tensor(raw, dtype=torch.uint8)
    )
    stored = Stored("a", 0, dtype, shape or (data.numel() * 8 // 8,), 0, data.numel())
    layout = plan([stored], natural_key)
    scanner = values.Scan(layout, CPU)
    scanner.ready(0, data, ())
    (found,) = scanner.finish(lambda _: data)
    reread = moments.exact(stored, data)
    assert (found.count, found.zeros, found.low, found.high, found.digest) == (
        reread.count, reread.zeros, reread.low, reread.high, reread.digest,
    )  # fmt: skip
    assert found.mean == pytest.approx(reread.mean, rel=1e-5, abs=1e-7)
    assert found.std == pytest.approx(reread.std, rel=1e-4, abs=1e-9)
    return found


def scan_exactly(dtype: str, numbers: Any) -> TensorStats:
    """The end of a scan, which reads again what sums cannot settle."""
    data = numbers.view(torch.uint8).flatten()
    layout = plan([Stored("a", 0, dtype, tuple(numbers.shape), 0, data.numel())], natural_key)
    scanner = values.Scan(layout, CPU)
    scanner.ready(0, data, ())
    return scanner.finish(lambda _: data)[0]


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("size", [1, 7, 1000, 3_000_000])
def test_floats(dtype: str, size: int) -> None:
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(torch_dtype(dtype))
    numbers[:: max(1, size // 3)] = 0
    found = scan(dtype, numbers, (size,))
    true = numbers.double().numpy()
    assert (found.count, found.nan, found.inf, found.zeros) == (size, 0, 0, int((true == 0).sum()))
    assert (found.low, found.high) == (true.min(), true.max())
    assert found.mean == pytest.approx(true.mean(), abs=1e-5)
    assert found.std == pytest.approx(true.std(), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E5M2"])
def test_nan_and_inf_are_counted_and_the_rest_described(dtype: str) -> None:
    numbers = torch.full((50_000,), 0.5)
    numbers[10], numbers[20_000], numbers[49_999] = math.nan, math.inf, -math.inf
    numbers[7] = -0.25
    found = scan(dtype, numbers.to(torch_dtype(dtype)), (50_000,))
    assert (found.nan, found.inf, found.low, found.high) == (1, 2, -0.25, 0.5)


def test_a_mean_that_drowns_the_deviation() -> None:
    numbers = 1000 + torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    found = scan("F32", numbers, (200_000,))
    assert found.std == pytest.approx(numbers.double().std(correction=0).item(), rel=1e-6)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"])
def test_every_byte_of_an_8_bit_float(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    true = codes.view(torch_dtype(dtype)).double().numpy()
    finite = true[np.isfinite(true)]
    found = scan(dtype, codes)
    # Facts: OCP 8-bit floating point 1.0 (E4M3 has two NaN and no Inf, E5M2 six NaN and two Inf); FNUZ has one NaN, E8M0 one.
    wanted = {"F8_E4M3": (2, 0), "F8_E5M2": (6, 2), "F8_E4M3FNUZ": (1, 0), "F8_E5M2FNUZ": (1, 0), "F8_E8M0": (1, 0)}[
        dtype
    ]
    assert (found.nan, found.inf) == wanted
    assert (found.count, found.low, found.high) == (256, finite.min(), finite.max())
    assert found.std == pytest.approx(finite.std(), rel=1e-9)


def test_fp4_is_decoded() -> None:
    found = scan("F4", [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], (16,))  # all sixteen codes once
    assert (found.count, found.low, found.high, found.zeros) == (16, -6.0, 6.0, 2)
    # Twice 0, 0.5, 1, 1.5, 2, 3, 4, 6 with both signs: the mean of the squares is (0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8.
    assert found.std == pytest.approx(math.sqrt(68.5 / 8))
    assert scan("F4", [0] * 8, (16,)).all_zero
    assert scan("F4", [0x22] * 8, (16,)).constant


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        ("I8", [-128, 0, 127]), ("U8", [0, 255, 3]), ("I16", [-32768, 1]), ("U16", [65535, 0]), ("I32", [-(2**31), 5]),
        ("U32", [2**32 - 1, 0]), ("I64", [-(2**40), 2**40]), ("U64", [2**40, 0]), ("BOOL", [True, False, False]),
    ],
)  # fmt: skip
def test_integers(dtype: str, numbers: list[int]) -> None:
    found = scan(dtype, torch.tensor(numbers, dtype=torch_dtype(dtype)), (len(numbers),))
    assert (found.low, found.high, found.count) == (min(numbers), max(numbers), len(numbers))
    assert found.zeros == numbers.count(0)
    assert found.mean == pytest.approx(sum(numbers) / len(numbers))


def test_complex_numbers_are_two_floats_each() -> None:
    found = scan("C64", torch.tensor([1 + 2j, complex(0, math.nan)]), (2,))
    assert (found.count, found.nan, found.high) == (4, 1, 2.0)


def test_fp6_is_bytes_to_us() -> None:
    assert scan("F6_E2M3", [0] * 12, (16,)).all_zero
    assert torch_shape("F6_E2M3", (16,)) == (-1,)


def test_an_empty_tensor() -> None:
    layout = plan([Stored("a", 0, "F32", (0, 4), 0, 0)], natural_key)
    (found,) = values.Scan(layout, CPU).finish(lambda _: torch.empty(0, dtype=torch.uint8))
    assert (found.count, found.all_zero, found.constant) == (0, False, False)


def test_experts_are_reduced_together_and_told_apart() -> None:
    size = 2 * 4 * 16
    names = [f"mlp.experts.{e}.{n}.weight" for e in range(4) for n in ("gate_proj", "up_proj")]
    layout = plan([Stored(n, 0, "BF16", (4, 16), i * size, (i + 1) * size) for i, n in enumerate(names)], natural_key, [
        ["experts.*.gate_proj.weight", "experts.*.up_proj.weight"]
    ])  # fmt: skip
    assert len(layout.arenas) == 1
    data = torch.stack([torch.full((64,), float(i)) for i in range(8)]).to(torch.bfloat16)
    data[5, 3] = math.nan
    scanner = values.Scan(layout, CPU)
    scanner.ready(0, data.view(torch.uint8).flatten(), ())
    found = scanner.finish(lambda t: data[names.index(t.name)].view(torch.uint8).flatten())
    assert [(s.name, s.high, s.nan) for s in found] == [(n, float(i), int(i == 5)) for i, n in enumerate(names)]


@pytest.mark.parametrize(("limit", "at"), [("_TOGETHER", 3), ("_BATCH", 130)])
def test_small_tensors_of_one_kind_are_reduced_together_and_told_apart(
    limit: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, limit, at)  # eight tensors, 64 bytes each: two full groups, a rest
    kinds = [("F32", torch.float32, 16)] * 8 + [("BF16", torch.bfloat16, 32), ("BF16", torch.bfloat16, 16)]
    data = [torch.full((n,), float(i + 1), dtype=kind) for i, (_, kind, n) in enumerate(kinds)]
    data[4][7] = 0
    layout = plan([Stored(f"t{i}", 0, d, (n,), 0, n * k.itemsize) for i, (d, k, n) in enumerate(kinds)], natural_key)
    scanner = values.Scan(layout, CPU)
    for index, arena in enumerate(layout.arenas):
        scanner.ready(index, data[arena.members[0][0]].view(torch.uint8), ())
    found = scanner.finish(lambda _: pytest.fail("nothing here needs a second look"))
    assert [(s.name, s.high, s.zeros) for s in found] == [(f"t{i}", float(i + 1), int(i == 4)) for i in range(10)]


def test_few_bytes_wait_where_no_two_tensors_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_BATCH", 200)
    data = [torch.full((n,), float(n)) for n in range(1, 41)]
    layout = plan([Stored(f"t{n}", 0, "F32", (n,), 0, 4 * n) for n in range(1, 41)], natural_key)
    scanner = values.Scan(layout, CPU)
    for index, arena in enumerate(layout.arenas):
        scanner.ready(index, data[arena.members[0][0]].view(torch.uint8), ())
        assert scanner._waiting <= 2 * 200
    found = scanner.finish(lambda _: pytest.fail("nothing here needs a second look"))
    assert [(s.name, s.low, s.high) for s in found] == [(f"t{n}", float(n), float(n)) for n in range(1, 41)]


def test_large_tensors_come_in_blocks_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "CPU_BLOCK", 1000)
    numbers = torch.randn(12_345, generator=torch.Generator().manual_seed(3)) + 0.5
    found = scan("F32", numbers, (12_345,))
    assert found.std == pytest.approx(numbers.double().std(correction=0).item(), rel=1e-6)


def test_memory_that_only_the_scan_still_holds_is_let_go() -> None:
    blocks = [torch.zeros(64, dtype=torch.uint8) for _ in range(5)]
    model = [block.view(torch.float32) for block in blocks]  # what the loader keeps: other tensors of the same memory
    waiting = deque((index, block.detach(), ()) for index, block in enumerate(blocks))
    blocks.clear()  # the stream's hold ends when the loader has taken the tensor
    assert not values._let_go_of(waiting)
    model[0] = model[2] = torch.empty(0)  # made into something else, and dropped
    assert [number for number, _, _ in values._let_go_of(waiting)] == [0, 2]
    assert sorted(number for number, _, _ in waiting) == [1, 3, 4]


@pytest.mark.parametrize("n", [999, 12_000, 12_345])
def test_elements_are_counted_past_what_float32_can_count(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reductions, "_EXACT", 1000
    )  # in place of 2^24: one cut, cuts of one size, cuts that leave a rest
    x = (torch.rand(3, n, generator=torch.Generator().manual_seed(1)) > 0.3).float()
    assert reductions._nonzero(x, torch.float32).tolist() == [int(row.bool().sum()) for row in x]


def test_what_is_equal_has_one_digest_and_a_swap_of_two_words_none() -> None:
    numbers = torch.arange(1000, dtype=torch.float32)
    assert scan("F32", numbers, (1000,)).digest == scan("F32", numbers.clone(), (1000,)).digest
    other = numbers.clone()
    other[0] = 5
    assert scan("F32", numbers, (1000,)).digest != scan("F32", other, (1000,)).digest


def test_numbers_whose_squares_have_no_room_are_no_end_of_it() -> None:
    """An F64 of 1e200: finite, and its square is not."""
    found = scan_exactly("F64", torch.tensor([1e200, 1.0, 2.0, 3.0], dtype=torch.float64))
    assert (found.high, found.nan, found.inf, found.kurtosis) == (1e200, 0, 0, None)
    assert math.isfinite(found.mean)
    assert math.isfinite(found.std)
    assert tables.by_layer([found])[0].rms > 0


def test_of_many_elements_some_tell_the_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "_LONG", 100_000)
    few, many = (torch.randn(n, generator=torch.Generator().manual_seed(1)) for n in (100_000, 400_000))
    many[100_000:] = many[100_000:].sign()  # of the first alone: everything else counts all of them
    found = [scan("F32", x, (x.numel(),)) for x in (few, many)]
    assert [s.kurtosis_count for s in found] == [100_000, 100_000]
    assert found[1].kurtosis == pytest.approx(
        (many[:100_000].double() ** 4).mean().item() / found[1].std ** 4, rel=1e-4
    )
    assert found[1].std == pytest.approx(many.double().std(correction=0).item(), rel=1e-5)


def test_a_normal_and_a_uniform_distribution_are_told_apart() -> None:
    draw = torch.Generator().manual_seed(0)
    normal = scan("F32", torch.randn(500_000, generator=draw), (500_000,)).kurtosis
    uniform = scan("F32", torch.rand(500_000, generator=draw) - 0.5, (500_000,)).kurtosis
    assert normal == pytest.approx(3, abs=0.05)
    assert uniform == pytest.approx(1.8, abs=0.02)
    assert scan("F32", 1 + torch.randn(1000, generator=draw), (1000,)).kurtosis is None


# --- tables


STATS = (
    TensorStats(
        name="model.layers.10.a.weight", dtype="BF16", shape=(2, 3), count=6, low=-3.0, high=1.0, mean=0.0, std=2.0
    ),
    TensorStats(name="model.layers.9.a.weight", dtype="BF16", shape=(2,), count=2, nan=1, high=1.0),
    TensorStats(name="model.layers.9.b.weight", dtype="BF16", shape=(2,), count=2, high=1.0, mean=3.0, std=4.0),
    TensorStats(name="lm_head.weight", dtype="BF16", shape=(2,), count=2),
)


def test_a_table_has_a_row_for_each_tensor(tmp_path: Path) -> None:
    tables.write(STATS, tmp_path / "s.csv")
    lines = (tmp_path / "s.csv").read_text().splitlines()
    assert lines[0].split(",") == list(tables.COLUMNS)
    assert lines[1] == "model.layers.10.a.weight,BF16,2x3,6,0,0,0,-3.0,1.0,3.0,0.0,2.0,"
    assert len(lines) == 5


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tables.write(STATS, tmp_path / "s.parquet")
    rows = parquet.read_table(tmp_path / "s.parquet").to_pylist()
    assert [r["name"] for r in rows] == [s.name for s in STATS]
    assert rows[0]["absmax"] == 3.0


@pytest.mark.parametrize("name", ["s.txt", "missing/s.csv"])
def test_a_table_that_cannot_be_written_is_refused_before_the_load(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        tables.check_target(tmp_path / name)


def test_layers_for_a_chart() -> None:
    found = tables.by_layer(STATS)
    assert [(x.path, x.tensors, x.bad) for x in found] == [
        ("lm_head", 1, 0),
        ("model.layers.9", 2, 1),
        ("model.layers.10", 1, 0),
    ]
    assert found[2].absmax == 3.0
    assert found[1].rms == pytest.approx(math.sqrt(2 * (3**2 + 4**2) / 4))
