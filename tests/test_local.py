"""Reading a checkpoint from disk: folders, files, cache snapshots, and everything odd that a disk can hold."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from ckaudit.errors import SourceError, UsageError
from ckaudit.progress import NullProgress
from ckaudit.source import FileInfo, Source, Span, Unreadable, local, open_source
from ckaudit.source.target import HubTarget, LocalTarget, parse
from tests.helpers import all_of

root_reads_all = pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind this user")


def reason(source: Source, path: str) -> str:
    """Why a listed file cannot be read."""
    assert source.files()[path] == FileInfo(path, None)
    ((_, data),) = source.read_spans([Span(path, 0, 10)])
    assert isinstance(data, Unreadable)
    return data.reason


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    where = tmp_path / "model"
    (where / "transformer").mkdir(parents=True)
    (where / "config.json").write_bytes(b'{"a": 1}')
    (where / "model.safetensors").write_bytes(bytes(range(100)))
    (where / "transformer" / "config.json").write_bytes(b"{}")
    return where


def test_a_folder_lists_its_files_sorted_with_their_sizes(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("x")
    source = open_source(str(folder))
    assert (source.name, source.kind, source.revision) == (str(folder), "local", None)
    assert list(source.files().values()) == [
        FileInfo("config.json", 8),
        FileInfo("model.safetensors", 100),
        FileInfo("transformer/config.json", 2),
    ]
    assert all_of(source, "transformer/config.json") == b"{}"


def test_spans_are_read_in_order_and_clipped(folder: Path) -> None:
    source = open_source(str(folder))
    spans = [
        Span("model.safetensors", *part) for part in ((0, 8), (90, 1000), (100, 200), (150, 200), (50, 50), (50, 40))
    ]
    assert list(source.read_spans(spans)) == list(
        zip(spans, [bytes(range(8)), bytes(range(90, 100)), b"", b"", b"", b""], strict=True)
    )


def test_a_file_that_is_not_there(folder: Path) -> None:
    source = open_source(str(folder))
    assert (
        all_of(source, "tokenizer.json")
        == all_of(source, "../model/config.json")
        == Unreadable("there is no such file")
    )


def test_an_empty_folder_has_no_files(tmp_path: Path) -> None:
    assert open_source(str(tmp_path)).files() == {}


# Links


def test_links_inside_the_folder_are_files_like_others(folder: Path) -> None:
    (folder / "again.safetensors").symlink_to("model.safetensors")
    (folder / "transformer" / "up.json").symlink_to("../config.json")
    source = open_source(str(folder))
    assert source.files()["again.safetensors"].size == 100
    assert all_of(source, "transformer/up.json") == b'{"a": 1}'


@pytest.mark.parametrize("kind", ["relative", "absolute", "through a folder", "through a chain"])
def test_links_out_of_the_folder_are_not_followed(folder: Path, tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    link = folder / "link.json"
    if kind == "relative":
        link.symlink_to("../secret.json")
    elif kind == "absolute":
        link.symlink_to(secret)
    elif kind == "through a chain":
        (folder / "hop.json").symlink_to("../secret.json")
        link.symlink_to("hop.json")
    else:
        link.symlink_to(tmp_path)
    assert "leads out of the target" in reason(open_source(str(folder)), "link.json")
    assert "link.json/secret.json" not in open_source(str(folder)).files()


def test_a_sibling_whose_name_begins_like_the_folder_is_outside(folder: Path) -> None:
    other = folder.with_name("model-secret")
    other.mkdir()
    (other / "x.json").write_text("{}")
    (folder / "x.json").symlink_to("../model-secret/x.json")
    assert "leads out of the target" in reason(open_source(str(folder)), "x.json")


def test_links_to_folders_nothing_and_themselves(folder: Path) -> None:
    (folder / "inside").symlink_to("transformer")
    (folder / "nothing.safetensors").symlink_to("gone")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "up").symlink_to(".")
    source = open_source(str(folder))
    assert reason(source, "inside") == "not a regular file"
    assert reason(source, "up") == "not a regular file"
    assert reason(source, "nothing.safetensors") == "a link to nothing"
    assert reason(source, "loop.safetensors") in ("a link to nothing", "too many levels of symbolic links")
    assert not [path for path in source.files() if path.startswith(("inside/", "up/"))]


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(folder)
    (folder / "again.json").symlink_to(folder / "config.json")
    assert all_of(open_source(str(tmp_path / "alias")), "again.json") == b'{"a": 1}'


# Things that are no files


@pytest.mark.timeout(20)
def test_pipes_sockets_and_devices_do_not_hang(folder: Path) -> None:
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "zero.safetensors").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(folder)  # a socket's path may not be long
        server.bind("s.json")
        source = open_source(str(folder))
        assert reason(source, "pipe.safetensors") == "not a regular file"
        assert reason(source, "s.json") == "not a regular file"
        assert "leads out of the target" in reason(source, "zero.safetensors")


@pytest.mark.timeout(20)
def test_a_pipe_that_takes_the_place_of_a_listed_file_does_not_hang(folder: Path) -> None:
    source = open_source(str(folder))
    source.files()
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert all_of(source, "config.json") == Unreadable("not a regular file")


def test_a_file_that_changes_is_told(folder: Path) -> None:
    source = open_source(str(folder))
    source.files()
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert dict(source.read_spans([Span("model.safetensors", 0, 10)])) == {
        Span("model.safetensors", 0, 10): Unreadable("it changed while it was read")
    }
    (folder / "config.json").unlink()
    assert all_of(source, "config.json") == Unreadable("no such file or directory")


@root_reads_all
def test_no_permission_is_told_of_the_file(folder: Path) -> None:
    (folder / "model.safetensors").chmod(0)
    (folder / "transformer").chmod(0)
    source = open_source(str(folder))
    ((_, data),) = source.read_spans([Span("model.safetensors", 0, 10)])
    assert data == Unreadable("permission denied")
    assert reason(source, "transformer/") == "permission denied"
    (folder / "transformer").chmod(0o700)


def test_no_permission_is_told_as_the_system_words_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(folder))
    source.files()

    def deny(*_: object) -> int:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "open", deny)
    assert [data for _, data in source.read_spans([Span("config.json", 0, 1)])] == [Unreadable("permission denied")]


def test_a_folder_of_everything_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_ENTRIES", 3)
    with pytest.raises(SourceError, match=r"more than 3 files\. Give the folder of one checkpoint"):
        open_source(str(folder)).files()


@pytest.mark.parametrize("inside", [False, True])
def test_a_target_that_is_not_utf8_is_named_in_escapes(folder: Path, inside: bool) -> None:
    (folder / os.fsdecode(b"bad\xff")).mkdir()
    own = folder / os.fsdecode(b"bad\xff/own\xff.safetensors")
    own.write_bytes(b"12")
    source = open_source(str(own if inside else own.parent))
    assert source.name == f"{folder}/bad\\xff" + ("/own\\xff.safetensors" if inside else "")
    assert all_of(source, "own\\xff.safetensors") == b"12"


def test_names_that_are_not_utf8_are_listed_in_escapes(folder: Path) -> None:
    (folder / os.fsdecode(b"bad\xff.json")).write_bytes(b"1")
    (folder / "line\nbreak.json").write_bytes(b"2")
    source = open_source(str(folder))
    assert all_of(source, "bad\\xff.json") == b"1"
    assert all_of(source, "line\nbreak.json") == b"2"


# One file, one index


def test_one_file_brings_the_config_and_no_other_weights(folder: Path) -> None:
    (folder / "other.safetensors").write_bytes(b"x")
    (folder / "model.safetensors.index.json").write_bytes(b"{}")
    (folder / "modeling.py").write_bytes(b"")
    source = open_source(str(folder / "model.safetensors"))
    assert list(source.files()) == ["config.json", "model.safetensors", "modeling.py"]


def test_one_file_in_a_crowded_place_costs_no_walk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(10):
        (folder / "transformer" / f"{i}.json").write_bytes(b"")
    monkeypatch.setattr(local, "MAX_ENTRIES", 5)
    assert len(open_source(str(folder / "model.safetensors")).files()) == 2
    with pytest.raises(SourceError):
        open_source(str(folder)).files()


def test_a_file_named_by_the_user_may_be_a_link_to_anywhere(folder: Path, tmp_path: Path) -> None:
    blob = tmp_path / "elsewhere" / "blob"
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    (tmp_path / "elsewhere" / "secret").write_bytes(b"secret")
    (folder / "linked.safetensors").symlink_to(blob)
    (folder / "generation_config.json").symlink_to(blob.with_name("secret"))
    source = open_source(str(folder / "linked.safetensors"))
    assert dict(source.read_spans([Span("linked.safetensors", 0, 9)])).popitem()[1] == b"weights"
    assert "leads out of the target" in reason(source, "generation_config.json")


def test_an_index_stands_for_its_folder_without_other_indexes(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(b"{}")
    (folder / "model.safetensors.index.fp16.json").write_bytes(b"{}")
    source = open_source(str(folder / "model.safetensors.index.fp16.json"))
    assert [path for path in source.files() if ".index." in path] == ["model.safetensors.index.fp16.json"]
    assert "model.safetensors" in source.files()


@pytest.mark.parametrize("name", ["README.md", "pytorch_model.bin", "model.gguf", "config.json"])
def test_files_that_are_no_checkpoint(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"{}")
    with pytest.raises(UsageError, match="is not a checkpoint that ckaudit reads"):
        open_source(str(folder / name))


def test_a_target_that_is_no_file(folder: Path) -> None:
    os.mkfifo(folder / "x.safetensors")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        open_source(str(folder / "x.safetensors"))
    (folder / "y.safetensors").symlink_to("gone")
    with pytest.raises(SourceError, match="a link to nothing"):
        open_source(str(folder / "y.safetensors"))


# The Hugging Face cache

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A repo in the cache, with two snapshots of which main is the newer, and one blob that the cache shares between repos."""
    repo = tmp_path / "hub" / "models--org--name"
    shared = tmp_path / "hub" / "blobs" / "ab" / "cd"
    for where in (repo / "blobs", repo / "refs", repo / "snapshots" / OLD, repo / "snapshots" / NEW, shared.parent):
        where.mkdir(parents=True)
    sha256 = "e" * 64
    (repo / "blobs" / sha256).write_bytes(b"weights")
    shared.write_bytes(b"shared weights")
    (repo / "blobs" / ("f" * 64)).symlink_to("../../blobs/ab/cd")
    (repo / "blobs" / ("0" * 40)).write_bytes(b"{}")
    (repo / "refs" / "main").write_text(NEW)
    snapshot = repo / "snapshots" / NEW
    (snapshot / "config.json").symlink_to("../../blobs/" + "0" * 40)
    (snapshot / "a.safetensors").symlink_to("../../blobs/" + sha256)
    (snapshot / "b.safetensors").symlink_to("../../blobs/" + "f" * 64)
    (snapshot / "evil.json").symlink_to("../../../secret.json")
    (tmp_path / "hub" / "secret.json").write_text("{}")
    return repo


@pytest.mark.parametrize("spelling", ["", "snapshots", f"snapshots/{NEW}"])
def test_a_cache_snapshot_is_read_through_its_blobs_alone(cached: Path, spelling: str) -> None:
    source = open_source(str(cached / spelling))
    assert (source.kind, source.revision) == ("local", NEW)
    assert source.files()["a.safetensors"] == FileInfo("a.safetensors", 7, "e" * 64)
    assert source.files()["config.json"] == FileInfo("config.json", 2)
    assert [data for _, data in source.read_spans([Span("b.safetensors", 0, 6)])] == [b"shared"]
    assert "leads out of the target" in reason(source, "evil.json")


@pytest.mark.parametrize("through", ["itself", "a link to the snapshot"])
def test_a_file_of_a_cache_snapshot_is_read_with_what_is_beside_it(cached: Path, tmp_path: Path, through: str) -> None:
    snapshot = cached / "snapshots" / NEW
    if through != "itself":
        (tmp_path / "link").symlink_to(snapshot)
        snapshot = tmp_path / "link"
    source = open_source(str(snapshot / "a.safetensors"))
    assert list(source.files()) == ["a.safetensors", "config.json", "evil.json"]
    assert source.revision == NEW
    assert source.files()["a.safetensors"] == FileInfo("a.safetensors", 7, "e" * 64)
    assert (all_of(source, "a.safetensors"), all_of(source, "config.json")) == (b"weights", b"{}")
    assert "leads out of the target" in reason(source, "evil.json")


def test_an_index_of_a_cache_snapshot_brings_its_shards_and_tells_which_are_not_there(cached: Path) -> None:
    index = cached / "snapshots" / NEW / "model.safetensors.index.json"
    (cached / "blobs" / ("1" * 40)).write_bytes(b'{"weight_map": {"x": "b.safetensors", "y": "c.safetensors"}}')
    index.symlink_to("../../blobs/" + "1" * 40)
    source = open_source(str(index))
    assert all_of(source, "b.safetensors") == b"shared weights"
    assert "not in the local cache" in reason(source, "c.safetensors")


@pytest.mark.parametrize("spelling", ["transformer", "transformer/x.safetensors"])
def test_a_folder_in_a_cache_snapshot_is_read_through_the_blobs_too(cached: Path, spelling: str) -> None:
    """A part of a pipeline, as diffusers saves it: links lead a folder further up."""
    inside = cached / "snapshots" / NEW / "transformer"
    inside.mkdir()
    (inside / "config.json").symlink_to("../../../blobs/" + "0" * 40)
    (inside / "x.safetensors").symlink_to("../../../blobs/" + "e" * 64)
    (inside / "evil.json").symlink_to("../../../../secret.json")
    (cached / "trees").mkdir()
    held = ", ".join(f'"{path}": {{"size": 7}}' for path in ("a.json", "transformer/b.json", "transformer/in/c.json"))
    (cached / "trees" / f"{NEW}.json").write_text(f'{{"files": {{{held}}}}}')
    source = open_source(str(cached / "snapshots" / NEW / spelling))
    held_back = ["in/c.json"] if spelling == "transformer" else []  # one file brings no folders
    assert list(source.files()) == ["b.json", "config.json", "evil.json", *held_back, "x.safetensors"]
    assert (source.revision, all_of(source, "x.safetensors"), all_of(source, "config.json")) == (NEW, b"weights", b"{}")
    assert "leads out of the target" in reason(source, "evil.json")


def test_a_folder_that_only_looks_like_a_part_of_the_cache_keeps_links_inside(cached: Path) -> None:
    """As a repo that was cloned beside a cache: blobs are its own only in `models--org--name/snapshots/COMMIT`."""
    clone = cached / "clone" / NEW
    clone.mkdir(parents=True)
    (clone / "x.safetensors").write_bytes(b"x")
    (clone / "config.json").symlink_to("../../blobs/" + "0" * 40)
    for spelling in (clone, clone / "x.safetensors"):
        assert "leads out of the target" in reason(open_source(str(spelling)), "config.json")


def test_another_snapshot_is_named_by_its_folder(cached: Path) -> None:
    assert open_source(str(cached / "snapshots" / OLD)).revision == OLD
    (cached / "refs" / "main").unlink()
    with pytest.raises(UsageError, match=f"no snapshot for main.*{OLD}, {NEW}"):
        open_source(str(cached))


def test_what_a_snapshot_lacks_is_not_taken_for_missing(cached: Path) -> None:
    index = b'{"weight_map": {"x": "a.safetensors", "y": "c.safetensors"}}'
    (cached / "snapshots" / NEW / "model.safetensors.index.json").write_bytes(index)
    assert "not in the local cache" in reason(open_source(str(cached)), "c.safetensors")
    (cached / "trees").mkdir()
    rows = (
        b'{"size": 9, "blob_id": "x"}, "d.safetensors": {"size": 70, "blob_id": "y", "lfs_sha256": "z", "lfs_size": 70}'
    )
    (cached / "trees" / f"{NEW}.json").write_bytes(b'{"format_version": 1, "files": {"a.safetensors": ' + rows + b"}}")
    source = open_source(str(cached))
    assert source.files()["d.safetensors"] == FileInfo("d.safetensors", 70, "z")
    assert source.files()["a.safetensors"].size == 7, "what is here is told as it is"
    assert "c.safetensors" not in source.files()


@pytest.mark.parametrize("index", [b"", b"[]", b'{"weight_map": []}', b"[" * 100_000, b"\xff"])
def test_a_broken_index_in_the_cache_is_left_to_the_audit(cached: Path, index: bytes) -> None:
    (cached / "snapshots" / NEW / "model.safetensors.index.json").write_bytes(index)
    assert "model.safetensors.index.json" in open_source(str(cached)).files()


def test_the_whole_cache_is_no_checkpoint(cached: Path) -> None:
    with pytest.raises(UsageError, match="whole Hugging Face cache"):
        open_source(str(cached.parent))


# Spellings


class Notes(NullProgress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(
    ("target", "name", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name@main", "org/name", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("Qwen/Qwen2.5-0.5B_x@7ae557604adf67be50417f59c2c2f167def9a775", "Qwen/Qwen2.5-0.5B_x", "7ae557604adf67be50417f59c2c2f167def9a775"),
        ("gpt2", "gpt2", None),
        ("hf://org/name", "org/name", None),
        ("hf://org/name@v1", "org/name", "v1"),
        ("hf://org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("_org/_name_", "_org/_name_", None),
        ("hf://models/org/name", "org/name", None),
        ("https://huggingface.co/org/name", "org/name", None),
        ("https://huggingface.co/org/name/", "org/name", None),
        ("https://huggingface.co/org/name/tree/main", "org/name", "main"),
        ("https://hf.co/org/name/tree/refs%2Fpr%2F7?x=1#y", "org/name", "refs/pr/7"),
        ("http://mirror.example:8080/org/name", "org/name", None),
    ],
)  # fmt: skip
def test_spellings_of_a_repo(
    target: str, name: str, revision: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080")
    assert parse(target, NullProgress()) == HubTarget(name, revision)


@pytest.mark.parametrize(
    "target",
    ["", "  ", "a\0b", "./org/name", "../name", "/no/such/folder", "~/nothing-here", "a/b/c", "org/name.safetensors", "model.safetensors",
     "org/", "org\\name", "org/na me", "org/name@", "org/name@a b", "-org/name", "org/.name", "org/na--me", "org/name-", "org/name.git",
     "o/" + "n" * 95, "org/na..me",
     "https://example.com/org/name", "https://huggingface.co/datasets/org/name", "https://huggingface.co/org",
     "https://huggingface.co/org/name/blob/main/config.json", "https://huggingface.co/org/name/tree/main/sub", "hf://datasets/org/name",
     "hf://org", "hf://org/name/file", "https://huggingface.co/org/name/settings", "https://[bad", "https://huggingface.co"],
)  # fmt: skip
def test_spellings_of_nothing_end_in_one_line_of_advice(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        parse(target, NullProgress())
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_hostile_spellings_are_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        parse("org/\x1b[31m\nname", NullProgress())
    assert str(caught.value).isprintable()


def test_what_is_here_wins_over_a_repo_of_the_same_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    notes = Notes()
    assert parse("org/name", notes) == LocalTarget("org/name", Path("org/name"))
    assert notes.said == ["org/name is a folder here, so that is read, not the Hub repo of this name."]
    assert parse("org/name@main", notes) == HubTarget("org/name", "main")
    (tmp_path / "org" / "name" / "model.safetensors").write_bytes(b"")
    assert parse("org/name", notes) == LocalTarget("org/name", Path("org/name"))
    assert len(notes.said) == 1, "a folder with weights is no surprise"


def test_local_reads_leave_no_thread_and_need_no_hub_client(folder: Path) -> None:
    before = threading.active_count()
    all_of(open_source(str(folder)), "config.json")
    assert threading.active_count() == before
