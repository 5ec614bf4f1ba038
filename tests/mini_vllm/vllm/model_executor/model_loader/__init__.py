from .default_loader import DefaultModelLoader, DummyModelLoader


def get_model_loader(load_config):
    return (DummyModelLoader if load_config.load_format == "dummy" else DefaultModelLoader)(load_config)
