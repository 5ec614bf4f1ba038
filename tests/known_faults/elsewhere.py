"""What the headers of one checkpoint cannot tell, and what can."""

# ruff: noqa: E501  (a table: one report a row)

from __future__ import annotations

from tests.known_faults.cases import Elsewhere, Kind

ADAPTER = "an adapter is judged against its base, not by itself"
PAIR = "the file is sound by itself; only its source shows the difference"
VALUES = "the header is right; only values show it"

ELSEWHERE = (
    Elsewhere(Kind.ADAPTER, ("vllm-project/vllm/issues/34186", "vllm-project/vllm/pull/34803"),
              "An adapter of the text class binds to nothing in the multimodal class, since only the last segment of its names is compared.", ADAPTER, "the audit of an adapter"),
    Elsewhere(Kind.ADAPTER, ("vllm-project/vllm/issues/48019", "vllm-project/vllm/pull/39369", "vllm-project/vllm/pull/48022", "vllm-project/vllm/pull/48149", "vllm-project/vllm/pull/39278"),
              "A text adapter for a wrapped language model loads without an error and without one active module.", ADAPTER, "the audit of an adapter"),
    Elsewhere(Kind.ADAPTER, ("vllm-project/vllm/pull/41384", "sgl-project/sglang/pull/27381", "sgl-project/sglang/pull/25528", "vllm-project/vllm/pull/52194"),
              "Adapters on fused experts use keys that engines drop.", ADAPTER, "the audit of an adapter"),
    Elsewhere(Kind.ADAPTER, ("huggingface/peft/issues/2566", "huggingface/peft/issues/2699"),
              "The adapter's names are those of another class of the model: a part of it binds.", ADAPTER, "the audit of an adapter"),
    Elsewhere(Kind.ADAPTER, ("huggingface/diffusers/pull/10187", "huggingface/diffusers/issues/11675"),
              "A wrong component prefix makes the adapter do nothing.", ADAPTER, "the audit of an adapter"),
    Elsewhere(Kind.ADAPTER, ("huggingface/diffusers/pull/5991",),
              "The component's prefix stands twice.", ADAPTER, "the audit of an adapter"),
    Elsewhere(Kind.ADAPTER, ("huggingface/peft/issues/3711",),
              "A target on the shared expert is rewritten as if it were a routed one.", "it happens to the adapter's settings inside PEFT, before any tensor is stored"),
    Elsewhere(Kind.ADAPTER, ("huggingface/peft/pull/3251",),
              "An adapter was saved as empty or flat shards.", ADAPTER, "the audit of an adapter"),
    Elsewhere(Kind.RENAMED, ("huggingface/transformers/pull/45358",),
              "Loading is fine, and a save writes another layout than the one that was loaded.", PAIR, "`ckaudit diff`"),
    Elsewhere(Kind.DRAFT, ("intel/auto-round/pull/1526", "ISEEKYAN/mbridge/pull/119", "NVIDIA/Model-Optimizer/pull/860"),
              "A quantiser leaves out the draft block, which was not in its module graph.",
              PAIR + "; where the config announces draft layers, CK219 notes that none is stored", "`ckaudit diff`"),
    Elsewhere(Kind.HEADER, ("vllm-project/vllm/pull/53537", "atomantic/PortOS/issues/1324"),
              "Header and sizes are right, and the bytes are not those that were saved.",
              "an audit reads headers alone; it says so (a skip of CK501)", "`ckaudit load`, where the damage shows in the values"),
    Elsewhere(Kind.RUNTIME, ("vllm-project/vllm/issues/31273", "vllm-project/vllm/issues/31805", "vllm-project/vllm/pull/5714"),
              "Quantising while loading needs more memory at its peak than the model does later.",
              "the peak depends on the engine's own order of work", "`ckaudit load`, which estimates memory before it starts"),
    Elsewhere(Kind.RUNTIME, ("fla-org/flash-linear-attention/pull/754",),
              "A hook takes the logarithm of a tensor that was loaded already.", VALUES, "`ckaudit load` (CK603)"),
    Elsewhere(Kind.RUNTIME, ("huggingface/transformers/issues/48892", "huggingface/transformers/pull/45050"),
              "Buffers that are not stored come from memory that nobody wrote.", VALUES, "`ckaudit load` (CK505, CK603)"),
)  # fmt: skip
