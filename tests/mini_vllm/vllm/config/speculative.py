class SpeculativeConfig:
    @staticmethod
    def hf_config_override(hf_config):
        if hf_config.architectures[0] == "MiniForCausalLM":
            hf_config.architectures = ["MiniMTPModel"]
        return hf_config
