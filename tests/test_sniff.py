"""What a file is that is not safetensors."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile

import numpy
import pytest
import torch
from helpers import encode, safetensors_file

from ckaudit import sniff
from ckaudit.header import parse

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5\nsize 12345\n"


def _saved(**options: bool) -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, file, **options)
    return file.getvalue()


def _numpy() -> bytes:
    file = io.BytesIO()
    numpy.save(file, numpy.zeros(3))
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("model.bin"), io.BytesIO())
    return file.getvalue()


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", "b")
    return file.getvalue()


# Made by the programs that make them, where one is at hand.
FOREIGN = {
    "LFS": (LFS, "Git LFS pointer"),
    "torch.save": (_saved(), "zip archive"),
    "torch.save, before 1.6": (_saved(_use_new_zipfile_serialization=False), "pickle"),
    "pickle": (pickle.dumps({"a": 1}, protocol=4), "pickle"),
    "zip": (_zip(), "zip archive"),
    "gzip": (gzip.compress(b"x" * 100), "gzip"),
    "tar": (_tar(), "tar archive"),
    "numpy": (_numpy(), "numpy"),
    "GGUF": (b"GGUF\x03\x00\x00\x00\x23\x01\x00\x00\x00\x00\x00\x00", "GGUF"),
    "HTML": (b"<!DOCTYPE html>\n<html><head><title>Sign in</title>", "HTML page"),
    "HTML after white space": (b"\n  <html lang='en'>", "HTML page"),
    "XML": (b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code>', "XML text"),
    "JSON": (b'{"error":"Repository not found"}', "JSON text"),
    "JSON after a byte order mark": (b'\xef\xbb\xbf{"error":"not found"}', "JSON text"),
    "text": (b"Entry not found", "plain text"),
    "zero bytes": (bytes(4096), "zero bytes"),
    "empty": (b"", "empty file"),
    "five bytes": (b"\x01\x02\x03\x04\x05", "5 bytes"),
    "noise": (bytes(range(200, 256)) * 4, "unknown kind"),
}


@pytest.mark.parametrize(("data", "kind"), FOREIGN.values(), ids=FOREIGN)
def test_what_it_is_is_told(data: bytes, kind: str) -> None:
    found = sniff.foreign(data, len(data))
    assert found is not None
    assert kind in found
    (defect,) = parse(data, len(data)).defects
    assert (defect.code, defect.found) == ("not-safetensors", found)


@pytest.mark.parametrize(
    "data",
    [
        safetensors_file({"a": ("F32", [2])}),
        encode('{"__metadata__":{"pad":"' + "x" * (0x0280 - 27) + '"}}'),  # its length begins like a pickle
        encode('{"__metadata__":{"pad":"' + "x" * (0x8B1F - 27) + '"}}'),  # ... like gzip
        encode(' \n{"a":'),
        (10**9).to_bytes(8, "little") + b'{"a":',  # cut short: the header's to say
    ],
)
def test_what_may_be_safetensors_is_left_to_the_parser(data: bytes) -> None:
    assert sniff.foreign(data, len(data)) is None


def test_only_the_beginning_is_looked_at() -> None:
    assert sniff.foreign(LFS, None) == sniff.foreign(LFS + bytes(10_000), None)
    assert sniff.foreign(b"", 0) == "an empty file"


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"", "empty"), (b" \n", "empty"), (LFS, "LFS"), (b"<html>", "HTML"), (b"Not found", "plain text")],
)
def test_what_a_config_is_that_is_not_json(data: bytes, kind: str) -> None:
    found = sniff.not_json(data)
    assert found is not None
    assert kind in found
    assert sniff.not_json(b'{"model_type": "llama",}') is None
