"""A decoder with fused q, k and v, and variants of it that load in ways that an observer must not misread."""

from typing import ClassVar

import torch
from scipy.optimize import missing_in_every_environment  # noqa: F401  (an import that loading does not need)
from torch import nn

from vllm.config import CURRENT
from vllm.distributed import WORLD
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import WeightsMapper

HIDDEN = 8


class Fused(nn.Module):
    """q, k and v in one parameter; this rank's share of the rows of each."""

    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.rows = hidden // WORLD["tp"]
        self.weight = nn.Parameter(torch.empty(3 * self.rows, hidden, device="cuda"), requires_grad=False)
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param, loaded_weight, loaded_shard_id=None):
        start = "qkv".index(loaded_shard_id) * self.rows
        target = param.data.narrow(0, start, self.rows)
        loaded_weight = loaded_weight.narrow(0, 0, self.rows)
        assert target.shape == loaded_weight.shape
        target.copy_(loaded_weight)


class Linear(nn.Module):
    def __init__(self, out, into):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into, device="cuda"), requires_grad=False)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.ops._C.some_kernel.default  # noqa: B018  (looked up by a constructor, never run)
        self.qkv_proj = Fused()
        self.o_proj = Linear(HIDDEN, HIDDEN)
        self.register_buffer("k_scale", torch.tensor(1.0))
        self.register_buffer("inv_freq", torch.arange(4.0, device="cuda"), persistent=False)


class MiniForCausalLM(nn.Module):
    mapper = WeightsMapper(
        orig_to_new_substr={".rotary_emb.inv_freq": None},
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".never": (".ever", 0),
        },
        orig_to_new_prefix={"model.": ""},
    )

    def __init__(self, config):
        super().__init__()
        self.config = config
        first, count = WORLD["pp_rank"], WORLD["pp"]
        self.embed = Linear(16, HIDDEN) if first == 0 else nn.Identity()
        stage = range(first * config.layers // count, (first + 1) * config.layers // count)
        self.layers = nn.ModuleList([Layer() if i in stage else nn.Identity() for i in range(config.layers)])

    def elsewhere(self, name):
        """Whether a weight belongs to another stage, or to the draft model."""
        path = name.split(".")[:2] if name.startswith("layers.") else name.split(".")[:1]
        here = dict(self.named_modules()).get(".".join(path))
        return isinstance(here, nn.Identity) or (path[0] == "layers" and int(path[1]) >= len(self.layers))

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, weight in self.mapper.apply(weights):
            if name.endswith(".skipped") or self.elsewhere(name):
                continue
            param = params[name]
            if weight.shard_id is not None:
                param.weight_loader(param, weight, loaded_shard_id=weight.shard_id)
            else:
                default_weight_loader(param, weight)
            loaded.add(name)
        return loaded


class SilentForCausalLM(MiniForCausalLM):
    """Says nothing of what it loaded, so no start-up check runs."""

    def load_weights(self, weights):
        super().load_weights(weights)


class CascadeForCausalLM(MiniForCausalLM):
    """Its keys have no dot before them, so that `v_proj` fires on the `qkv_proj` which `k_proj` made."""

    mapper = WeightsMapper(
        orig_to_new_stacked={s: ("qkv_proj", s[0]) for s in ("q_proj", "k_proj", "v_proj")},
        orig_to_new_prefix={"model.": ""},
    )


class ModestForCausalLM(MiniForCausalLM):
    """Loads everything, and does not say so of one parameter."""

    def load_weights(self, weights):
        return super().load_weights(weights) - {"embed.weight"}


class LooksForCausalLM(MiniForCausalLM):
    """Decides by a value."""

    def load_weights(self, weights):
        def looked():
            for name, weight in weights:
                if name.endswith("o_proj.weight") and weight[0, 0].item() < 0:
                    raise ValueError("negative")
                yield name, weight

        return super().load_weights(looked())


class StubbedForCausalLM(MiniForCausalLM):
    """Calls what is not there in the middle of loading."""

    def load_weights(self, weights):
        from scipy.special import missing

        for _, weight in weights:
            if weight.numel() < missing:
                return set()
        return None


class UnbuildableForCausalLM(MiniForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        raise RuntimeError("no kernel for this machine")


class EarlyForCausalLM(MiniForCausalLM):
    def load_weights(self, weights):
        raise ImportError("a package is missing")


class MiniMTPModel(MiniForCausalLM):
    """The layer behind the last of the main model, and a projection; the embedding is the main model's."""

    def __init__(self, config):
        nn.Module.__init__(self)
        self.first = config.layers
        self.embed_tokens = Linear(16, HIDDEN)
        self.layers = nn.ModuleDict({str(self.first): Layer()})
        self.layers[str(self.first)].eh_proj = Linear(HIDDEN, 2 * HIDDEN)

    def elsewhere(self, name):
        return not name.startswith(f"layers.{self.first}.")

    def load_weights(self, weights):
        super().load_weights(weights)


class ExpertsForCausalLM(MiniForCausalLM):
    """One more layer, of experts: all of them cut over the ranks, or whole ones spread over them."""

    def __init__(self, config):
        super().__init__(config)
        spread = CURRENT[-1].parallel_config.ep
        here = config.experts // WORLD["tp"] if spread else config.experts
        self.mine = range(WORLD["tp_rank"] * here, (WORLD["tp_rank"] + 1) * here) if spread else range(config.experts)
        self.experts = Linear(here, HIDDEN)

    def load_weights(self, weights):
        def others():
            for name, weight in weights:
                if name.startswith("model.experts."):
                    number = int(name.split(".")[2])
                    if number in self.mine:
                        self.experts.weight.data[number - self.mine[0]].copy_(weight)
                else:
                    yield name, weight

        return super().load_weights(others()) | {"experts.weight"}


class ForgetfulForCausalLM(ExpertsForCausalLM):
    """With experts spread, every rank takes those of the first."""

    def __init__(self, config):
        super().__init__(config)
        self.mine = range(len(self.mine))


class CollectsForCausalLM(MiniForCausalLM):
    """Takes all weights before it looks at any, and does not say which one it does not like."""

    def load_weights(self, weights):
        held = dict(weights)
        self.check([(w.dim(), n) for n, w in held.items()])
        return super().load_weights(iter(held.items()))

    def check(self, kinds):
        if any(dims > 2 for dims, _ in kinds):
            raise ValueError("there is a tensor of more than two dimensions")


class LateForCausalLM(MiniForCausalLM):
    """Complains of a tensor only when the next one is in its hands."""

    def load_weights(self, weights):
        def late():
            odd = False
            for name, weight in weights:
                if odd:
                    raise ValueError("a scalar is not expected")
                odd = weight.dim() == 0
                if not odd:
                    yield name, weight

        return super().load_weights(late())


class AlwaysForCausalLM(MiniForCausalLM):
    """Raises whatever it is given."""

    def load_weights(self, weights):
        count = len(list(weights))
        raise ValueError("no" if count >= 0 else "yes")


class PaddedForCausalLM(MiniForCausalLM):
    """Its embedding has more rows than the vocabulary, as a release pads it."""

    def __init__(self, config):
        super().__init__(config)
        self.embed.weight.weight_loader = self.load_rows

    def load_rows(self, param, loaded_weight):
        assert loaded_weight.shape[0] == self.config.vocab_size
        param[: self.config.vocab_size].data.copy_(loaded_weight)
        param[self.config.vocab_size :].data.fill_(0)

    def load_weights(self, weights):
        def rest():
            for name, weight in weights:
                if name == "model.embed.weight":
                    self.load_rows(self.embed.weight, weight)
                else:
                    yield name, weight

        return super().load_weights(rest()) | {"embed.weight"}


class FussyForCausalLM(PaddedForCausalLM):
    """Wants a number of rows that stands nowhere."""

    def load_rows(self, param, loaded_weight):
        assert loaded_weight.shape[0] == 11
        param[:11].data.copy_(loaded_weight)


class TaperedForCausalLM(MiniForCausalLM):
    """Its second layer has half the outputs of the first."""

    def __init__(self, config):
        super().__init__(config)
        self.layers[1].o_proj = Linear(HIDDEN // 2, HIDDEN)


class DeclaredForCausalLM(MiniForCausalLM):
    """Says what its fused module is made of, and does it."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


class ForgotForCausalLM(DeclaredForCausalLM):
    """Says so, and has lost the rule for one part."""

    mapper = WeightsMapper(
        orig_to_new_stacked={".q_proj": (".qkv_proj", "q"), ".v_proj": (".qkv_proj", "v")},
        orig_to_new_prefix={"model.": ""},
    )


class ShyForCausalLM(MiniForCausalLM):
    """Fuses one part more than it says."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj"]}


class WideForCausalLM(DeclaredForCausalLM):
    """A rule that was made for the layers and reaches the encoder, whose query is a module of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.encoder = nn.ModuleDict({"q_proj": Linear(HIDDEN, HIDDEN)})


class _Method:
    def process_weights_after_loading(self, layer):
        torch.ops._C.static_scaled_fp8_quant(layer.weight)


class OnlineForCausalLM(MiniForCausalLM):
    """Quantises each layer as soon as its weights are there."""

    def __init__(self, config):
        super().__init__(config)
        self.embed.quant_method = _Method()

    def load_weights(self, weights):
        loaded = super().load_weights(weights)
        self.embed.quant_method.process_weights_after_loading(self.embed)
        return loaded
