"""From files to tensors: layouts, readers, the stream that a loader asks, and joins that need no copy."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ckaudit.errors import CkauditError, SourceError  # noqa: E402
from ckaudit.materialize.handover import join_patterns, joined_view  # noqa: E402
from ckaudit.materialize.hostmap import HostMap, MappedFiles  # noqa: E402
from ckaudit.materialize.layout import Layout, Stored, plan  # noqa: E402
from ckaudit.materialize.reader import cached_share  # noqa: E402
from ckaudit.materialize.stream import DeviceStream  # noqa: E402
from ckaudit.naming import natural_key  # noqa: E402

CPU = torch.device("cpu")


class Files:
    """Files of random bytes, cut into uint8 tensors one behind the other, after a header of `lead` bytes."""

    def __init__(self, folder: Path, sizes: list[list[int]], *, lead: int = 13) -> None:
        self.paths: list[str] = []
        self.tensors: list[Stored] = []
        self.bytes: dict[str, bytes] = {}
        draw = random.Random(0)
        for shard, shard_sizes in enumerate(sizes):
            data = draw.randbytes(lead + sum(shard_sizes))
            path = folder / f"{shard}.bin"
            path.write_bytes(data)
            self.paths.append(str(path))
            at = lead
            for number, size in enumerate(shard_sizes):
                name = f"s{shard}.t{number}"
                self.tensors.append(Stored(name, shard, "U8", (size,), at, at + size))
                self.bytes[name] = data[at : at + size]
                at += size


def taken(layout: Layout, source: Any, order: list[int] | None = None) -> dict[str, bytes]:
    """Every tensor's bytes, asked for in this order."""
    indices = order if order is not None else list(range(len(layout.tensors)))
    return {layout.tensors[i].name: bytes(source.take(i).numpy().tobytes()) for i in indices}


SIZES = [[100, 0, 5000, 1], [70_000, 16, 4096], [3]]


@pytest.mark.parametrize("chunk", [1, 509, 4096, 1 << 20])
@pytest.mark.parametrize("access", ["buffered", "ahead", "direct"])
def test_every_byte_arrives_where_it_belongs(tmp_path: Path, chunk: int, access: Any) -> None:
    files = Files(tmp_path, [[100, 0, 500, 1], [700, 16], [3]] if chunk == 1 else SIZES)
    layout = plan(files.tensors, natural_key, (), chunk)
    moved: list[int] = []
    with DeviceStream(layout, files.paths, CPU, readers=3, access=access, moved=moved.append) as stream:
        assert taken(layout, stream) == files.bytes
        stream.join()
    assert sum(moved) == layout.nbytes


def test_direct_reads_cross_pages(tmp_path: Path) -> None:
    files = Files(tmp_path, [[50_000, 30_000, 20_001]], lead=4099)
    layout = plan(files.tensors, natural_key, (), 12_288)
    with DeviceStream(layout, files.paths, CPU, readers=2, access="direct") as stream:
        assert taken(layout, stream) == files.bytes


def test_tensors_may_be_asked_for_in_any_order_however_little_runs_ahead(tmp_path: Path) -> None:
    files = Files(tmp_path, SIZES)
    layout = plan(files.tensors, natural_key, (), 512)
    order = list(range(len(layout.tensors)))
    random.Random(1).shuffle(order)
    with DeviceStream(layout, files.paths, CPU, readers=4, ahead=600) as stream:
        assert taken(layout, stream, order) == files.bytes


def test_a_stream_runs_no_further_ahead_than_it_may(tmp_path: Path) -> None:
    files = Files(tmp_path, [[1000] * 50])
    layout = plan(files.tensors, natural_key, (), 1000)
    moved: list[int] = []
    arrived = threading.Event()

    def count(size: int) -> None:
        moved.append(size)
        if len(moved) == 3:
            arrived.set()

    with DeviceStream(layout, files.paths, CPU, readers=4, ahead=3000, moved=count) as stream:
        assert arrived.wait(10)
        stream.take(0)
        # Three chunks run ahead, one was taken: no fifth may begin.
        assert not arrived.wait(0) or len(moved) <= 4
    assert len(moved) <= 4


def test_a_tensor_is_handed_over_once(tmp_path: Path) -> None:
    files = Files(tmp_path, [[100]])
    layout = plan(files.tensors, natural_key)
    with DeviceStream(layout, files.paths, CPU) as stream:
        stream.take(0)
        with pytest.raises(CkauditError, match="twice"):
            stream.take(0)


@pytest.mark.parametrize("access", ["buffered", "direct"])
def test_a_file_that_was_cut_since_its_header_was_read(tmp_path: Path, access: Any) -> None:
    files = Files(tmp_path, [[9000, 9000]])
    os.truncate(files.paths[0], 12_000)
    layout = plan(files.tensors, natural_key, (), 4096)
    with DeviceStream(layout, files.paths, CPU, readers=2, access=access) as stream:
        with pytest.raises(SourceError, match="ends at byte 12,000, inside a tensor"):
            taken(layout, stream)
        with pytest.raises(SourceError):
            stream.join()
    with HostMap(layout, MappedFiles(files.paths)) as mapped, pytest.raises(SourceError, match="ends at byte 12,000"):
        taken(layout, mapped)


def test_an_error_holds_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU it is needed at once, by whoever tries again: not when the garbage collector happens to run."""
    files = Files(tmp_path, [[9000, 9000]])
    os.truncate(files.paths[0], 12_000)
    made: list[weakref.ref[Any]] = []
    block_of = DeviceStream._block

    def noted(self: DeviceStream, arena: int) -> Any:
        block = block_of(self, arena)
        made.append(weakref.ref(block))
        return block

    monkeypatch.setattr(DeviceStream, "_block", noted)
    gc.disable()
    try:
        layout = plan(files.tensors, natural_key, (), 4096)
        with DeviceStream(layout, files.paths, CPU, readers=2) as stream, pytest.raises(SourceError) as raised:
            stream.take(1)
        assert made
        assert [ref() for ref in made if ref() is not None] == []
        assert raised.value.__traceback__ is not None  # what it does keep: where it happened
    finally:
        gc.enable()


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    files = Files(tmp_path, [[9000]])
    os.unlink(files.paths[0])
    layout = plan(files.tensors, natural_key)
    with DeviceStream(layout, files.paths, CPU) as stream, pytest.raises(SourceError, match="Cannot open"):
        stream.take(0)


def test_the_loader_gets_a_tensor_when_it_is_calm(tmp_path: Path) -> None:
    files = Files(tmp_path, [[100, 200]])
    layout = plan(files.tensors, natural_key)
    asked: list[str] = []
    with DeviceStream(layout, files.paths, CPU, calm=lambda: asked.append("calm")) as stream:
        assert taken(layout, stream) == files.bytes
    assert asked == ["calm"] * 2


def test_leaving_early_ends_the_threads(tmp_path: Path) -> None:
    files = Files(tmp_path, [[1000] * 50])
    before = threading.active_count()
    with DeviceStream(plan(files.tensors, natural_key, (), 1000), files.paths, CPU, readers=4, ahead=1000):
        pass
    assert threading.active_count() == before


def test_mapped_tensors_are_views_of_the_file_that_never_write_to_it(tmp_path: Path) -> None:
    files = Files(tmp_path, SIZES, lead=16)
    layout = plan(files.tensors, natural_key)
    with HostMap(layout, MappedFiles(files.paths)) as mapped:
        assert taken(layout, mapped) == files.bytes
        mapped.take(layout.tensors.index(next(t for t in layout.tensors if t.nbytes == 5000))).fill_(0)
    assert Path(files.paths[0]).read_bytes()[116:5116] == files.bytes["s0.t2"]


def test_a_mapped_tensor_at_an_odd_offset_is_aligned(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\0\0\0" + torch.arange(4, dtype=torch.float32).numpy().tobytes())
    layout = plan([Stored("a", 0, "F32", (4,), 3, 19)], natural_key)
    with HostMap(layout, MappedFiles([str(tmp_path / "a")])) as mapped:
        tensor = mapped.take(0)
    assert tensor.tolist() == [0, 1, 2, 3]
    assert tensor.data_ptr() % 4 == 0


def test_a_file_just_written_is_in_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    assert cached_share(str(tmp_path / "a")) == 1.0
    (tmp_path / "b").write_bytes(b"")
    assert cached_share(str(tmp_path / "b")) == 1.0


# --- joins


def experts(
    count: int, shape: tuple[int, int] = (4, 16), names: tuple[str, ...] = ("gate_proj", "up_proj")
) -> list[Stored]:
    size = 2 * shape[0] * shape[1]
    full = [f"model.layers.{x}.mlp.experts.{e}.{n}.weight" for x in range(2) for e in range(count) for n in names]
    return [Stored(n, 0, "BF16", shape, i * size, (i + 1) * size) for i, n in enumerate(full)]


GATE_UP = ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"]


def test_experts_of_a_layer_lie_as_they_will_be_joined() -> None:
    layout = plan(experts(12), natural_key, [GATE_UP])
    assert [len(a.members) for a in layout.arenas] == [24, 24]
    first = [layout.tensors[i].name for i, _ in layout.arenas[0].members]
    assert first[:4] == [f"model.layers.0.mlp.experts.{e}.{n}.weight" for e in (0, 1) for n in ("gate_proj", "up_proj")]
    assert first[-1] == "model.layers.0.mlp.experts.11.up_proj.weight"  # 11 behind 9 and 10
    assert [offset for _, offset in layout.arenas[0].members] == [128 * i for i in range(24)]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors: tensors[:-1],  # an expert without its up_proj
        lambda tensors: [
            Stored(t.name, 0, "F32" if i == 3 else "BF16", t.shape, t.start, t.stop) for i, t in enumerate(tensors)
        ],
        lambda tensors: [
            Stored(t.name, 0, "BF16", (4, 8) if i == 3 else t.shape, t.start, t.stop) for i, t in enumerate(tensors)
        ],
    ],
)
def test_what_does_not_fit_together_lies_alone(spoil: Any) -> None:
    layout = plan(spoil(experts(4)[:8]), natural_key, [GATE_UP])
    assert all(len(a.members) == 1 for a in layout.arenas)


def test_each_tensor_has_one_home_whatever_the_patterns() -> None:
    tensors = experts(4)
    layout = plan(tensors, natural_key, [GATE_UP, ["experts.*.gate_proj.weight"], ["q_proj", "k_proj"]])
    members = [i for a in layout.arenas for i, _ in a.members]
    assert sorted(members) == list(range(len(tensors)))


def test_patterns_come_from_the_loaders_own_converters() -> None:
    pytest.importorskip("transformers")
    assert ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"] in join_patterns(["qwen3_moe"])
    assert join_patterns(["llama"]) == []
    assert join_patterns(["no such type"]) == []


def test_joins_in_place_equal_torchs_own() -> None:
    memory = torch.arange(6 * 4 * 5)
    parts = [memory[i * 20 : (i + 1) * 20].view(4, 5) for i in range(6)]
    for tensors, dim, new_axis in ((parts, 0, True), (parts[::2], 0, True), (parts, 0, False), (parts[2:5], -2, False)):
        joined = joined_view(tensors, dim, new_axis=new_axis)
        assert joined is not None
        assert joined.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        own = torch.stack(tensors, dim) if new_axis else torch.cat(tensors, dim)
        assert torch.equal(joined, own)


def test_gate_and_up_of_all_experts_become_one_without_a_copy() -> None:
    memory = torch.arange(3 * 2 * 4 * 5)
    pieces = memory.view(3, 2, 4, 5)
    gates, ups = [pieces[e, 0] for e in range(3)], [pieces[e, 1] for e in range(3)]
    gate, up = joined_view(gates, 0, new_axis=True), joined_view(ups, 0, new_axis=True)
    assert gate is not None
    assert up is not None
    both = joined_view([gate, up], 1, new_axis=False)
    assert both is not None
    assert both.is_contiguous()
    assert torch.equal(both, torch.cat([torch.stack(gates), torch.stack(ups)], dim=1))


def test_tensors_that_lie_otherwise_are_not_joined_in_place() -> None:
    memory = torch.arange(80)
    parts = [memory[i * 20 : (i + 1) * 20].view(4, 5) for i in range(4)]
    other = torch.arange(20).view(4, 5)
    for tensors, dim, new_axis in (
        ([parts[1], parts[0]], 0, True),  # backwards
        ([parts[0], parts[0]], 0, True),  # twice the same
        ([parts[0], parts[1], parts[3]], 0, True),  # a gap
        ([parts[0], other], 0, True),  # other memory
        ([parts[0], parts[1].t().reshape(5, 4)[:4]], 0, False),
        (parts, 1, False),  # along the other dimension they do not follow each other
        (parts[:1], 0, True),
        ([parts[0], parts[1].float()], 0, False),
        (parts, 5, True),
    ):
        assert joined_view(tensors, dim, new_axis=new_axis) is None
