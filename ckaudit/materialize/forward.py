"""One forward pass for each kind of input the model takes, and what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ckaudit.errors import in_one_line
from ckaudit.materialize import diffusion, processed
from ckaudit.materialize.circumstances import device_lost, no_kernel, out_of_memory
from ckaudit.materialize.diffusion import LatentRecipes
from ckaudit.materialize.job import LoadJob
from ckaudit.materialize.media import Tensors, parameters
from ckaudit.materialize.probe import Probe, tensors_in
from ckaudit.materialize.recipes import Recipes, accepted, known, lacking, place
from ckaudit.materialize.watch import Watch

TOP = 5
"""Entries of a fingerprint."""
_PROCESSOR = "processor"
_TEXT_KEYS = ("input_ids", "attention_mask", "decoder_input_ids")


def run(model: Any, job: LoadJob, watch: Watch, told: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The `forward` section. `told` gets it after every pass, so that a crash in one does not take the others with it."""
    options = job.options
    recipes: Recipes | LatentRecipes
    if diffusion.applies(job.folder):
        recipes = diffusion.LatentRecipes(model, options.seed)
    else:
        recipes = Recipes(model, max(options.tokens, 64), options.seed)
    section: dict[str, Any] = {
        "status": "complete",
        "attention": options.attention,
        "seed": options.seed,
        "tokens": max(options.tokens, 64),
        "runs": [],
        "left_out_by_template": [],
        "expect": None,
    }
    kinds = [k for k in recipes.kinds() if not options.modalities or k in options.modalities]
    for kind in kinds:
        with watch.stage(f"forward {kind}"):
            section["runs"].append(_one(model, job, kind, recipes))
        told(section)
    if processed.has_processor(job.folder):
        section["left_out_by_template"] = processed.left_out(
            job.folder, kinds, trust_remote_code=options.trust_remote_code
        )
    for kind in options.modalities:
        if kind not in kinds:
            section["runs"].append(_not_run(kind, "the model takes no such input"))
    if not section["runs"]:
        section["runs"].append(_not_run("text", f"{type(model).__name__} takes no input that ckaudit can make"))
    return section


def _one(model: Any, job: LoadJob, kind: str, recipes: Recipes | LatentRecipes) -> dict[str, Any]:
    """One pass. The first way of making an input that the model accepts, and looks at, is the one that counts.

    What the repo's own processor makes is what users will send: that the model ignores or refuses it is told, also where another way works.
    """
    failures: dict[str, str] = {}
    """By way: why it made no input, or what the model raised on it."""
    ignored: list[str] = []
    refused: list[str] = []
    for origin, make in _ways(job, kind, recipes):
        torch.manual_seed(job.options.seed)
        made = False
        inputs: Tensors = {}
        try:
            inputs = place(accepted(make(), model), model)
            made = True
            if kind == "text":
                known(inputs, model)
            done = _pass(model, kind, origin, inputs)
        except Exception as error:  # a processor that cannot, an input that the model does not take, or a fault of it
            if out_of_memory(error) or device_lost(error):
                raise
            failures.setdefault(origin, in_one_line(error))
            if (
                made
                and not no_kernel(error)
                and origin not in refused
                and not ((origin == "config" or kind == "text") and lacking(error, inputs, model))
            ):
                refused.append(origin)
                failures[origin] = in_one_line(error)  # not what it said for want of something
            continue
        if done["status"] == "ran":
            reason = f"{_PROCESSOR}: {failures[_PROCESSOR]}" if _PROCESSOR in failures else None
            return done | {"ignored_from": ignored, "raised_from": refused, "reason": reason}
        ignored.append(origin)
    tried = {"ignored_from": ignored, "raised_from": refused}
    if ignored:
        # Where the config has no placeholder and the repo no processor, nobody says how such an input has to look.
        judged = _PROCESSOR in ignored or not isinstance(recipes, Recipes) or recipes.marks(kind)
        status = "ignored" if judged else "not_run"
        return _not_run(kind, f"no part of the model looked at the {kind} input") | {"status": status} | tried
    theirs = _PROCESSOR if _PROCESSOR in refused else "config" if refused and kind in ("text", "latent") else None
    if theirs is not None:
        return _not_run(kind, failures[theirs]) | {"status": "raised"} | tried
    told = "; ".join(f"{origin}: {line}" for origin, line in failures.items())
    return _not_run(kind, told or "no way to make such an input") | tried


def _ways(job: LoadJob, kind: str, recipes: Recipes | LatentRecipes) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    options = job.options
    if kind != "latent" and processed.has_processor(job.folder):
        length = max(options.tokens, 64)
        assert isinstance(recipes, Recipes)
        yield (
            _PROCESSOR,
            lambda: recipes.complete(
                processed.make(
                    job.folder,
                    kind,
                    length,
                    options.seed,
                    trust_remote_code=options.trust_remote_code,
                    room=recipes.room,
                    marks=recipes.marks(kind),
                    frames=0 if recipes.marks(kind) else recipes.frames,
                )
            ),
        )
    for make in recipes.candidates(kind):
        yield "config", make


def _pass(model: Any, kind: str, origin: str, inputs: Tensors) -> dict[str, Any]:
    device = next((t.device for t in inputs.values() if isinstance(t, torch.Tensor)), torch.device("cpu"))
    cuda = device.type == "cuda"
    probe = Probe()
    extra = {"use_cache": False} if _has(model, "use_cache") else {}
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    with torch.inference_mode(), probe.on(model):
        output = model(**inputs, **extra)
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    if kind != "text" and not _looked(model, inputs, probe, extra):
        return {"status": "ignored"}
    shapes, finite = outputs(output, masked=probe.first() is None)
    culprit = probe.first(nan=finite)
    return {
        "kind": kind,
        "status": "ran",
        "inputs_from": origin,
        "ignored_from": [],
        "raised_from": [],
        "inputs": {k: list(v.shape) for k, v in inputs.items() if isinstance(v, torch.Tensor)},
        "outputs": shapes,
        "finite": finite,
        "first_non_finite": None if culprit is None else _told_of(culprit),
        "seconds": round(seconds, 4),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "fingerprint": _fingerprint(output),
        "reason": None,
    }


def _looked(model: Any, inputs: Tensors, probe: Probe, extra: dict[str, Any]) -> bool:
    """Whether pixels or sound were looked at: modules ran that the text alone does not need. True where there is no text to compare."""
    text = {k: v for k, v in inputs.items() if k in _TEXT_KEYS}
    if "input_ids" not in text:
        return True
    plain = Probe()
    try:
        with torch.inference_mode(), plain.on(model):
            model(**text, **extra)
    except Exception as error:  # placeholders without what they stand for, or a model that needs both
        if out_of_memory(error) or device_lost(error):
            raise
        return True
    return bool(probe.ran - plain.ran)


def _told_of(culprit: Any) -> dict[str, Any]:
    return {"module": culprit.module, "class": culprit.kind, "nan": culprit.nan, "inf": culprit.inf}


def outputs(output: Any, *, masked: bool) -> tuple[dict[str, list[int]], bool]:
    """Shapes of the output's tensors by name, and whether all of them are finite. `masked`: -Inf is a mask, where not all is."""
    named = dict(output) if isinstance(output, dict) else {"output": output}
    shapes: dict[str, list[int]] = {}
    finite = True
    for name, value in named.items():
        found = list(tensors_in(value))
        for number, tensor in enumerate(found):
            shapes[name if len(found) == 1 else f"{name}.{number}"] = list(tensor.shape)
            if tensor.is_floating_point():
                tensor = tensor.float() if tensor.itemsize == 1 else tensor
                fine = torch.isfinite(tensor)
                whole = bool((fine | torch.isneginf(tensor)).all().item()) and bool(fine.any().item())
                finite = finite and (bool(fine.all().item()) or (masked and whole))
    return shapes, finite


def _fingerprint(output: Any) -> dict[str, Any] | None:
    """The largest entries of the last position of the logits (or of what the model gives instead), which say what it computes."""
    named = dict(output) if isinstance(output, dict) else {"output": output}
    for name in ("logits", "logits_per_image", "last_hidden_state", "pooler_output", *named):
        tensor = next(iter(tensors_in(named.get(name))), None)
        if tensor is not None and tensor.is_floating_point() and tensor.numel():
            last = tensor.float().reshape(-1, tensor.shape[-1])[-1] if tensor.dim() else tensor.float().reshape(1)
            every = tensor.float().flatten() if tensor.dim() > 3 else tensor.float()  # a row of a map may be one colour
            values, ids = torch.topk(last, min(TOP, last.numel()))
            # NaN is not JSON.
            logits = [v if v == v and abs(v) != float("inf") else None for v in values.tolist()]
            spread = (every.amax(-1) - every.amin(-1)).max()
            return {
                "of": name,
                "ids": ids.tolist(),
                "logits": logits,
                "flat": bool((spread == 0).item()) and last.numel() > 1,
            }
    return None


def _not_run(kind: str, reason: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "status": "not_run",
        "inputs_from": None,
        "ignored_from": [],
        "raised_from": [],
        "inputs": {},
        "outputs": {},
        "finite": None,
        "first_non_finite": None,
        "seconds": None,
        "peak_bytes": None,
        "fingerprint": None,
        "reason": reason,
    }


def _has(model: Any, parameter: str) -> bool:
    return parameter in parameters(model.forward)
