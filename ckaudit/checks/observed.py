"""What a load saw: statistics of every tensor, and what they say together. Types, and which tensors count as weight matrices."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

import msgspec


class TensorStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass over a tensor's elements found. `low`, `high`, `mean` and `std` are over finite elements."""

    name: str
    dtype: str
    """A safetensors dtype name. Packed elements (F4) are decoded; scales that belong to them are tensors of their own."""
    shape: tuple[int, ...]
    count: int
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    std: float = 0.0
    kurtosis: float | None = None
    """The 4th standardised moment (3 for a normal distribution); None where it says nothing."""
    kurtosis_count: int = 0
    """Elements that it was taken over: all that are finite, or the first of a large tensor on a GPU."""
    digest: int = 0
    """Equal for equal bytes; different bytes rarely share it."""

    @property
    def absmax(self) -> float:
        """The largest magnitude of a finite element."""
        return max(abs(self.low), abs(self.high))

    @property
    def all_zero(self) -> bool:
        """Whether every element is zero."""
        return self.count > 0 and self.zeros == self.count

    @property
    def constant(self) -> bool:
        """Whether every element has one value."""
        return self.count > 1 and not self.nan and not self.inf and self.low == self.high


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What a load saw of a checkpoint and of the model made from it."""

    stats: tuple[TensorStats, ...]
    never_written: tuple[str, ...] = ()
    """Parameters that kept what the model was initialised with, none of them by design."""
    partial: bool = False
    """Whether only some shards were loaded: what has no tensor then says nothing."""
    initializer_range: float | None = None
    """The deviation that the config initialises weights with."""
    compared: bool = True
    """Whether the file's tensors were compared with each other: what follows says nothing where they were not."""
    equal: tuple[tuple[str, ...], ...] = ()
    """Groups of tensors whose bytes are the same, compared byte by byte."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of checkpoint tensors that the model holds as one parameter."""
    tie_differs: tuple[tuple[str, str], ...] = ()
    """Pairs that the config ties and the checkpoint stores with different values."""
    engine: str | None = None


# Buffers that a model computes, masks, and the decay of state space models, which starts alike in every layer: their values are not
# weights, and -Inf is what a mask is made of.
_BUFFER = re.compile(
    r"(^|_)(masked_bias|mask|position_ids|inv_freq|rotary|freqs|cos|sin|index|running_mean|running_var|num_batches_tracked|mel_filters"
    r"|window|g_idx|A_log|integer)(_|$)"
)
# A norm of each head has a row for each (Cohere). `norm1.linear.weight` is a matrix that makes a norm's weights.
_NORM = re.compile(r"norm[0-9]*\.weight$", re.IGNORECASE)
# What goes with a quantised weight: a zero point of zero, a scale that is one number, are normal.
_COMPANION = re.compile(r"(scales?|scale_inv|zeros|zero_point|zp|absmax|amax|quant_map|_shape|bias)$")

# A number that a quantised weight is multiplied with, or divided by, to be itself again: GPTQ and AWQ `scales`, FP8 `weight_scale_inv`,
# ModelOpt `weight_scale_2`, compressed-tensors `weight_global_scale`, ComfyUI `scale_weight`, bitsandbytes `absmax` and `SCB`.
_SCALE = re.compile(r"(^|_)(q?scales?(_inv|_\d+|_weight)?|absmax|SCB)$")
# Scales of activations, which leave the weight what it is: engines that quantise as they run pass over them, those of experts that no
# text of the calibration reached may be zero, and a `logit_scale` is an exponent. Of an `absmax` that is quantised itself (bitsandbytes)
# the codes and the `nested_absmax` count from an offset.
_OTHER_SCALE = re.compile(
    r"(^|_)(input|output|in|out|x|act|activations?|[kqvp]|kv|prob|softmax|logit|layer|nested)(_global)?_(q?scale|absmax)"
)
_QUANTISED = frozenset({
    "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4", "I8", "U8", "I16", "U16", "I32", "U32",
})  # fmt: skip
"""What quantised weights are packed in."""


def weight_scales(stats: Iterable[TensorStats]) -> list[TensorStats]:
    """The scales of quantised weights: such by their name, in the module of a packed tensor or below that tensor itself (bitsandbytes)."""
    quantised: set[str] = set()
    scales: list[TensorStats] = []
    for tensor in stats:
        module, _, own = tensor.name.rpartition(".")
        if _SCALE.search(own):
            codes = tensor.dtype in _QUANTISED and own.endswith("absmax")
            scales += [] if codes or _OTHER_SCALE.search(own) else [tensor]
        elif tensor.dtype in _QUANTISED and tensor.count > 1 and not is_buffer(tensor.name):
            quantised |= {module, tensor.name}
    return [s for s in scales if s.name.rpartition(".")[0] in quantised]


def is_matrix(tensor: TensorStats) -> bool:
    """Whether a tensor is a weight matrix: two dimensions of more than one element, and no norm, bias, scale, mask nor buffer."""
    if is_buffer(tensor.name) or _COMPANION.search(tensor.name) or _NORM.search(tensor.name):
        return False
    return sum(d > 1 for d in tensor.shape) >= 2


@lru_cache(maxsize=1 << 16)
def is_buffer(name: str) -> bool:
    """Whether the last part of a name says that the model computes it."""
    return _BUFFER.search(name.rpartition(".")[2]) is not None


def candidates(stats: Iterable[TensorStats]) -> list[list[TensorStats]]:
    """Groups of weight matrices that may hold the same bytes: to be compared byte by byte."""
    groups: dict[tuple[str, tuple[int, ...], int], list[TensorStats]] = defaultdict(list)
    for tensor in stats:
        groups[tensor.dtype, tensor.shape, tensor.digest].append(tensor)
    alike = ([t for t in group if is_matrix(t) and not t.constant] for group in groups.values() if len(group) > 1)
    return [group for group in alike if len(group) > 1]
