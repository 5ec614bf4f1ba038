"""The child process that loads: one job in on stdin, events out on a descriptor of its own.

Whatever happens here (a crash in a kernel, memory that runs out, a device that is lost) costs this process alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import msgspec

from ckaudit.errors import CkauditError, in_one_line, words_of
from ckaudit.materialize.circumstances import device_lost, out_of_memory, wants_device
from ckaudit.materialize.job import Event, LoadJob
from ckaudit.materialize.watch import Emit, Watch

_PR_SET_PDEATHSIG = 1
"""Source: Linux `include/uapi/linux/prctl.h`."""


def main() -> int:
    """Run the job on stdin. What every job needs is imported before there is one: the parent audits names meanwhile."""
    end_with_parent()
    emit = private_channel()
    with suppress(ImportError, OSError):  # told as a stage of the job
        import torch  # noqa: F401
        import transformers  # noqa: F401
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # no load after all
    run(msgspec.json.decode(line, type=LoadJob), emit)
    return 0


def run(job: LoadJob, emit: Callable[[Event], None]) -> None:
    """Load, look and run once; tell `emit` after every step what is known by then. Never raises: an error is an event."""
    watch = Watch(emit)
    section = _empty(job)
    told: dict[str, Any] = {}
    try:
        _steps(job, watch, section, told)
        section["status"] = "partial" if job.partial else "complete"
    except KeyboardInterrupt:
        section["status"] = "interrupted"
        told |= {"error": f"Interrupted in stage {watch.current!r}.", "blame": "environment"}
    except BaseException as error:  # noqa: BLE001  (told to the parent, which decides what it means)
        section["status"] = "failed"
        told |= _reason(error, watch.current)
    section["stages"] = {k: round(v, 4) for k, v in watch.seconds.items()}
    emit(Event(load=section, done=True, **told))


def _steps(job: LoadJob, watch: Watch, section: dict[str, Any], told: dict[str, Any]) -> None:
    if job.options.tp and "RANK" not in os.environ:
        raise CkauditError(
            "--tp needs several processes.", "Start it as `torchrun --nproc-per-node N -m ckaudit load TARGET --tp`."
        )
    with watch.stage("import"):
        import torch
        import transformers

        from ckaudit.materialize import diffusion, forward, loading
        from ckaudit.materialize.classes import pick
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    section["release"] = transformers.__version__
    device = _device(torch, job)
    _check_dtype(torch, job.options.dtype)
    latent = diffusion.applies(job.folder)
    with watch.stage("config"):
        cls, config = (diffusion.pick(job.folder), None) if latent else pick(job.folder, job.options)
    if latent:
        section |= {"engine": "diffusers", "release": version("diffusers")}
    needed = loading.expected_memory(job, config)
    section |= {
        "class": cls.__name__,
        "estimate": msgspec.to_builtins(needed),
        "device_name": _device_name(torch, device),
    }
    watch.emit(Event(load=section))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loaded = diffusion.load(job, cls, watch) if latent else loading.load(job, cls, config, needed, watch)
    section |= _measured(torch, device, loaded, watch)
    told["observed"] = loaded.observed
    watch.emit(Event(load=section, observed=loaded.observed))
    if job.options.forward:
        told["forward"] = forward.run(loaded.model, job, watch, lambda part: watch.emit(Event(forward=part)))


def _empty(job: LoadJob) -> dict[str, Any]:
    return {
        "status": "failed",
        "engine": "transformers",
        "release": None,
        "class": None,
        "device": job.options.device,
        "device_name": None,
        "devices": job.options.devices,
        "tp": job.processes,
        "dtype": None,
        "shards": len(job.files),
        "tensors": len(job.tensors),
        "bytes": 0,
        "seconds": None,
        "gb_per_s": None,
        "estimate": None,
        "steady_bytes": None,
        "peak_bytes": None,
        "stages": {},
        "missing": [],
        "unexpected": [],
        "mismatched": [],
        "error": None,
    }


def _measured(torch: Any, device: Any, loaded: Any, watch: Watch) -> dict[str, Any]:
    """What the load took. On a CPU the peak is that of the whole process, mapped files included."""
    seconds = sum(watch.seconds.get(stage, 0.0) for stage in ("plan", "load", "arrive"))
    size = loaded.layout.nbytes
    if device.type == "cuda":
        count = range(torch.cuda.device_count())
        steady = sum(torch.cuda.memory_allocated(i) for i in count)
        peak = sum(torch.cuda.max_memory_allocated(i) for i in count)
    else:
        from ckaudit.materialize.values import held_bytes

        steady, peak = held_bytes(loaded.model), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    info = loaded.info
    return {
        "dtype": str(getattr(loaded.model, "dtype", "")).removeprefix("torch."),
        "bytes": size,
        "seconds": round(seconds, 4),
        "gb_per_s": round(size / seconds / 1e9, 3) if seconds else None,
        "steady_bytes": steady,
        "peak_bytes": peak,
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(str(entry[0]) for entry in info["mismatched_keys"]),
    }


def _device(torch: Any, job: LoadJob) -> Any:
    """The device of the job. Raises CkauditError where it is not there."""
    try:
        device = torch.device(job.options.device)
    except RuntimeError as error:
        raise CkauditError(f"No device is called {job.options.device!r}.", "Use cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise CkauditError(
            f"A load on the device {job.options.device!r} is not known here.", "Use cpu, cuda or cuda:N."
        )
    if device.type == "cpu" and job.options.devices > 1:
        raise CkauditError(f"{job.options.devices} devices asked for, and the device is the CPU.", "Add --device cuda.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if job.options.tp else 1
        wanted = max(job.options.devices, here, (device.index or 0) + 1)
        if count < wanted:
            raise CkauditError(
                f"{wanted} CUDA device{'' if wanted == 1 else 's'} asked for, torch {torch.__version__} sees {count}.",
                f"Ask for at most {count}, or use --device cpu." if count else "Use --device cpu.",
            )
        if device.index is None:
            device = torch.device(
                "cuda", int(os.environ.get("LOCAL_RANK", "0")) if job.options.tp else torch.cuda.current_device()
            )
    return device


def _check_dtype(torch: Any, name: str | None) -> None:
    """Raise CkauditError where a model cannot be made in this dtype: that is no fault of the checkpoint."""
    dtype = getattr(torch, name or "float32", None) if name != "auto" else torch.float32
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise CkauditError(f"A model cannot be loaded as {name!r}.", "Use float32, bfloat16 or float16.")


def _device_name(torch: Any, device: Any) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


def _reason(error: BaseException, stage: str) -> dict[str, str]:
    """How an exception is told: whose matter it is, and one line."""
    line = in_one_line(error, 2000)
    if isinstance(error, CkauditError):
        return {"error": error.message, "hint": error.hint, "blame": "environment"}
    if out_of_memory(error):
        hint = "Free memory, spread the model with --devices N, or use --device cpu."
        return {"error": f"Out of memory in stage {stage!r}: {words_of(error)}", "hint": hint, "blame": "environment"}
    if device_lost(error):
        return {
            "error": f"The device was lost in stage {stage!r}: {words_of(error)}",
            "hint": "See its driver's log.",
            "blame": "environment",
        }
    if wants_device(error):
        return {
            "error": f"Stage {stage!r} ended: {line}",
            "hint": "Load it where such a device is.",
            "blame": "environment",
        }
    if isinstance(error, ImportError | OSError | SystemExit):
        return {"error": f"Stage {stage!r} ended: {line}", "hint": "", "blame": "environment"}
    if "attn_implementation" in str(error):  # transformers names its own argument, which --attention fills
        return {
            "error": f"This attention is refused: {words_of(error)}",
            "hint": "Use --attention eager.",
            "blame": "environment",
        }
    if stage in ("load", "arrive"):
        return {"error": line, "hint": "", "blame": "checkpoint"}
    return {"error": f"Stage {stage!r} broke down: {line}", "hint": "", "blame": "environment"}


def end_with_parent() -> None:
    """Have this process killed when the one that started it is gone, whatever ended that: nobody would hear it, or end it. Linux alone."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def private_channel() -> Emit:
    """Where a child tells its parent. Events go where stdout went; whatever else is printed in this process goes to stderr."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            channel.write(msgspec.json.encode(event) + b"\n")
            channel.flush()

    return emit


if __name__ == "__main__":
    raise SystemExit(main())
