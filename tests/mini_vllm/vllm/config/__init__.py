from contextlib import contextmanager

CURRENT = []


@contextmanager
def set_current_vllm_config(config):
    CURRENT.append(config)
    try:
        yield config
    finally:
        CURRENT.pop()
