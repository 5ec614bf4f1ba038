import vllm._C_stable_libtorch  # noqa: F401  (compiled, so not among the Python files)

from .interface import Platform


class CudaPlatformBase(Platform):
    device_type = "cuda"

    @classmethod
    def get_device_capability(cls, device_id=0):
        raise NotImplementedError
