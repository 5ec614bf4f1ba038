"""Rows to score: the set that ships with ckaudit, a JSONL file of conversations, or a data set of the Hub."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ckaudit.errors import SourceError, UsageError, words_of
from ckaudit.resources import folder

BUILTIN = "builtin"
# Columns that hold the question, the reference answer and the picture in published visual question sets.
QUESTION = ("question", "prompt", "instruction", "query")
ANSWER = ("gpt_answer", "answer", "response", "caption", "output")
PICTURE = ("image", "images", "picture")


class Row(msgspec.Struct, frozen=True):
    """One thing to score: either `text`, or a conversation whose last message is the assistant's.

    `messages` are in the common chat form: `{"role", "content"}`, content being a string or parts `{"type": "image"}`,
    `{"type": "text", "text"}`; `images` holds the encoded bytes of the pictures in the order of their parts.
    """

    id: str
    kind: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    images: tuple[bytes, ...] = ()

    @property
    def answer(self) -> str:
        """The text that is scored."""
        return self.text if self.text is not None else plain(self.messages[-1]["content"])


class DataSet(msgspec.Struct, frozen=True):
    """Rows with the name they came under and a hash of their content, pictures included."""

    name: str
    rows: tuple[Row, ...]
    hash: str


def plain(content: str | list[dict[str, Any]]) -> str:
    """The text of a message's content, pictures left out."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if part.get("type") == "text")


def load(spec: str, limit: int | None = None) -> DataSet:
    """The rows that `--data SPEC` names: `builtin`, `hub:ORG/NAME[:SPLIT]` or the path of a JSONL file.

    Raises SourceError when they cannot be read and UsageError when a row is not of the documented form.
    """
    if spec == BUILTIN:
        base = folder("perplexity/data")
        rows = _parse(base.joinpath("rows.jsonl").read_text("utf-8"), spec, lambda p: base.joinpath(p).read_bytes())
    elif spec.startswith("hub:"):
        rows = list(_from_hub(spec.removeprefix("hub:")))
    else:
        rows = _from_file(Path(spec))
    rows = rows[:limit]
    if not rows:
        raise UsageError(f"{spec} holds no rows.", "Give a JSONL file with one conversation a line.")
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise UsageError(f"{spec} has two rows with the id {row.id!r}.", "Give every row its own id.")
        seen.add(row.id)
    return DataSet(spec, tuple(rows), content_hash(rows))


def content_hash(rows: Iterable[Row]) -> str:
    """sha256 over ids, texts, messages and picture bytes: a changed data set is an error, not a drift."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, row.text, list(row.messages)], sort_keys=True).encode())
        for image in row.images:
            digest.update(hashlib.sha256(image).digest())
    return digest.hexdigest()


def _from_file(path: Path) -> list[Row]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"The data set {path} cannot be read: {error}.", "Use builtin, hub:ORG/NAME or a JSONL file."
        ) from error
    root = path.resolve().parent

    def read(name: str) -> bytes:
        image = (root / name).resolve()
        if not image.is_relative_to(root):
            raise UsageError(f"The picture {name!r} lies outside {root}.", "Keep pictures beside the JSONL file.")
        try:
            return image.read_bytes()
        except OSError as error:
            raise SourceError(
                f"The picture {name!r} of {path} cannot be read: {error.strerror}.", "Check its path."
            ) from error

    return _parse(text, str(path), read)


def _parse(text: str, name: str, read: Any) -> list[Row]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{name}, line {number} is not JSON: {error}.", "Write one JSON object a line.") from error
        rows.append(_row(raw, f"{name}, line {number}", str(number), read))
    return rows


def _row(raw: Any, where: str, default_id: str, read: Any) -> Row:
    def wrong(what: str) -> UsageError:
        return UsageError(
            f"{where}: {what}.", 'Expected {"text": …} or {"messages": [{"role", "content"} …], "images": […]}.'
        )

    if not isinstance(raw, dict):
        raise wrong("not a JSON object")
    row_id = str(raw.get("id", default_id))
    if isinstance(raw.get("text"), str) and raw["text"].strip():
        return Row(row_id, str(raw.get("kind", "text")), text=raw["text"])
    messages = raw.get("messages")
    if not isinstance(messages, list) or len(messages) < 2:
        raise wrong("neither a text nor a conversation of two messages or more")
    for message in messages:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not _content(message.get("content"))
        ):
            raise wrong("a message without a role and a content of text and image parts")
    if messages[-1]["role"] != "assistant" or not plain(messages[-1]["content"]).strip():
        raise wrong("the last message is not an answer of the assistant")
    # The answer is plain text: engines complete it only in that form.
    messages = [*messages[:-1], {"role": "assistant", "content": plain(messages[-1]["content"])}]
    paths = raw.get("images") or []
    parts = sum(
        part.get("type") == "image"
        for m in messages
        for part in (m["content"] if isinstance(m["content"], list) else ())
    )
    if not isinstance(paths, list) or not all(isinstance(p, str) for p in paths) or len(paths) != parts:
        raise wrong(
            f"{parts} image parts in the messages, {len(paths) if isinstance(paths, list) else 'no list of'} images"
        )
    return Row(
        row_id, str(raw.get("kind", "picture" if paths else "chat")), None, tuple(messages), tuple(map(read, paths))
    )


def _content(content: Any) -> bool:
    if isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(p, dict) and p.get("type") in ("image", "text") for p in content
    )


def _from_hub(name: str) -> Iterator[Row]:
    """Rows of a Hub data set, by the usual column names. Downloads it through `datasets`."""
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise SourceError(
            "Data sets of the Hub need the package datasets.", "Run: pip install 'ckaudit[data]'."
        ) from error
    repo, _, split = name.partition(":")
    try:
        table = datasets.load_dataset(repo, split=split or None)
    except Exception as error:  # the library raises its own, the client's and pyarrow's errors
        raise SourceError(
            f"The data set {repo} cannot be loaded: {words_of(error)}", "Check its name and the network."
        ) from error
    if isinstance(table, dict):
        table = next(iter(table.values()))
    ask, tell, show = (
        next((c for c in names if c in table.column_names), None) for names in (QUESTION, ANSWER, PICTURE)
    )
    if ask is None or tell is None:
        raise UsageError(
            f"The data set {repo} has the columns {', '.join(table.column_names)}: no question and answer among them.",
            "Export it to JSONL in the documented form.",
        )
    for number, record in enumerate(table):
        shown = record.get(show) if show else None
        pictures = [] if shown is None else shown if isinstance(shown, list) else [shown]
        content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": str(record[ask])}]
        answer = record[tell][0] if isinstance(record[tell], list) else record[tell]
        messages = ({"role": "user", "content": content}, {"role": "assistant", "content": str(answer)})
        yield Row(f"{number:04d}", "picture" if pictures else "chat", None, messages, tuple(map(_png, pictures)))


def _png(picture: Any) -> bytes:
    """A PIL picture as PNG bytes (lossless, so that every side sees the same pixels)."""
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()
