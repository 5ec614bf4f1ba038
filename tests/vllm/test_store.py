"""The release store, with wheels made here and a folder as the index: pip is real, no network is used."""

from __future__ import annotations

import base64
import hashlib
import multiprocessing
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from ckaudit.engines import vllm
from ckaudit.engines.vllm import store
from ckaudit.errors import EngineError

FILES = {
    "vllm/__init__.py": b"__version__ = 1\n",
    "vllm/model_executor/__init__.py": b"",
    "vllm/_C.abi3.so": b"\x7fELF" * 100,
    "vllm/config.json": b"{}",
}


def make_wheel(folder: Path, version: str, files: dict[str, bytes] = FILES, package: str = "vllm", requires: str = "",
               wrong: str | None = None, tag: str = "cp38-abi3-manylinux1_x86_64") -> Path:  # fmt: skip
    """A wheel with a RECORD; `wrong` names a file whose hash there is not its own."""
    info = f"{package}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{requires}"
    held = files | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    rows = []
    for name, data in held.items():
        digest = hashlib.sha256(b"other" if name == wrong else data).digest()
        rows.append(f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(data)}")
    path = folder / f"{package}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]))
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for its only index, and an empty CKAUDIT_HOME."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("CKAUDIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_release_keeps_its_python_files_and_metadata_only(index: Path) -> None:
    wheel = make_wheel(index, "0.25.1")
    release = store.add("0.25.1")
    kept = {str(p.relative_to(release.path)) for p in release.path.rglob("*") if p.is_file()}
    assert kept == {
        "vllm/__init__.py", "vllm/model_executor/__init__.py", "vllm-0.25.1.dist-info/METADATA", "vllm-0.25.1.dist-info/RECORD",
        "release.json",
    }  # fmt: skip
    assert release.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert [r.version for r in store.releases()] == ["0.25.1"]
    assert list(store.folder().glob(".fetch-*")) == []


def test_the_releases_of_a_range_are_fetched_and_no_others(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.24.0", "0.25.1", "0.27.0", "0.30.0"):
        make_wheel(index, version)
    monkeypatch.setattr(store, "on_index", lambda: ("0.24.0", "0.25.1", "0.27.0", "0.30.0"))
    assert vllm.fetch(">=0.25,<0.30") == ("0.25.1", "0.27.0")
    assert [r.version for r in store.releases()] == ["0.25.1", "0.27.0"]
    with pytest.raises(EngineError, match="is no engine"):
        vllm.fetch(">=nonsense")


def test_a_stored_release_is_not_fetched_again(index: Path) -> None:
    make_wheel(index, "0.25.1").rename(index / "kept")
    make_wheel(index, "0.25.1")
    first = store.add("0.25.1")
    for wheel in index.glob("*.whl"):
        wheel.unlink()
    assert store.add("0.25.1") == first
    assert store.add("0.25.1", offline=True) == first


def test_offline_refuses_what_is_not_stored(index: Path) -> None:
    make_wheel(index, "0.25.1")
    with pytest.raises(EngineError, match="--offline"):
        store.add("0.25.1", offline=True)


@pytest.mark.parametrize("version", ["9.9", "nonsense", "../../etc", ""])
def test_what_cannot_be_had_is_one_line(index: Path, version: str) -> None:
    with pytest.raises(EngineError) as raised:
        store.add(version)
    assert "\n" not in str(raised.value)
    assert store.releases() == ()


def test_a_file_that_is_not_what_record_says(index: Path) -> None:
    make_wheel(index, "0.25.1", wrong="vllm/__init__.py")
    with pytest.raises(EngineError, match=r"vllm/__init__\.py is not what RECORD says"):
        store.add("0.25.1")
    assert store.releases() == ()


@pytest.mark.parametrize("name", ["../evil.py", "/tmp/evil.py", "vllm/../../evil.py"])
def test_a_path_that_leads_out_of_the_wheel(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path, "0.25.1", FILES | {name: b"x"})
    with pytest.raises(EngineError, match="holds the path"):
        store.unpack(wheel, tmp_path / "deep" / "tree")
    assert not list(tmp_path.rglob("evil.py"))


def test_a_truncated_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "0.25.1")
    wheel.write_bytes(wheel.read_bytes()[:200])
    with pytest.raises(EngineError, match="broken"):
        store.unpack(wheel, tmp_path / "tree")


def test_an_interrupted_fetch_leaves_nothing_that_looks_whole(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, "0.25.1")

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "unpack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.add("0.25.1")
    assert store.releases() == ()
    assert store.add("0.25.1").version == "0.25.1"


def test_half_a_release_left_by_something_else_is_replaced(index: Path) -> None:
    make_wheel(index, "0.25.1")
    (store.folder() / "0.25.1" / "vllm").mkdir(parents=True)
    assert store.releases() == ()
    store.add("0.25.1")
    assert [r.version for r in store.releases()] == ["0.25.1"]


def _add(_: int) -> str:
    return store.add("0.25.1").version


def test_two_processes_at_once(index: Path) -> None:
    make_wheel(index, "0.25.1")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_add, range(2)) == ["0.25.1", "0.25.1"]
    assert [r.version for r in store.releases()] == ["0.25.1"]


def test_remove(index: Path) -> None:
    make_wheel(index, "0.25.1")
    store.add("0.25.1")
    assert store.remove("0.25.1")
    assert not store.remove("0.25.1")
    assert store.releases() == ()
    with pytest.raises(EngineError):
        store.remove("../..")


def test_the_newest_that_a_release_allows(index: Path) -> None:
    for version in ("5.16.1", "5.20.2", "5.21.0"):
        make_wheel(index, version, {"transformers/__init__.py": b""}, "transformers", tag="py3-none-any")
    assert store.add_matching("transformers", SpecifierSet(">=5.16.1,<5.21.0")).version == "5.20.2"
    assert store.add_matching("transformers", SpecifierSet("<5.21.0"), offline=True).version == "5.20.2"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("Requires-Dist: transformers<5.21.0,>=5.16.1\n", "<5.21.0,>=5.16.1"),
        ('Requires-Dist: transformers>=4 ; extra == "x"\n', None),
        ("Requires-Dist: torch==2.11.0\n", None),
        ("Requires-Dist: what is this\n", None),
    ],
)
def test_what_a_release_requires(tmp_path: Path, line: str, wanted: str | None) -> None:
    info = tmp_path / "vllm-0.25.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\n{line}\nRequires-Dist: transformers==1 in the description\n"
    )
    found = store.requirement(tmp_path, "vllm", "transformers")
    assert found == (None if wanted is None else SpecifierSet(wanted))


def test_select(index: Path, tmp_path: Path) -> None:
    for version in ("0.24.0", "0.25.1", "0.33.0"):
        make_wheel(index, version)
        store.add(version)
    assert [e.id for e in vllm.select("==0.25.1")] == ["vllm==0.25.1"]
    assert [e.id for e in vllm.select(">=0.25")] == ["vllm==0.25.1", "vllm==0.33.0"]
    assert [e.id for e in vllm.select(">=0.24,<0.30")] == ["vllm==0.24.0", "vllm==0.25.1"]
    tree = store.folder() / "0.24.0"
    assert [e.id for e in vllm.select(f"@{tree}")] == [f"vllm@{tree}"]
    assert [e.id for e in vllm.select("")] == ["vllm"]
    for bad in (">=0.99", "@" + str(tmp_path), "nonsense", "==x"):
        with pytest.raises(EngineError):
            vllm.select(bad)


def test_a_tree_without_a_path_is_told_so() -> None:
    with pytest.raises(EngineError, match="vllm@ names no folder"):
        vllm.select("@")
