import enum
from typing import NamedTuple


class CpuArchEnum(enum.Enum):
    X86 = "x86"
    ARM = "arm"


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class Platform:
    @classmethod
    def get_cpu_architecture(cls):
        raise AssertionError("a replay must not ask what machine this is")
