"""Releases kept under `CKAUDIT_HOME`: the Python files and metadata of wheels, fetched with the user's own pip and index settings.

    engines/vllm/0.25.1/            the unpacked release: `vllm/**.py`, `vllm-0.25.1.dist-info/{METADATA,RECORD}`, `release.json`
    engines/transformers/5.20.0/    a transformers for releases that want another one than is installed

A release appears by one rename of a complete folder, so an interrupted fetch leaves nothing that looks whole, and of two processes that
fetch the same release one wins and the other uses what it left. For a CI, cache the folder `engines` under the key that the file names
in it spell: releases never change.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ckaudit.engines.cache import home
from ckaudit.errors import EngineError
from ckaudit.progress import NullProgress, Progress

_RECORD = "release.json"
# Only Python files are used, so any platform's wheel will do; Linux ones exist for every release.
_PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in range(17, 41)), "manylinux2014_x86_64", "manylinux1_x86_64")
_ABIS = ("abi3", "cp312", "cp311", "cp310", "none")


class Release(msgspec.Struct, frozen=True):
    """One stored release: the wheel that it came from, that wheel's sha256, and what it kept in bytes."""

    package: str
    version: str
    wheel: str
    sha256: str
    bytes: int
    folder: str = ""

    @property
    def path(self) -> Path:
        """The folder that holds the package."""
        return Path(self.folder)


def folder(package: str = "vllm") -> Path:
    """Where releases of a package are kept."""
    return home() / "engines" / package


def releases(package: str = "vllm") -> tuple[Release, ...]:
    """Every stored release, oldest first."""
    found = [get(package, path.name) for path in folder(package).glob("*") if not path.name.startswith(".")]
    return tuple(sorted((r for r in found if r is not None), key=lambda r: Version(r.version)))


def get(package: str, version: str) -> Release | None:
    """A stored release; None if it is not there or not whole."""
    path = folder(package) / version
    try:
        Version(version)
        record = msgspec.json.decode((path / _RECORD).read_bytes(), type=Release)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError, InvalidVersion):
        return None
    return msgspec.structs.replace(record, folder=str(path))


def add(version: str, *, package: str = "vllm", offline: bool = False, progress: Progress | None = None) -> Release:
    """The release `package==version`, fetched if it is not stored. Raises EngineError."""
    text = plain_version(version)
    if (stored := get(package, text)) is not None:
        return stored
    return _fetch(package, f"=={text}", offline, progress or NullProgress())


def add_matching(
    package: str, wanted: SpecifierSet, *, offline: bool = False, progress: Progress | None = None
) -> Release:
    """The newest stored release of `package` that `wanted` allows, else the newest on the index. Raises EngineError."""
    stored = [r for r in releases(package) if wanted.contains(r.version, prereleases=True)]
    return stored[-1] if stored else _fetch(package, str(wanted), offline, progress or NullProgress())


def remove(version: str, package: str = "vllm") -> bool:
    """Forget a stored release; whether there was one."""
    path = folder(package) / plain_version(version)
    if not path.is_dir():
        return False
    aside = Path(tempfile.mkdtemp(prefix=".gone-", dir=folder(package)))
    with suppress(FileNotFoundError):
        path.rename(aside / "release")
    shutil.rmtree(aside, ignore_errors=True)
    return True


def on_index(package: str = "vllm") -> tuple[str, ...]:
    """Versions of a package that the user's index has, oldest first. Raises EngineError."""
    done = _pip("index", "versions", package)
    found = re.search(r"^Available versions: (.+)$", done, re.MULTILINE)
    if not found:
        raise EngineError(f"pip names no version of {package}.", "See `pip index versions vllm`.")
    return tuple(reversed([v.strip() for v in found[1].split(",")]))


def requirement(tree: Path, package: str, of: str) -> SpecifierSet | None:
    """What the metadata of `package` in the folder `tree` says about versions of the package `of`."""
    for metadata in sorted(tree.glob("*.dist-info/METADATA")):
        if canonicalize_name(metadata.parent.name.partition("-")[0]) != canonicalize_name(package):
            continue
        for line in metadata.read_text("utf-8", "replace").splitlines():
            if not line:
                break
            if line.startswith("Requires-Dist:"):
                with suppress(InvalidRequirement):
                    found = Requirement(line.partition(":")[2].strip())
                    if canonicalize_name(found.name) == of and (
                        found.marker is None or found.marker.evaluate({"extra": ""})
                    ):
                        return found.specifier
    return None


def plain_version(text: str) -> str:
    """`text` as versions are written (`v0.25.1` and `0.25.1` are one). Raises EngineError."""
    try:
        return str(Version(text))
    except InvalidVersion:
        raise EngineError(f"{text!r} is not a version.", "Write it as in vllm==0.25.1.") from None


def _fetch(package: str, specifier: str, offline: bool, progress: Progress) -> Release:
    if offline:
        raise EngineError(
            f"{package}{specifier} is not stored and --offline forbids fetching it.",
            f"Run `ckaudit engines add {package}{specifier}` once with a network.",
        )
    root = folder(package)
    root.mkdir(parents=True, exist_ok=True)
    progress.note(f"fetching {package}{specifier} with pip (its Python files are kept under {root})")
    with _one_at_a_time(root / ".lock"):
        if specifier.startswith("==") and (stored := get(package, specifier[2:])) is not None:
            return stored
        with (
            tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as name,
            progress.task(f"pip download {package}{specifier}"),
        ):
            return _keep(package, _download(package, specifier, Path(name)), Path(name))


def _download(package: str, specifier: str, into: Path) -> Path:
    platforms = [f"--platform={p}" for p in (*_PLATFORMS, "any")]
    abis = [f"--abi={a}" for a in _ABIS]
    _pip("download", "--no-deps", "--only-binary=:all:", "--implementation=cp", "--python-version=3.12", *platforms, *abis,
         f"--dest={into}", f"{package}{specifier}")  # fmt: skip
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise EngineError(
            f"pip fetched {len(wheels)} wheels for {package}{specifier} instead of one.", "Is it on your index?"
        )
    return wheels[0]


def _pip(*args: str) -> str:
    """Run the pip of this environment, with the user's settings. Raises EngineError with pip's own last words."""
    if importlib.util.find_spec("pip") is None:
        raise EngineError(
            "pip is not installed beside ckaudit.",
            "Install it (`python -m ensurepip`), or give an unpacked wheel: vllm@PATH.",
        )
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *args],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [
            line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.strip().splitlines()[-1:]
        raise EngineError(
            f"pip {args[0]} failed: {' '.join(lines)[:500]}", "Check the version and your pip index settings."
        )
    return done.stdout


def _keep(package: str, wheel: Path, work: Path) -> Release:
    """Unpack what is kept of a wheel and put it in its place by one rename."""
    try:
        name, version, _, _ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise EngineError(f"{wheel.name} is no wheel: {error}", "Is it on your index?") from None
    if name != canonicalize_name(package):
        raise EngineError(f"pip fetched {wheel.name} for {package}.", "Check your pip index settings.")
    tree = work / "tree"
    size = unpack(wheel, tree)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record = Release(package, str(version), wheel.name, digest, size)
    (tree / _RECORD).write_bytes(msgspec.json.encode(record))
    final = folder(package) / str(version)
    try:
        tree.rename(final)
    except OSError:
        if (there := get(package, str(version))) is not None:  # another process was first
            return there
        shutil.rmtree(final, ignore_errors=True)
        tree.rename(final)
    return msgspec.structs.replace(record, folder=str(final))


def unpack(wheel: Path, tree: Path) -> int:
    """Write the Python files and metadata of a wheel under `tree`, each checked against the wheel's RECORD; returns their bytes.

    Raises EngineError for a wheel that is broken, or that names a path outside itself.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return _unpack(archive, tree)
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        raise EngineError(f"{wheel.name} is broken: {error}", "Fetch it again.") from None


def _unpack(archive: zipfile.ZipFile, tree: Path) -> int:
    names = archive.namelist()
    record = next((n for n in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", n)), None)
    if record is None:
        raise KeyError("it has no RECORD")
    hashes = dict(_record_rows(archive.read(record).decode()))
    size = 0
    for name in names:
        path = PurePosixPath(name)
        kept = path.suffix == ".py" or (path.parts[0].endswith(".dist-info") and path.name in ("METADATA", "RECORD"))
        if not kept or name.endswith("/"):
            continue
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise KeyError(f"it holds the path {name!r}")
        data = archive.read(name)
        if name in hashes and hashes[name] != _record_hash(data):
            raise KeyError(f"{name} is not what RECORD says")
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        size += len(data)
    return size


def _record_rows(text: str) -> Iterator[tuple[str, str]]:
    """Path and sha256 of each row of a RECORD that has one (https://packaging.python.org, "Recording installed projects")."""
    for line in text.splitlines():
        path, _, digest = line.rpartition(",")[0].rpartition(",")
        if digest.startswith("sha256="):
            yield path.strip('"'), digest.removeprefix("sha256=")


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock file, where the system has such locks; without them two fetches do the work twice and one wins."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
