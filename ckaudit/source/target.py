"""What a user may name as a target, and which source each spelling opens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from ckaudit.errors import SourceError, UsageError
from ckaudit.naming import printable
from ckaudit.progress import Progress
from ckaudit.source import FileInfo, Source
from ckaudit.source.local import LocalSource, as_text

_PART = r"\w(?:[\w.-]*\w)?"
_REPO = re.compile(rf"(?P<name>(?:{_PART}/)?{_PART})(?:@(?P<revision>[^\s@]+))?", re.ASCII)
_INDEX = re.compile(r"\.safetensors\.index(\.[\w-]+)?\.json$")
_WEB = re.compile(r"(?:tree|blob|resolve)/(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+)(?P<inside>/.*)?")
_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
_SPELLINGS = "Give org/name[@revision], a folder, a .safetensors file or a .safetensors.index.json file."


class HubTarget(msgspec.Struct, frozen=True):
    """A model repo on the Hub; `revision` None is the default branch."""

    name: str
    revision: str | None = None

    def open(self, *, jobs: int, offline: bool, progress: Progress) -> Source:
        from ckaudit.source.hub import open_hub

        try:
            return open_hub(self.name, self.revision, jobs=jobs, offline=offline, progress=progress)
        except SourceError as error:
            parent, told = os.path.dirname(self.name), error.message.startswith("There is no folder")
            if (
                parent and os.path.isdir(parent) and not told
            ):  # more likely a path with a slip than a repo of that owner
                error.message = f"{error.message.rstrip('.')}. There is no folder {self.name} here either."
            raise


class LocalTarget(msgspec.Struct, frozen=True):
    """A folder or a file on this disk; `name` is how the user spelled it."""

    name: str
    path: Path

    def open(self, *, jobs: int, offline: bool, progress: Progress) -> Source:  # noqa: ARG002  one shape for both
        if self.path.is_dir():
            return open_folder(self.path, self.name)
        return open_file(self.path, self.name)


def parse(target: str, progress: Progress) -> HubTarget | LocalTarget:
    """What `target` names. Raises UsageError, with the spellings that make sense, for what can be neither a path nor a repo."""
    if not target.strip() or "\0" in target:
        raise UsageError("The target is empty." if not target.strip() else "The target holds a NUL byte.", _SPELLINGS)
    path = Path(os.path.expanduser(target))
    if os.path.lexists(path):
        if (
            repo(target)
            and path.is_dir()
            and not any(path.glob("*.safetensors*"))
            and not (path / "snapshots").is_dir()
        ):
            progress.note(f"{target} is a folder here, so that is read, not the Hub repo of this name.")
        return LocalTarget(target, path)
    if target.startswith("hf://") or re.match(r"https?://", target):
        return _from_url(target)
    named = repo(target)
    if named is not None and not target.endswith((".safetensors", ".json")):
        return named
    shown = printable(target)
    if re.fullmatch(r"[^\s/\\]+/[^\s/\\]+", target) and not target.startswith((".", "~")):
        raise UsageError(f"{shown} is no file or folder here, and cannot be the name of a Hub repo.", _SPELLINGS)
    raise UsageError(f"There is no file or folder {shown}.", _SPELLINGS)


def repo(text: str) -> HubTarget | None:
    """The repo that `[org/]name[@revision]` names, if the Hub allows such a name."""
    match = _REPO.fullmatch(text)
    if match is None or len(match["name"]) > 96 or any(bad in match["name"] for bad in ("--", "..")):
        return None
    return None if match["name"].endswith(".git") else HubTarget(match["name"], match["revision"])


def _from_url(url: str) -> HubTarget:
    """The repo that an address copied from the Hub's pages, or a `hf://` address, points at."""
    shown = printable(url)
    try:
        parts = urlsplit(url)
        hosts = _HOSTS | {urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname}
    except ValueError:
        raise UsageError(f"{shown} is not an address.", _SPELLINGS) from None
    if parts.scheme != "hf" and parts.hostname not in hosts:
        raise UsageError(f"{shown} is not an address of the Hub.", f"{_SPELLINGS} For a mirror, set HF_ENDPOINT.")
    path = unquote(f"{parts.netloc}{parts.path}" if parts.scheme == "hf" else parts.path).strip("/")
    if path.startswith(("datasets/", "spaces/", "buckets/", "kernels/")):
        raise UsageError(f"{shown} is not a model repo.", "Give the repo of a model.")
    found = repo(path.removeprefix("models/"))
    if found is None and parts.scheme != "hf":
        owner, name, *rest = (path + "//").split("/", 2)
        web = _WEB.fullmatch(rest[0].strip("/"))
        found = repo(f"{owner}/{name}@{web['revision']}") if web and not web["inside"] else None
    if found is None or "/" not in found.name:
        raise UsageError(f"{shown} is not the address of a whole model repo.", "Give org/name[@revision].")
    return found


def open_folder(path: Path, name: str) -> LocalSource:
    """A folder: of a checkpoint, of a repo in the Hugging Face cache (`models--org--name`), or a snapshot in it."""
    real = Path(os.path.realpath(path))
    if real.name.startswith("models--") and (real / "snapshots").is_dir():
        return open_snapshot(real, _cached_commit(real, None), name)
    if real.name == "snapshots" and real.parent.name.startswith("models--"):
        return open_snapshot(real.parent, _cached_commit(real.parent, None), name)
    if (inside := _in_snapshot(real)) is not None:
        return open_snapshot(*inside[:2], name, under=inside[2])
    cached = sorted(p.name for p in real.glob("models--*/snapshots"))
    if cached and not any(real.glob("*.safetensors*")):
        raise UsageError(
            f"{printable(name)} is a whole Hugging Face cache.", "Give one of its models--org--name folders."
        )
    return LocalSource(path, name=name)


def open_file(path: Path, name: str) -> LocalSource:
    """One weight file or one index, with the small files of its folder; an index also with the shards beside it."""
    own, shown = as_text(path.name), printable(name)
    if not path.exists():
        raise SourceError(f"{shown} is a link to nothing.", "Give the file itself.")
    if not path.is_file():
        raise UsageError(f"{shown} is neither a file nor a folder.", _SPELLINGS)
    if _INDEX.search(own):
        return _with(path, name, lambda p: not _INDEX.search(p))
    if own.endswith(".safetensors"):
        return _with(path, name, _companion)
    raise UsageError(f"{shown} is not a checkpoint that ckaudit reads.", _SPELLINGS)


def _with(path: Path, name: str, beside: Callable[[str], bool]) -> LocalSource:
    """A file and those `beside` it. The user named this very file, so its own link is followed wherever it leads."""
    own = as_text(path.name)
    inside = _in_snapshot(Path(os.path.realpath(path.parent)))
    if inside is None:
        return LocalSource(path.parent, name=name, only=lambda p: p == own or beside(p), stores=(path,))
    repo, commit, under = inside
    return open_snapshot(repo, commit, name, under=under, only=lambda p: p == own or beside(p), stores=(path,))


def _companion(path: str) -> bool:
    """Whether a file decides how the one named beside it loads: config and code, no weights."""
    return path.endswith((".json", ".py")) and not _INDEX.search(path)


def open_snapshot(
    repo: Path, commit: str, name: str, kind: str = "local", *,
    under: str = "", only: Callable[[str], bool] | None = None, stores: tuple[Path, ...] = (),
) -> LocalSource:  # fmt: skip
    """One snapshot of `repo`, a `models--org--name` folder, or the folder `under` it; `only` and `stores` as LocalSource has them.

    What the commit holds but the cache does not is listed as unreadable.
    """
    root = repo / "snapshots" / commit
    # Where huggingface_hub 2 shares blobs between repos, a repo's blob is itself a link into the cache's own `blobs`.
    stores = (repo / "blobs", repo.parent / "blobs", *stores)
    absent = _absent(repo, root, under)
    if only is not None:
        absent = {path: info for path, info in absent.items() if "/" not in path and only(path)}
    return LocalSource(root / under, name=name, kind=kind, revision=commit, only=only, stores=stores, absent=absent)


def _in_snapshot(real: Path) -> tuple[Path, str, str] | None:
    """Of a folder in the Hugging Face cache: the repo's folder, the commit, and the folder's path in the commit ("" for all of it)."""
    for root in (real, *real.parents):
        if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
            return root.parent.parent, root.name, "" if root == real else real.relative_to(root).as_posix()
    return None


def cached_commit(repo: Path, revision: str | None) -> str | None:
    """The commit that a branch, a tag or (the beginning of) a commit stands for in a cache folder; None when it is not there."""
    snapshots = sorted(p.name for p in (repo / "snapshots").glob("*") if p.is_dir())
    refs = repo / "refs"
    ref = refs / (revision or "main")
    if ".." not in ref.parts and ref.is_relative_to(refs) and ref.is_file():
        commit = ref.read_text(encoding="utf-8", errors="replace").strip()
        return commit if commit in snapshots else None
    if revision is None:
        return snapshots[0] if len(snapshots) == 1 else None
    return next((s for s in snapshots if len(revision) >= 7 and s.startswith(revision)), None)


def _cached_commit(repo: Path, revision: str | None) -> str:
    commit = cached_commit(repo, revision)
    if commit is None:
        held = ", ".join(sorted(printable(p.name) for p in (repo / "snapshots").glob("*"))) or "none"
        raise UsageError(
            f"{printable(repo.name)} has no snapshot for main.", f"Name one of its snapshots ({held}) as a folder."
        )
    return commit


class _TreeRow(msgspec.Struct):
    size: int | None = None
    lfs_sha256: str | None = None


class _Tree(msgspec.Struct):
    files: dict[str, _TreeRow]


def _absent(repo: Path, root: Path, under: str) -> dict[str, FileInfo]:
    """Files that the commit is known to hold `under` a folder of it, by their path in that.

    From the listing that huggingface_hub 2 keeps (`trees/COMMIT.json`), else from indexes. A cache holds what was asked for, so that a
    file is not in it says nothing about the repo.
    """
    start = f"{under}/" if under else ""
    try:
        tree = msgspec.json.decode((repo / "trees" / f"{root.name}.json").read_bytes(), type=_Tree)
        held = ((path.removeprefix(start), row) for path, row in tree.files.items() if path.startswith(start))
        return {path: FileInfo(path, row.size, row.lfs_sha256) for path, row in held}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        pass
    names: set[str] = set()
    for index in filter(lambda path: _INDEX.search(path.name), (root / under).glob("*.json")):
        try:
            weight_map = json.loads(index.read_bytes()).get("weight_map")
            names |= {v for v in weight_map.values() if isinstance(v, str) and v == os.path.basename(v)}
        except (OSError, ValueError, AttributeError, RecursionError):
            continue  # a broken index is the audit's to report
    return {name: FileInfo(name, None) for name in names if name}
