"""Writes the tiny checkpoints under `fixtures/` (`python tests/make_fixtures.py`); test_golden.py checks that they are in step.

All are one Llama of two layers and 21 tensors, sound or with one fault planted. Names and shapes follow from the architecture
(transformers, models/llama/modeling_llama.py); the data is zeros, for no audit reads it.
"""

from __future__ import annotations

import json
from pathlib import Path

from helpers import Entries, checkpoint_files, encode, header_json, index_file

FIXTURES = Path(__file__).parent.parent / "fixtures"

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 32, "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
}  # fmt: skip


def layer(i: int) -> dict[str, tuple[str, list[int]]]:
    """One decoder layer: hidden size 8, 2 heads of 4, 1 key-value head, MLP of 16."""
    shapes = {
        "input_layernorm": [8], "self_attn.q_proj": [8, 8], "self_attn.k_proj": [4, 8], "self_attn.v_proj": [4, 8],
        "self_attn.o_proj": [8, 8], "post_attention_layernorm": [8], "mlp.gate_proj": [16, 8], "mlp.up_proj": [16, 8],
        "mlp.down_proj": [8, 16],
    }  # fmt: skip
    return {f"model.layers.{i}.{leaf}.weight": ("BF16", shape) for leaf, shape in shapes.items()}


def llama() -> dict[str, tuple[str, list[int]]]:
    """The whole model."""
    return {
        "model.embed_tokens.weight": ("BF16", [32, 8]),
        **layer(0),
        **layer(1),
        "model.norm.weight": ("BF16", [8]),
        "lm_head.weight": ("BF16", [32, 8]),
    }


def single(entries: Entries, **config: object) -> dict[str, bytes]:
    """A checkpoint in one file."""
    return checkpoint_files({"model.safetensors": entries}, CONFIG | config)


def sharded() -> dict[str, bytes]:
    """The model in two shards with an index."""
    entries = llama()
    first = {k: v for k, v in entries.items() if "layers.1" not in k and not k.startswith(("model.norm", "lm_head"))}
    rest = {k: v for k, v in entries.items() if k not in first}
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": rest}
    return checkpoint_files(shards, CONFIG)


def without(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    """`files` less one."""
    return {k: v for k, v in files.items() if k != name}


def renamed(old: str, new: str) -> dict[str, bytes]:
    """The model with `old` replaced by `new` in every name."""
    return single({k.replace(old, new): v for k, v in llama().items()})


def duplicate_key() -> dict[str, bytes]:
    """The header names `lm_head.weight` twice; JSON parsers keep the last in silence."""
    good = single(llama())
    data = good["model.safetensors"]
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode().rstrip()
    entry = json.dumps({"lm_head.weight": header_json(llama())["lm_head.weight"]}, separators=(",", ":"))
    return good | {"model.safetensors": encode(text[:-1] + "," + entry[1:]) + data[8 + length :]}


def fixtures() -> dict[str, dict[str, bytes]]:
    """Files by path for each fixture."""
    good = single(llama())
    model = good["model.safetensors"]
    extra_bias = llama() | {f"model.layers.{i}.self_attn.q_proj.bias": ("BF16", [8]) for i in range(2)}
    no_q = {k: v for k, v in llama().items() if k != "model.layers.1.self_attn.q_proj.weight"}
    wide = llama() | {"model.layers.0.mlp.up_proj.weight": ("BF16", [24, 8])}
    hostile = llama() | {
        "\x1b[2J\x1b[31mmodel.norm.weight": ("BF16", [8]), "../../etc/passwd": ("BF16", [8]),
        "[red]lm_head.weight[/red]": ("BF16", [8]), "model.\u202ethgiew.mron": ("BF16", [8]), "line\nbreak": ("BF16", [8]),
    }  # fmt: skip
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {len(model)}\n".encode()
    lying = {**dict.fromkeys(llama(), "model.safetensors"), "model.layers.2.mlp.up_proj.weight": "model.safetensors"}
    return {
        "llama-good": good,
        "llama-sharded": sharded(),
        "llama-missing-shard": without(sharded(), "model-00002-of-00002.safetensors"),
        "llama-index-only": {k: v for k, v in sharded().items() if not k.endswith(".safetensors")},
        "llama-lying-index": good | {"model.safetensors.index.json": index_file(lying)},
        "llama-lfs-pointer": good | {"model.safetensors": pointer},
        "llama-truncated": good | {"model.safetensors": model[:-100]},
        "llama-duplicate-key": duplicate_key(),
        "llama-compiled-prefix": single({f"_orig_mod.{k}": v for k, v in llama().items()}),
        "llama-misspelt": renamed("k_proj", "key_proj"),
        "llama-extra-bias": single(extra_bias),
        "llama-missing-tensor": single(no_q),
        "llama-wrong-shape": single(wide),
        "llama-hostile-names": single(hostile),
        "llama-no-config": without(good, "config.json"),
        "llama-unknown-type": single(llama(), model_type="no_such_model", architectures=["NoSuchModelForCausalLM"]),
        "pickle-only": {"config.json": good["config.json"], "pytorch_model.bin": b"PK\x03\x04 never opened"},
    }


if __name__ == "__main__":
    for fixture, files in fixtures().items():
        (FIXTURES / fixture).mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            (FIXTURES / fixture / path).write_bytes(content)
