"""CK117: small files that from_pretrained reads beside the config, and stops at.

Facts, each run against the released code: transformers 5.24.0, `generation/utils.py` (a generation_config.json that is not JSON is passed
over, one that is JSON and no object raises) and `integrations/peft.py` (with PEFT installed an adapter_config.json is followed).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from ckaudit.checkpoint import Checkpoint
from ckaudit.findings import Check, Finding, finding
from ckaudit.naming import printable

SETTINGS = Check("CK117", "settings file that stops the loader", "error")
CHECKS = (SETTINGS,)

_GENERATES = re.compile(
    r"(CausalLM|LMHeadModel|ForConditionalGeneration|Seq2Seq|Vision2Seq|ImageTextToText|TextToSpeech)$"
)
"""Ends of the names of classes that read generation_config.json."""


def run(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What is wrong with the settings beside config.json. Of an adapter's own configuration its own checks tell."""
    yield from _generation(checkpoint)
    yield from _adapter(checkpoint)


def _generation(checkpoint: Checkpoint) -> Iterator[Finding]:
    path = "generation_config.json"
    text = checkpoint.texts.get(path)
    if text is None or not any(map(_GENERATES.search, checkpoint.architectures)):
        return
    found, value = _json(text)
    if found is not None:
        yield finding(
            SETTINGS, f"{path} cannot be parsed ({found}): transformers passes over it, and what it was to set is as if not there.", [path],
            severity="warning", blame="config", wanted="JSON", found=found, mend="Restore it from the model's source, or remove it.",
        )  # fmt: skip
    elif not isinstance(value, dict):
        what = f"a {type(value).__name__}" if value is not None else "null"
        yield finding(
            SETTINGS, f"{path} is {what} and no object: transformers raises a TypeError when it has loaded the weights.", [path],
            blame="config", wanted="a JSON object", found=what, mend="Restore it from the model's source, or remove it.",
        )  # fmt: skip


def _adapter(checkpoint: Checkpoint) -> Iterator[Finding]:
    """An adapter's configuration beside a whole model, which transformers follows where PEFT is installed."""
    path = "adapter_config.json"
    text = checkpoint.texts.get(path)
    if text is None or not checkpoint.tensors or checkpoint.config is None:
        return
    found, value = _json(text)
    if found is None and isinstance(value, dict):
        files = {p.removeprefix(checkpoint.folder) for p in checkpoint.files}
        if files & {"adapter_model.safetensors", "adapter_model.bin"}:
            return
        found = "no adapter's weights beside it"
    found = found or "no JSON object"
    installed = find_spec("peft") is not None
    yield finding(
        SETTINGS, f"{path} lies beside a whole model, with {found}: where PEFT is installed transformers looks for that adapter and raises"
        + ("." if installed else "; here it is not, and nothing happens."), [path], severity="error" if installed else "warning",
        blame="config", wanted="no such file beside a merged model", found=found, mend=f"Remove {path}, if the adapter is merged.",
    )  # fmt: skip


def _json(text: bytes) -> tuple[str | None, Any]:
    """(what is wrong, the value): as Python's json reads it, NaN included."""
    try:
        return None, json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return printable(str(error)[:120]) or "no JSON", None
