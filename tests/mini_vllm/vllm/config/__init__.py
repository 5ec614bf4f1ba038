from contextlib import contextmanager


@contextmanager
def set_current_vllm_config(config):
    yield config
