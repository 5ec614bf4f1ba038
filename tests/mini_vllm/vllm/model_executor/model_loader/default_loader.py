import glob
import os

from .weight_utils import fastsafetensors_weights_iterator, safetensors_weights_iterator


class DefaultModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config

    def load_weights(self, model, model_config):
        files = glob.glob(os.path.join(model_config.model, "consolidated*.safetensors"))
        files = files or glob.glob(os.path.join(model_config.model, "*.safetensors"))
        fast = self.load_config.load_format == "fastsafetensors"
        read = fastsafetensors_weights_iterator if fast else safetensors_weights_iterator
        loaded = model.load_weights(read(files, True))
        if model_config.quantization is None and loaded is not None:
            missing = {n for n, _ in model.named_parameters()} - loaded
            if missing:
                raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")


class DummyModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config

    def load_weights(self, model, model_config):
        for parameter in model.parameters():
            parameter.data.uniform_(-1e-3, 1e-3)
