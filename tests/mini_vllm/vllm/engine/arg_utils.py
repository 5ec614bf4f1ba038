import copy
import json
import types
from pathlib import Path

import torch

from vllm.config.speculative import SpeculativeConfig
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
        if self.options.get("pipeline_parallel_size", 1) > hf["layers"]:
            raise NotImplementedError("Pipeline parallelism is not supported for this model.")
        if self.options.get("enable_expert_parallel") and not hf.get("experts"):
            raise ValueError(
                "Number of experts in the model must be greater than 0 when expert parallelism is enabled."
            )
        hf = types.SimpleNamespace(**(hf | self.options.get("hf_overrides", {})))
        model = self._model(hf)
        speculative = None
        if "speculative_config" in self.options:
            draft = self._model(SpeculativeConfig.hf_config_override(copy.deepcopy(hf)))
            speculative = types.SimpleNamespace(draft_model_config=draft)
        return types.SimpleNamespace(
            model_config=model,
            load_config=types.SimpleNamespace(load_format=self.options.get("load_format", "auto")),
            parallel_config=types.SimpleNamespace(ep=self.options.get("enable_expert_parallel", False)),
            speculative_config=speculative,
        )

    def _model(self, hf):
        quantization = self.options.get("quantization") or getattr(hf, "quantization", None)
        return types.SimpleNamespace(model=self.model, hf_config=hf, dtype=torch.bfloat16, quantization=quantization)
