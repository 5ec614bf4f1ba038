"""Places in groups that share no byte: what may be cut by what, and how often."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from ckaudit.engines.vllm import cutting, trace  # noqa: E402
from ckaudit.engines.vllm.apart import apart  # noqa: E402
from ckaudit.engines.vllm.provenance import Provenance  # noqa: E402
from ckaudit.engines.vllm.storages import joint  # noqa: E402


def groups(*views: torch.Tensor) -> list[list[int]]:
    return sorted(apart([joint([v]) for v in views]))


def test_columns_of_one_matrix_are_apart_though_their_spans_are_not() -> None:
    m = torch.empty(6, 12, device="meta")
    assert groups(*(m[:, i : i + 2] for i in range(0, 12, 2))) == [[i] for i in range(6)]


def test_columns_that_share_one_stay_together() -> None:
    m = torch.empty(6, 12, device="meta")
    assert groups(*(m[:, i : i + 3] for i in range(0, 10, 2))) == [
        [0, 1, 2, 3, 4]
    ]  # each ends in the first of the next
    assert groups(m[:, 0:2], m[:, 2:4], m[:, 3:6], m[:, 6:8], m[:, 8:12]) == [[0], [1, 2], [3], [4]]


def test_a_row_joins_the_columns_that_it_crosses() -> None:
    m = torch.empty(4, 8, device="meta")
    assert groups(*(m[:, i] for i in range(6)), m[2, 4:8]) == [[0], [1], [2], [3], [4, 5, 6]]


def test_what_cannot_be_told_apart_stays_together() -> None:
    m = torch.empty(60, device="meta")
    steps = [m[::2], m[1::3], m[2::5], m[3::7], m[4::11]]  # strides that do not divide one another
    assert groups(*steps) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("count", [64, 256])
def test_separate_writes_are_never_cut_by_one_another(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter of `count` experts that lie side by side in its last dimension: no cut at all, where each pair would be count ** 2."""
    made = []
    for module in (trace, cutting):
        monkeypatch.setattr(module, "cut", lambda *a, real=cutting.cut: made.append(1) or real(*a))
    p = torch.empty(3, 5, count, device="meta")
    seen = Provenance()
    seen.watch("p", p)
    with seen:
        for i in range(count):
            p[:, :, i].copy_(seen.give(f"t{i}", (3, 5), torch.float32))
    result = seen.result([("p", p)])
    assert result.parameters["p"].loaded == 15 * count
    assert not made
