"""Real indexes and headers from public repositories (`data/corpus/ORIGIN.tsv`): each oddity is found, or left alone on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import DictSource, encode
from safetensors import deserialize

from ckaudit.checkpoint import read_checkpoint
from ckaudit.checks import container
from ckaudit.header import parse
from ckaudit.source import open_source

CORPUS = Path(__file__).parent / "data" / "corpus"

# Folder: tensors, shards and findings. Counts are those that the repositories' own files have (`jq '.weight_map | length'`).
INDEXES: dict[str, tuple[int, int, list[tuple[str, str]]]] = {
    "bloom-176b-mergeconflict": (12, 1, [("CK120", "error")]),  # 12 of layer 0, all in one shard
    "qwen2-placeholder-empty-index": (0, 0, [("CK122", "error")]),  # a key more at the top (`_note`) is no fault
    "qwen3_vl-8b-cosmos-reason2": (750, 4, [("CK132", "warning")]),  # total_size is 0
    "phi3-mini-of-micro-shards": (195, 39, []),  # model-00001-of-micro
    "tinyllama-1.1b-singlefile-index": (201, 1, []),  # every entry is model.safetensors
    "mimo-7b-crlf": (451, 4, []),  # CRLF
}


@pytest.mark.parametrize("name", INDEXES)
def test_real_indexes(name: str) -> None:
    tensors, shards, expected = INDEXES[name]
    checkpoint = read_checkpoint(open_source(str(CORPUS / name)))
    findings, skips = container.run(checkpoint)
    assert checkpoint.index_only
    assert len(checkpoint.tensors) == tensors
    assert len(checkpoint.shards) == shards
    assert [(f.check, f.severity) for f in findings] == expected
    assert any(s.check == "CK126" for s in skips) == bool(tensors)


def test_the_file_with_crlf_still_has_it() -> None:
    assert b"\r\n" in (CORPUS / "mimo-7b-crlf" / "model.safetensors.index.json").read_bytes()


def test_the_merge_conflict_is_told_with_its_line() -> None:
    checkpoint = read_checkpoint(open_source(str(CORPUS / "bloom-176b-mergeconflict")))
    findings, _ = container.run(checkpoint)
    assert "merge conflict" in findings[0].message
    assert "line 2" in findings[0].message


@pytest.mark.parametrize(("name", "count"), [("tinytimemixer-ttm", 134), ("bloom-176b", 2)])
def test_real_headers(name: str, count: int) -> None:
    raw = (CORPUS / name / "header.json").read_bytes()
    entries = [e for n, e in json.loads(raw).items() if n != "__metadata__"]
    data = encode(raw) + bytes(max(e["data_offsets"][1] for e in entries))
    assert len(deserialize(data)) == count  # the library's word that it is sound
    found = parse(data, len(data))
    assert found.defects == ()
    assert len(found.tensors) == count
    source = DictSource({"model.safetensors": data})
    assert container.run(read_checkpoint(source)) == ((), ())
    assert len(source.reads) == 1


def test_origin_is_told_for_all() -> None:
    rows = (CORPUS / "ORIGIN.tsv").read_text().splitlines()[1:]
    assert {row.split("\t")[0] for row in rows} == {p.name for p in CORPUS.iterdir() if p.is_dir()}
