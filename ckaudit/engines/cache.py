"""Plans on disk: the second audit of the same checkpoint by the same software costs a look-up, and no import of torch.

A plan is a function of what goes into its key: ckaudit's own code, the engine's release, every library that takes part, Python, the
checkpoint's small files, its tensors' names, dtypes and shapes, and the options. A plan that rests on more (an engine that read values) is
not given to the cache, and one of which a part was not judged is not kept: what stood in the way (the environment, the time) may be mended
by the next run.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import platformdirs

import ckaudit
from ckaudit.engines import Job
from ckaudit.engines.worker import encoded
from ckaudit.plan import Plan

MAX_BYTES = 512 * 2**20
"""Size of the whole cache; the plans that were used least recently go first."""

CODE = Path(ckaudit.__file__).parent
"""ckaudit's own modules: a version does not tell one state of a checkout from the next, and engines share more than their folder."""

_MARK = b"ckaudit plan 1\n"
_DIGEST = hashlib.sha256().digest_size


def home() -> Path:
    """The folder that holds what ckaudit keeps: `CKAUDIT_HOME`, else the user's cache folder."""
    return Path(os.environ.get("CKAUDIT_HOME") or platformdirs.user_cache_dir("ckaudit"))


def key(job: Job, versions: Mapping[str, str]) -> str:
    """The name under which the plan of `job` is kept; `versions` are the software's that takes part."""
    options = msgspec.to_builtins(job.options)
    for spoken in ("budget", "offline", "cache"):  # they decide whether a plan is made, not what it says
        options.pop(spoken)
    digest = hashlib.sha256()
    facts = (
        ckaudit.__version__,
        sys.version,
        sys.platform,
        job.engine,
        job.release,
        sorted(versions.items()),
        options,
        job.index_only,
    )
    digest.update(encoded(facts))
    digest.update(encoded(sorted((name, hashlib.sha256(text).hexdigest()) for name, text in job.texts.items())))
    digest.update(encoded([(t.name, t.dtype, t.shape) for t in job.tensors]))
    for path in sorted(CODE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class PlanCache:
    """The plans under `folder`. A cache that cannot be read or written is an empty one: it never stops an audit."""

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        self._folder = home() / "plans" if folder is None else folder
        self._max_bytes = max_bytes

    def get(self, name: str) -> Plan | None:
        """The plan kept under `name`; None if there is none, or if it is not whole."""
        path = self._path(name)
        try:
            data = path.read_bytes()
            start = len(_MARK) + _DIGEST
            if data[: len(_MARK)] != _MARK or hashlib.sha256(data[start:]).digest() != data[len(_MARK) : start]:
                return None
            plan = msgspec.msgpack.decode(memoryview(data)[start:], type=Plan)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return None
        with suppress(OSError):
            os.utime(path)  # last used, for `_trim`
        return plan

    def put(self, name: str, plan: Plan) -> None:
        """Keep `plan`, unless a part of it was not judged or it is too big to leave room for others."""
        if not _whole(plan):
            return
        body = msgspec.msgpack.encode(plan)
        if len(body) > self._max_bytes // 4:
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=self._folder, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MARK + hashlib.sha256(body).digest() + body)
                os.replace(part, self._path(name))
            except BaseException:
                os.unlink(part)
                raise
            self._trim()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.plan"

    def _trim(self) -> None:
        kept = []
        for path in self._folder.iterdir():
            with suppress(OSError):  # another process trims too
                status = path.stat()
                kept.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= self._max_bytes:
                break
            with suppress(OSError):
                path.unlink()
            total -= size


def _whole(plan: Plan) -> bool:
    """Whether the checkpoint, its layouts and its draft model were judged, and the search for faults came to its end."""
    verdicts = [plan.verdict, *(row["verdict"] for row in plan.tp), *([plan.draft.verdict] if plan.draft else [])]
    return "not_judged" not in verdicts and all(one.topic != "faults" for one in plan.unjudged)
