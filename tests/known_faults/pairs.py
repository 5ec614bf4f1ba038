"""A saved checkpoint against its source."""

# ruff: noqa: E501  (a table: one report a row)

from __future__ import annotations

import re

from tests.known_faults.cases import ERROR, LLAMA, Fault, Kind, layers
from tests.test_diff import report
from tests.toy import CONFIG, Entries

BERT: Entries = {
    f"bert.encoder.layer.{i}.{n}": ("F32", s)
    for i in range(3)
    for n, s in (("attention.self.query.weight", [8, 8]), ("output.LayerNorm.weight", [8]))
}
MODEL: Entries = {n: ("BF16", [8] if "norm" in n else [8, 8]) for n in LLAMA}
MTP: Entries = {
    f"mtp.{n}": ("BF16", [8, 8])
    for n in ("fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight")
}
ANNOUNCED = CONFIG | {"num_nextn_predict_layers": 1}
EXPERTS: Entries = {
    n: ("BF16", [6, 8]) for n in layers("model.layers.{i}.mlp.experts.{e}.{p}_proj.weight", e="01", p=("gate", "up"))
}
FUSED: Entries = {n: ("BF16", [2, 12, 8]) for n in layers("model.layers.{i}.mlp.experts.gate_up_proj")}


def moved(entries: Entries, pattern: str, new: str) -> Entries:
    return {re.sub(pattern, new, n): spec for n, spec in entries.items()}


def without(entries: Entries, pattern: str) -> Entries:
    return {n: spec for n, spec in entries.items() if not re.search(pattern, n)}


FAULTS = (
    Fault(Kind.PREFIX, ("huggingface/transformers/issues/29184",),
          "Two models of an architecture, one without the base prefix: one rename explains every difference.",
          lambda: report(BERT, moved(BERT, "^bert[.]", ""))),
    Fault(Kind.RENAMED, ("huggingface/transformers/pull/45358",),
          "Loading is fine, and a save writes other names than the file that was loaded had: a round trip has to change nothing.",
          lambda: report(MODEL, moved(MODEL, "^model[.]", "model.language_model."), roundtrip=True), (("CK805", ERROR, "checkpoint", 29),)),
    Fault(Kind.RENAMED, ("huggingface/transformers/pull/45256",),
          "A reload forgives `language_model.` three times over; the source's names do not.",
          lambda: report(moved(MODEL, "^model[.]", "model.language_model."), moved(MODEL, "^model[.]", "model.language_model.language_model.language_model."), roundtrip=True),
          (("CK805", ERROR, "checkpoint", 29),)),
    Fault(Kind.RENAMED, ("huggingface/transformers/issues/48805",),
          "Experts in memory are fused and on disk one by one.",
          lambda: report(FUSED, EXPERTS, roundtrip=True), (("CK805", ERROR, "checkpoint", 12),)),
    Fault(Kind.DRAFT, ("intel/auto-round/pull/1526", "ISEEKYAN/mbridge/pull/119", "NVIDIA/Model-Optimizer/pull/860"),
          "A quantiser leaves out the draft block, which was not in its module graph.",
          lambda: report({**MODEL, **MTP}, MODEL, ANNOUNCED, ANNOUNCED), (("CK801", ERROR, "checkpoint", 3),)),
    Fault(Kind.INDEX, ("areal-project/AReaL/pull/1403",),
          "Against the source: the layers and the head that went with their shards.",
          lambda: report(MODEL, without(MODEL, r"layers\.2|lm_head"), CONFIG | {"tie_word_embeddings": False}, CONFIG | {"tie_word_embeddings": False}),
          (("CK801", ERROR, "checkpoint", 10),)),
)  # fmt: skip
