import json
import types
from pathlib import Path

import torch

from vllm.entrypoints.openai import server  # noqa: F401  (serving: not needed to load)


class EngineArgs:
    def __init__(self, model, **options):
        self.model, self.options = model, options

    def create_engine_config(self):
        hf = json.loads((Path(self.model) / "config.json").read_text())
        tp = self.options.get("tensor_parallel_size", 1)
        if hf["heads"] % tp:
            raise ValueError(
                f"Total number of attention heads ({hf['heads']}) must be divisible by tensor parallel size ({tp})."
            )
        model = types.SimpleNamespace(
            model=self.model, hf_config=hf, dtype=torch.bfloat16, quantization=hf.get("quantization")
        )
        return types.SimpleNamespace(model_config=model, load_config=types.SimpleNamespace(), options=self.options)
