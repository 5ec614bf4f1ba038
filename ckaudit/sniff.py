"""What a file is that is not safetensors, from its first bytes: the cause that "header too large" hides. Pure, no I/O."""

from __future__ import annotations

import re

# Sources of the magic numbers: each format's own specification; numpy `format.py`, ggml `gguf.md`, git-lfs `spec.md`.
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer: the file itself was never fetched"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes (a pickle checkpoint under another name)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x80\x02", "a pickle, as an old torch.save writes"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"GGUF", "a GGUF file"),
    (b"ggml", "a GGML file"),
    (b"\x93NUMPY", "a numpy array file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"BZh", "a bzip2 archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"Rar!", "a RAR archive"),
    (b"%PDF", "a PDF document"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x7fELF", "an ELF program"),
)
_PAGE = re.compile(rb"\s*<(!doctype\s+html|html|head|body|title|script)", re.IGNORECASE)
_ARCHIVE = re.compile(rb".{257}ustar", re.DOTALL)


def foreign(data: bytes, file_size: int | None) -> str | None:
    """What the file that begins with `data` is, in words, when it cannot be safetensors; None when it may be.

    `data` holds the first bytes of the file, all of it when it is short; `file_size` in bytes is None when unknown.
    """
    head = data[:512]
    size = len(data) if file_size is None else file_size
    if size == 0:
        return "an empty file"
    if head[5:8] == b"\0\0\0" and head[8:512].lstrip(b" \t\r\n")[:1] == b"{":
        return None  # a length below a terabyte and the start of a header, whatever the length's bytes spell
    for magic, kind in _MAGIC:
        if head.startswith(magic) and head[2:8] != b"\0" * 6:
            return kind
    if _PAGE.match(head):
        return "an HTML page: a login, error or quota page was saved in place of the file"
    if _ARCHIVE.match(head):
        return "a tar archive"
    if not head.strip(b"\0"):
        return "zero bytes from the start: space set aside by a download that never finished"
    return _text(head) or (f"{size} bytes, shorter than the length prefix" if size < 8 else _no_header(head))


def not_json(data: bytes) -> str | None:
    """What a small file is, in words, that should be JSON and does not begin like it; None when it begins like JSON."""
    if not data.strip():
        return "an empty file"
    if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        return None
    return foreign(data, len(data))


def _text(head: bytes) -> str | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if error.start < len(text) - 3:  # else a character that the end of what is looked at cuts
            return None
    if any(byte < 32 and byte not in b"\t\r\n\f" for byte in text):
        return None
    if text.startswith((b"{", b"[")):
        return "JSON text: an error message or an index saved in place of the file"
    if text.startswith(b"<"):
        return "XML text: an error message of a storage service saved in place of the file"
    return "plain text" if len(text) >= 8 else None


def _no_header(head: bytes) -> str | None:
    if len(head) > 8 and head[8:].lstrip(b" \t\r\n")[:1] not in (b"{", b""):
        return "data of an unknown kind: no header follows the first 8 bytes"
    return None
