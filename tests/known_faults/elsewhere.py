"""What the headers of one checkpoint cannot tell, and what can."""

from __future__ import annotations

from tests.known_faults.cases import Elsewhere, Kind

VALUES = "the header is right; only values show it"

ELSEWHERE = (
    Elsewhere(Kind.HEADER, ("vllm-project/vllm/pull/53537", "atomantic/PortOS/issues/1324"),
              "Header and sizes are right, and the bytes are not those that were saved.",
              "an audit reads headers alone; it says so (a skip of CK501)",
              "`ckaudit names --verify-hash` (CK118), where the Hub knows the hash; `ckaudit load`, where it shows in the values"),
    Elsewhere(Kind.RUNTIME, ("vllm-project/vllm/issues/31273", "vllm-project/vllm/issues/31805", "vllm-project/vllm/pull/5714"),
              "Quantising while loading needs more memory at its peak than the model does later.",
              "the peak depends on the engine's own order of work", "`ckaudit load`, which estimates memory before it starts"),
    Elsewhere(Kind.RUNTIME, ("fla-org/flash-linear-attention/pull/754",),
              "A hook takes the logarithm of a tensor that was loaded already.", VALUES, "`ckaudit load` (CK603)"),
    Elsewhere(Kind.RUNTIME, ("huggingface/transformers/issues/48892", "huggingface/transformers/pull/45050"),
              "Buffers that are not stored come from memory that nobody wrote.", VALUES, "`ckaudit load` (CK505, CK603)"),
)  # fmt: skip
