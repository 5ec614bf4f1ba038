def initialize_model(vllm_config):
    from vllm.model_executor.models.registry import MODELS

    return MODELS[vllm_config.model_config.hf_config["architectures"][0]](vllm_config.model_config.hf_config)
