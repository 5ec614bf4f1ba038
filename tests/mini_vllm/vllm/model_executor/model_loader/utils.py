def initialize_model(vllm_config, model_config=None):
    from vllm.model_executor.models.registry import MODELS

    held = (model_config or vllm_config.model_config).hf_config
    return MODELS[held.architectures[0]](held)
