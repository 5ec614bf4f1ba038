"""Runs in the worker: one Job through the real `from_pretrained` of the installed transformers, on tensors without data.

The public call is used, not its inner steps: it is the documented one, it keeps the loader's own order of quantiser, class, conversion and
tying, and it raises what a user's load would raise. Observers (`observe`) see what it does not tell. It runs with the defaults of a plain
`from_pretrained`, so a shape mismatch raises as it would for the user, after every tensor has been looked at.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

from ckaudit.engines import Job, ReadTensor
from ckaudit.errors import in_one_line, is_own_slip
from ckaudit.plan import Failure, NameFate, Plan

_MAX_STOPS = 16
"""How often a load that stops is begun again without what it stopped at; the budget of time is the other limit."""

# What a header cannot hold and the loader wanted, in the words of torch.
_NO_DATA = ("meta tensor", "meta device", "on meta", "Meta tensors", "aten::_local_scalar_dense", "device meta")


def run(job: Job, read: ReadTensor) -> Plan:  # noqa: ARG001  (no operation of transformers 5 reads a tensor small enough to ask for)
    """What the installed transformers does with the checkpoint of `job`."""
    warnings.simplefilter("ignore")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = (
        "1"  # no data, so nothing to wait for: 45,000 futures cost more than the load
    )
    with tempfile.TemporaryDirectory(prefix="ckaudit-config-") as folder:
        os.environ.setdefault("HF_MODULES_CACHE", os.path.join(tempfile.gettempdir(), "ckaudit-modules"))
        try:
            import torch
            import transformers
        except Exception as error:  # noqa: BLE001  (a broken installation is the environment's, however it breaks)
            return _plan(not_judged=f"torch or transformers cannot be imported ({in_one_line(error)})")
        environment = {
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "accelerate": importlib.metadata.version("accelerate"),
            "platform": "cuda sm90 (pretended)" if job.options.device == "cuda" else "cpu",
        }
        plan = _load(job, Path(folder))
    return _with(plan, environment)


def _with(plan: Plan, environment: dict[str, str]) -> Plan:
    import msgspec

    return msgspec.structs.replace(plan, release=environment["transformers"], environment=environment)


def _plan(**fields: Any) -> Plan:
    return Plan(id="transformers", engine="transformers", release=None, method="live", **fields)


def _load(job: Job, folder: Path) -> Plan:
    from ckaudit.engines.transformers.classes import NotForUs, choose, lay_out

    lay_out(job.texts, folder, code=job.options.trust_remote_code)
    try:
        chosen = choose(job, folder)
    except NotForUs as reason:
        return _plan(not_judged=str(reason))
    except Exception as error:
        if is_own_slip(error):
            raise
        return _refused(job, error, None)
    if not job.tensors:
        return _plan(not_judged="not one tensor could be read from the checkpoint")
    return _tell(job, chosen)


def _tell(job: Job, chosen: Any) -> Plan:
    """Load, and where the loader stops in the middle, set aside what it stopped at and load the rest: one audit tells of every fault."""
    from ckaudit.engines.transformers import fates
    from ckaudit.engines.transformers.classes import NotForUs
    from ckaudit.engines.transformers.observe import Record, watch
    from ckaudit.engines.transformers.shortcuts import shortcuts
    from ckaudit.engines.transformers.tensors import Fed

    aside: dict[str, NameFate] = {}
    stops: list[tuple[Exception, Failure]] = []
    while True:
        record = Record(Fed(spec for spec in job.tensors if spec.name not in aside))
        failure: Exception | None = None
        try:
            with watch(record), shortcuts(job.options.device):
                _from_pretrained(chosen.cls, chosen.config, record.fed.state)
        except NotForUs as reason:
            return _plan(not_judged=str(reason))
        except Exception as error:
            if is_own_slip(error):
                raise
            failure = error
            if record.stage == "construct":
                return _refused(job, error, chosen.cls.__name__)
            if record.stage == "convert" and _wanted_data(str(error)):
                wanted = f"the loader reads values, not only shapes ({in_one_line(error)})"
                return _plan(architecture=chosen.cls.__name__, not_judged=wanted)
        view = fates.View(record)
        stop = view.stop(failure)
        if failure is None or stop is None or not stop.names or len(stops) == _MAX_STOPS:
            return fates.tell(job, chosen, view, failure, stops, aside)
        stops.append((failure, stop))
        aside |= {name: view.fate(name) for name in stop.names}


def _from_pretrained(cls: Any, config: Any, state: dict[str, Any]) -> None:
    import torch

    cls.from_pretrained(
        None, config=config, state_dict=state, device_map={"": torch.device("meta")}, output_loading_info=True
    )


def _refused(job: Job, error: Exception, architecture: str | None) -> Plan:
    """The plan of a load that ended before the first weight.

    A package, a file or an accelerator that is missing, and code of the repo that does not run here, are the environment's. What is left,
    a config that transformers' own classes refuse, raises in any environment: it fails, and no tensor is reached.
    """
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename.replace(os.sep, "/") for frame in frames]
    equipment = any(
        frame.name == "validate_environment" for frame in frames
    )  # a quantiser looks for its library and its GPU
    remote = any("transformers_modules" in name or "ckaudit-modules" in name for name in files)
    missing = isinstance(error, ImportError | OSError | MemoryError | NotImplementedError)
    if missing or equipment or remote or _wanted_data(str(error)):
        where = "the repo's own code does not run here" if remote else "the environment does not allow this load"
        return _plan(architecture=architecture, not_judged=f"{where} ({in_one_line(error)})")
    return _plan(
        architecture=architecture,
        error=in_one_line(error),
        failures=(Failure(message=in_one_line(error)),),
        names=tuple(NameFate(name=spec.name, fate="not_reached", read=0.0) for spec in job.tensors),
    )


def _wanted_data(text: str) -> bool:
    return any(sign in text for sign in _NO_DATA)
