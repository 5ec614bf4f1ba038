from .default_loader import DefaultModelLoader


def get_model_loader(load_config):
    return DefaultModelLoader(load_config)
