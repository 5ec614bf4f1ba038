"""A stand-in for vLLM: the part of its public interface that `ckaudit load --engine vllm` uses, with a loader of a few lines.

It behaves as vLLM 0.29's does towards its caller (`vllm/entrypoints/llm.py`): keyword arguments, unknown ones refused, one answer a
prompt; what its loader raises comes out of `LLM(...)`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "0.29.0"


@dataclass
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 1.0
    logprobs: int | None = None
    detokenize: bool = True


@dataclass
class LLM:
    model: str
    enforce_eager: bool = False
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    seed: int = 0
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    dtype: str = "auto"
    vocabulary: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        print("INFO: the engine talks on stdout")
        config = json.loads(Path(self.model, "config.json").read_text())
        self.vocabulary = config["vocab_size"]
        if config.get("stand_in_raises"):
            raise {"key": KeyError, "memory": MemoryError, "value": ValueError}[config["stand_in_raises"]](
                "layers.0.q_proj.weight"
            )

    def generate(self, prompts: list[Any], sampling_params: SamplingParams, *, use_tqdm: bool = True) -> list[Any]:
        assert self.max_model_len is not None
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            assert 64 <= len(ids) < self.max_model_len
            assert max(ids) < self.vocabulary
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7][: sampling_params.max_tokens])]) for _ in prompts
        ]
