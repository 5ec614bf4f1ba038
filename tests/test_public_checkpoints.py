"""51 checkpoints from public repositories, config and index as they lie there (`data/public/ORIGIN.tsv`): what must be found, and no more.

Each row was judged by hand against what is odd about the repository. Most have no fault: silence is what is tested. A row without a verdict
is of a model that transformers does not have, or only as code of the repository, so only its files can be judged.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ckaudit import audit, checks
from ckaudit.checkpoint import read_checkpoint
from ckaudit.engines.transformers import TransformersEngine
from ckaudit.source import open_source

DATA = Path(__file__).parent / "data" / "public"
Row = tuple[str, str, str, int]


class Expected(NamedTuple):
    """What must be said: of the files, and, with its verdict, by transformers. Rows are check, severity, blame, count."""

    files: tuple[Row, ...] = ()
    verdict: str = ""
    engine: tuple[Row, ...] = ()


CODE: Row = ("CK404", "note", "config", 0)
"""The class is code of the repository."""
NO_DRAFT: Row = ("CK219", "note", "config", 0)
"""A draft model that the config announces and nobody stored."""

UNKNOWN = (
    "chatglm3-6b", "deepseek-ocr", "deepseek-ocr2", "internlm2-7b", "kimi_k2-pcl-gqa", "logics-thinking-8b", "mimo-7b-crlf",
    "minicpmv-1.0-minicpm2.4b", "minicpmv-2.6", "minicpmv-2.6-scicore-omics-head", "molmo-7b-d-bnb-nf4", "moondream3-preview",
    "openpangu-embedded-7b", "qwen1-72b", "qwen1-7b-cantonese", "videollama3-qwen2-7b", "xgenmm-phi3-siglip",
)  # fmt: skip
"""Of models whose code is in their repositories; nothing is wrong with their files."""
SOUND = (
    "bloom-176b", "falcon-180b-chat", "gemma1-2b-tied", "gemma3-27b-medgemma", "granitemoe-1b-a400m", "llama-orpheus-3b-tts",
    "llama-triangulum-10b", "m2m100-nllb-1.3b", "mixtral-8x22b", "paligemma-3b", "qwen2-7b",
    "qwen2_vl-7b-olmocr", "qwen3-1.7b-mlx-singlefile-index", "qwen3_vl-4b", "t5-xxl-encoder", "tinyllama-1.1b-singlefile-index",
)  # fmt: skip
"""Nothing is wrong: names of older releases, heads that are tied and left out, shards with odd names."""

EXPECTED: dict[str, Expected] = {
    **dict.fromkeys(UNKNOWN, Expected((CODE,))),
    **dict.fromkeys(SOUND, Expected((), "loads")),
    # known by now, and its code is in the repository too
    "phi3-mini-of-micro-shards": Expected((CODE,), "loads"),
    # a merge conflict in the index: two documents joined
    "bloom-176b-mergeconflict": Expected((("CK120", "error", "checkpoint", 1),), "fails"),
    # a component of a pipeline, with its own config
    "flux1-dev-transformer": Expected(),
    # packed experts one by one, 128 in each of 30 layers, three matrices of three tensors; transformers has them fused and plain
    "gemma4-26b-a4b-w4a16-162shards": Expected(
        (), "loads_with_loss", (("CK305", "error", "engine", 30 * 128 * 3 * 3),)
    ),
    # MiniCPM-V under another name; its config names no class
    "llama3v-minicpmv2.5-renamed": Expected((("CK404", "warning", "config", 0), CODE)),
    # tied by the config, and a head is stored
    "locateanything-3b-moonvit": Expected((("CK214", "note", "undecidable", 2), CODE)),
    # adapters without their tensors
    "lora-gemma3-270m": Expected((("CK138", "error", "checkpoint", 0),)),
    "lora-internlm2-intermind": Expected((("CK138", "error", "checkpoint", 0),)),
    # the language model's names were changed and its class with them; 437 tensors of the tower and 13 of the resampler are still there
    "minicpmv-2.6-llm-prefix-stripped": Expected((), "loads_with_loss", (("CK405", "error", "config", 450),)),
    # modules that MLX quantised: those with scales
    "mistral4-119b-mlx-4bit": Expected((), "fails", (("CK305", "error", "checkpoint", 434),)),
    "qwen3_5-27b-mlx-mixed4-8bit": Expected((NO_DRAFT,), "fails", (("CK305", "error", "checkpoint", 498),)),
    # a placeholder
    "qwen2-placeholder-empty-index": Expected((("CK122", "error", "checkpoint", 1),)),
    # no config
    "qwen2_5_omni-thinker-3b-noconfig": Expected((("CK403", "error", "checkpoint", 0),)),
    "qwen3_moe-30b-transgqa-noconfig": Expected((("CK403", "error", "checkpoint", 0),)),
    # text alone in the vision-language class: 40 layers of 128 (180) experts in three matrices without a place
    "qwen3_5_moe-reap-18b": Expected((NO_DRAFT,), "loads_with_loss", (("CK405", "error", "config", 40 * 128 * 3),)),
    "qwen3_5_moe-reap-25b": Expected((NO_DRAFT,), "loads_with_loss", (("CK405", "error", "config", 40 * 180 * 3),)),
    # total_size 0
    "qwen3_vl-8b-cosmos-reason2": Expected((("CK132", "warning", "checkpoint", 1),), "loads"),
    # a header by itself, which is no target
    "tinytimemixer-ttm": Expected((("CK138", "error", "checkpoint", 0),)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("public")
    with tarfile.open(DATA / "checkpoints.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return root


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    found = TransformersEngine()
    yield found
    found.close()


def test_every_one_is_judged_and_has_its_origin(folders: Path) -> None:
    rows = [row.split("\t") for row in (DATA / "ORIGIN.tsv").read_text().splitlines()[1:]]
    assert [row[0] for row in rows] == sorted(EXPECTED) == sorted(p.name for p in folders.iterdir())
    assert all(len(row) == 5 and len(row[2]) == 40 for row in rows)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_files(name: str, folders: Path) -> None:
    found, skips = checks.run(read_checkpoint(open_source(str(folders / name))), ())
    assert sorted((f.check, f.severity, f.blame, f.count) for f in found) == sorted(EXPECTED[name].files)
    assert skips


@pytest.mark.parametrize("name", [n for n, row in EXPECTED.items() if row.verdict])
def test_with_transformers(name: str, folders: Path, engine: TransformersEngine) -> None:
    report = audit(str(folders / name), [engine], cache=False)
    expected = EXPECTED[name]
    assert report.plans[0].verdict == expected.verdict, report.plans[0].error
    rows = sorted((f.check, f.severity, f.blame, f.count) for f in report.findings)
    assert rows == sorted((*(r for r in expected.files if r != CODE), *expected.engine)), [
        f.message for f in report.findings
    ]
