"""Files, headers and indexes."""

# ruff: noqa: E501  (a table: one report a row)

from __future__ import annotations

import json

from ckaudit.header import MAX_HEADER
from tests.helpers import Entries, checkpoint_files, encode, header, header_json, index_file, safetensors_file
from tests.known_faults.cases import (
    ERROR,
    LLAMA,
    NOTE,
    WARN,
    Case,
    Fault,
    Kind,
    declared,
    folder,
    layers,
    made,
    quantised,
)
from tests.toy import CONFIG, llama, plan

INDEX = "model.safetensors.index.json"
CONFIG_FILE = {"config.json": json.dumps(CONFIG).encode()}
BF16: tuple[str, list[int]] = ("BF16", [4, 4])
SCALES = layers("layers.{i}.attn.wo_a.scale", 43)


def split(count: int, stem: str = "model", dtype: str = "BF16", of: int | None = None) -> dict[str, Entries]:
    """A small model in `count` numbered files."""
    names = llama(count)
    return {
        f"{stem}-{k + 1:05}-of-{of or count:05}.safetensors": {n: (dtype, [4, 4]) for n in names[k::count]} for k in range(count)
    }  # fmt: skip


def files(shards: dict[str, Entries]) -> dict[str, bytes]:
    return {path: safetensors_file(entries) for path, entries in shards.items()}


def one(data: bytes) -> dict[str, bytes]:
    return {"model.safetensors": data, **CONFIG_FILE}


def promised() -> Case:
    """An index that lists block scales for 43 layers; the shards hold the weights alone."""
    weights: Entries = {n: ("F8_E4M3", [4, 4]) for n in layers("layers.{i}.attn.wo_a.weight", 43)}
    shard = "model-00001-of-00001.safetensors"
    found = checkpoint_files({shard: weights}, CONFIG | declared("fp8 scale"), index=True)
    return folder(found | {INDEX: index_file(dict.fromkeys([*weights, *SCALES], shard), 43 * 16)})


def lost_shards() -> Case:
    """Two of eight layers and the head were dropped with their shards, and the index was written from what was left."""
    kept = [n for n in llama(8)[:-1] if not n.startswith(("model.layers.6.", "model.layers.7."))]
    source = folder(
        checkpoint_files(
            {"model-00001-of-00001.safetensors": dict.fromkeys(kept, BF16)},
            CONFIG | {"num_hidden_layers": 8},
            index=True,
        )
    )[0]
    return source, plan(source, llama(8))


FAULTS = (
    Fault(Kind.INDEX, ("unslothai/unsloth/issues/2355", "unslothai/unsloth/issues/2513", "unslothai/unsloth/issues/1521", "unslothai/unsloth-zoo/pull/35"),
          "Shards were pushed without their index: loaders find no model.",
          lambda: folder(files(split(2)) | CONFIG_FILE),
          (("CK135", ERROR, "checkpoint", 2),)),
    Fault(Kind.INDEX, ("huggingface/huggingface_hub/pull/4728",),
          "The index lists a tensor that the shard it names does not hold.",
          lambda: folder(checkpoint_files({f"model-{k:05}-of-00002.safetensors": dict.fromkeys(n, BF16) for k, n in ((1, LLAMA[:15]), (2, LLAMA[15:]))}, CONFIG)
                         | {INDEX: index_file({**dict.fromkeys(LLAMA[:15], "model-00001-of-00002.safetensors"), **dict.fromkeys([*LLAMA[15:], "mtp.fc.weight"], "model-00002-of-00002.safetensors")}, 30 * 32)}),
          (("CK126", ERROR, "checkpoint", 1),)),
    Fault(Kind.INDEX, ("vllm-project/vllm/pull/57108",),
          "The index lists the block scale of every layer and no shard holds one: the server is healthy and its output is wrong.",
          promised,
          (("CK126", ERROR, "checkpoint", 43), ("CK304", ERROR, "checkpoint", 43))),
    Fault(Kind.INDEX, ("vllm-project/vllm/issues/12860", "vllm-project/vllm/issues/15536"),
          "A shard is lost and whole layers with it: one finding that names the layers, not a line for each parameter.",
          lambda: made([n for n in llama(8) if ".4." not in n and ".5." not in n], llama(8), config={"num_hidden_layers": 8}),
          (("CK210", ERROR, "checkpoint", 2),)),
    Fault(Kind.INDEX, ("Neph0s/CoSER/issues/3",),
          "The index is left over from a split into 30 files, and 15 are there, which hold everything.",
          lambda: folder(files(split(15)) | CONFIG_FILE | {INDEX: index_file({n: f"model-{i % 30 + 1:05}-of-00030.safetensors" for i, n in enumerate(llama(15))}, 138 * 32)}),
          (("CK133", ERROR, "checkpoint", 1),)),
    Fault(Kind.INDEX, ("Blaizzy/mlx-vlm/pull/1464",),
          "A stray 4-bit model.safetensors lies beside the shards: a loader that takes every file merges both.",
          lambda: folder(checkpoint_files(split(2), CONFIG) | {"model.safetensors": safetensors_file({n: ("U32", [4, 1]) for n in llama(2)})}),
          (("CK131", ERROR, "checkpoint", 3),)),
    Fault(Kind.INDEX, ("FlashML-org/FreeToken/pull/336",),
          "A second copy in a sub-folder doubles the download.",
          lambda: folder(checkpoint_files(split(3), CONFIG) | {f"original/model--{k:05}-of-00002.safetensors": safetensors_file(e) for k, e in enumerate(split(2).values(), 1)}),
          (("CK137", WARN, "checkpoint", 2),)),
    Fault(Kind.INDEX, ("areal-project/AReaL/pull/1403",),
          "An exporter left whole shards out and wrote an index that agrees with what is left: the config tells of the layers and the model of the head.",
          lost_shards,
          (("CK210", ERROR, "checkpoint", 18), ("CK214", ERROR, "undecidable", 1))),
    Fault(Kind.INDEX, ("sgl-project/sglang/pull/35107",),
          "Two splits of one model in a folder, and an index for one of them.",
          lambda: folder(checkpoint_files(split(4, "diffusion_pytorch_model"), CONFIG) | files({p.replace("4.s", "8.s"): e for p, e in split(8, "diffusion_pytorch_model", of=8).items()})),
          (("CK130", WARN, "checkpoint", 8),)),
    Fault(Kind.INDEX, ("exo-explore/exo/pull/1956",),
          "An index without total_size, which is optional: no more than a note.",
          lambda: folder(checkpoint_files(split(2), CONFIG) | {INDEX: index_file({n: p for p, e in split(2).items() for n in e}, None, quantization_level="4", mflux_version="0.9")}),
          (("CK132", NOTE, "checkpoint", 1),)),
    Fault(Kind.INDEX, ("unslothai/unsloth/issues/1122", "verl-project/verl/issues/4338"),
          "A save ended after the first two of four files, before it wrote an index.",
          lambda: folder(dict(list(files(split(4)).items())[:2]) | CONFIG_FILE),
          (("CK136", ERROR, "checkpoint", 2),)),
    # headers
    Fault(Kind.HEADER, ("1230young/bizgen/issues/15", "ShineChen1024/MagicClothing/issues/11", "nicolaus-huang/ProcessPainter/issues/5", "kohya-ss/sd-scripts/issues/990"),
          "The first eight bytes are no length: a pointer of Git LFS, a web page, a pickle under another name.",
          lambda: folder(one(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n")),
          (("CK101", ERROR, "checkpoint", 1),)),
    Fault(Kind.HEADER, ("ml-explore/mlx/issues/743", "huggingface/diffusers/issues/10863"),
          "The metadata has no format, and strict readers refuse the file.",
          lambda: folder(one(safetensors_file(dict.fromkeys(LLAMA, BF16), None))),
          (("CK113", WARN, "checkpoint", 1),)),
    Fault(Kind.HEADER, ("safetensors/safetensors/issues/668",),
          "1.29 million tensors: a header of 132 MB, longer than the library reads.",
          lambda: folder(one(encode(header({"w": BF16}, {"format": "pt"})[8:].ljust(MAX_HEADER + 1)) + bytes(32))),
          (("CK102", ERROR, "checkpoint", 1),)),
    Fault(Kind.HEADER, ("ml-explore/mlx/issues/3363", "leejet/stable-diffusion.cpp/pull/1754"),
          "A shape that needs more bytes than its offsets span.",
          lambda: folder(one(encode(header_json({"t": ("F32", [1])}, {"format": "pt"}) | {"t": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4]}}) + bytes(4))),
          (("CK109", ERROR, "checkpoint", 1),)),
    Fault(Kind.HEADER, ("promptfoo/modelaudit/pull/1607",),
          "A marker of no elements is legal.",
          lambda: made({"scaled_fp8": ("F8_E4M3", [0]), **dict.fromkeys(LLAMA, BF16)})),
    Fault(Kind.HEADER, ("safetensors/safetensors/issues/601",),
          "A file of metadata alone, which old releases of the library cannot read.",
          lambda: folder(one(safetensors_file({}, {"format": "pt", "crc": "12"}))),
          (("CK114", WARN, "checkpoint", 1),)),
    # dtypes
    Fault(Kind.DTYPE, ("safetensors/safetensors/issues/839", "foundation-model-stack/fastsafetensors/pull/79", "foundation-model-stack/fastsafetensors/pull/69", "chrishayuk/larql/pull/35"),
          "Dtypes below a byte count elements in the header: half a byte each is right.",
          lambda: made({"l.0.weight": ("F4", [2, 8]), "l.0.scales": ("F8_E8M0", [2, 1])})),
    Fault(Kind.DTYPE, ("benchflow-ai/posttrainarena/pull/9",),
          "A fine-tune was saved in F32 while the config says bfloat16: twice the size.",
          lambda: made(dict.fromkeys(LLAMA, ("F32", [4, 4])), config={"dtype": "bfloat16"}),
          (("CK302", WARN, "checkpoint", 30),)),
    Fault(Kind.RUNTIME, ("vllm-project/vllm/issues/304",),
          "One pickle of 200 GB in F32 takes all memory of the host: such a file is not opened, and the audit says that nothing was audited.",
          lambda: folder({"pytorch_model.bin": b"PK\x03\x04", **CONFIG_FILE}),
          (("CK138", WARN, "checkpoint", 1),)),
    Fault(Kind.SYNC, ("vllm-project/vllm/issues/48312", "verl-project/verl/pull/7987"),
          "Weights of FP8 are loaded again from a checkpoint that lacks some scales, and nothing checks it.",
          lambda: made({n: s for n, s in quantised("model.layers.{i}.self_attn.q_proj", "fp8 block").items() if n != "model.layers.1.self_attn.q_proj.weight_scale_inv"}, config=declared("fp8 block")),
          (("CK304", ERROR, "checkpoint", 1),)),
)  # fmt: skip
