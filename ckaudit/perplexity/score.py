"""Score rows with a model on this machine, through transformers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckaudit.errors import EngineError, words_of
from ckaudit.perplexity.encode import Encoded, Encoder
from ckaudit.scores import RowScore, Settings, ids_hash


def load_model(folder: Path, settings: Settings) -> Any:
    """The model of the repo in `folder`, ready to score. Raises EngineError, in the loader's own words, when it does not load."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # its bars would run into ours
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    classes = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    automatic = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
    classes += [a for a in automatic if type(config) in a._model_mapping or settings.trust_remote_code]
    if settings.dtype != "auto" and not isinstance(getattr(torch, settings.dtype, None), torch.dtype):
        raise EngineError(f"No dtype is called {settings.dtype!r}.", "Use auto, float32, bfloat16 or float16.")
    options: dict[str, Any] = {"dtype": settings.dtype, "attn_implementation": settings.attention}
    if settings.trust_remote_code:
        options["trust_remote_code"] = True
    cls = next((c for c in classes if c is not None), None)
    if cls is None:
        raise EngineError(
            f"transformers has no language model for the config of {folder.name}.", "Perplexity needs one."
        )
    try:
        model = cls.from_pretrained(folder, **options).to(settings.device)
    except (ValueError, RuntimeError, ImportError, OSError, AssertionError) as error:  # the last: torch without CUDA
        raise EngineError(
            f"The model in {folder.name} does not load: {words_of(error)}", "Run `ckaudit load` first."
        ) from error
    return model.eval()


def score_rows(model: Any, encoder: Encoder, rows: list[Encoded], settings: Settings) -> Iterator[RowScore]:
    """The score of each row, in order. One forward pass a batch, no gradients, log-softmax in float32."""
    import torch

    keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    for batch in batches(rows, settings.batch):
        inputs = encoder.inputs(batch).to(settings.device)
        first = min(row.start for row in batch) - 1  # the logit at position i predicts token i + 1
        length = inputs["input_ids"].shape[1]
        wanted = {"logits_to_keep": length - first} if keep else {}
        with torch.inference_mode():
            logits = model(**inputs, **wanted).logits
        logits = logits[:, -(length - first) :]
        for row, own in zip(batch, logits, strict=True):
            ids = torch.tensor(row.scored, device=own.device)
            part = own[row.start - 1 - first : row.start - 1 - first + len(ids)].float()
            nll = torch.nn.functional.cross_entropy(part, ids, reduction="sum").item()
            yield RowScore(row.row.id, nll if math.isfinite(nll) else None, len(ids), ids_hash(row.ids))


def batches(rows: list[Encoded], size: int) -> Iterator[list[Encoded]]:
    """Runs of at most `size` neighbours that a processor takes together: texts, conversations with pictures, or without."""
    run: list[Encoded] = []
    for row in rows:
        if run and (len(run) == size or _sort(run[-1]) != _sort(row)):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _sort(row: Encoded) -> tuple[bool, bool]:
    return row.row.text is None, bool(row.row.images)
