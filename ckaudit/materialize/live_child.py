"""The child process in which vLLM itself loads a checkpoint and makes one token."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import msgspec

from ckaudit.errors import in_one_line
from ckaudit.materialize.child import end_with_parent, private_channel
from ckaudit.materialize.job import Event
from ckaudit.materialize.live import LiveJob
from ckaudit.materialize.watch import Emit

_TOP = 5


def main() -> int:
    """Run the job on stdin."""
    end_with_parent()
    emit = private_channel()
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=LiveJob)
    told: dict[str, Any] = {}
    try:
        _steps(job, emit, told)
        told["status"] = "complete"
    except ImportError as error:
        told |= {"status": "not_judged", "error": f"vLLM cannot be imported: {error}"}
    except KeyboardInterrupt:
        told |= {"status": "not_judged", "error": "Interrupted."}
    except Exception as error:  # noqa: BLE001  (what the engine raises is its verdict)
        told |= _verdict(error)
    emit(Event(load={**told, "finished": True}, done=True))
    return 0


def _steps(job: LiveJob, emit: Emit, told: dict[str, Any]) -> None:
    emit(Event(stage="import vllm"))
    import vllm

    told["release"] = str(vllm.__version__)
    options = job.options
    arguments: dict[str, Any] = {
        "model": job.folder,
        "enforce_eager": True,  # one token needs no graphs
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
        "max_model_len": 4 * max(64, options.tokens),
        "max_num_seqs": 1,
        "seed": options.seed,
        "tensor_parallel_size": max(1, options.devices),
        "trust_remote_code": options.trust_remote_code,
    }
    if options.dtype is not None:
        arguments["dtype"] = options.dtype
    emit(Event(stage="vllm loads"))
    start = time.perf_counter()
    engine = vllm.LLM(**arguments)
    told["seconds"] = round(time.perf_counter() - start, 3)
    emit(Event(stage="vllm makes a token", load=told))
    draw = random.Random(options.seed)
    ids = [draw.randrange(job.vocab_size) for _ in range(max(64, options.tokens))]
    params = vllm.SamplingParams(max_tokens=1, temperature=0.0, logprobs=_TOP, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    told["token"] = int(answer.outputs[0].token_ids[0])


def _verdict(error: Exception) -> dict[str, Any]:
    """An error of the load, or one of the circumstances: no memory, no device, a library that is missing."""
    text = in_one_line(error, 1500)
    names = {cls.__name__ for cls in type(error).__mro__}
    circumstances = names & {"OutOfMemoryError", "MemoryError", "OSError", "ModuleNotFoundError"} or any(
        sign in text
        for sign in ("CUDA error", "Failed to infer device type", "No available memory", "less than desired GPU memory")
    )
    return {"status": "not_judged" if circumstances else "failed", "error": text}


if __name__ == "__main__":
    raise SystemExit(main())
