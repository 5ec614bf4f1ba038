"""Score rows with a running server, through the OpenAI-compatible API and its prompt log-probabilities.

The answer is sent as the last assistant message and the server is asked to continue it: the log-probabilities of the *prompt* are
then those of the answer. Fields beyond OpenAI's are vLLM's (`prompt_logprobs`, `continue_final_message`, `return_token_ids`;
vllm/entrypoints/openai/{chat_completion,completion}/protocol.py, 0.33.0); `echo` with `logprobs` is OpenAI's own for completions.
"""

from __future__ import annotations

import base64
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from ckaudit.errors import EngineError, UsageError
from ckaudit.perplexity.encode import Encoded
from ckaudit.scores import Drift, RowScore, ids_hash

NO_LOGPROBS = (
    "Use a server that returns them: vLLM does (`vllm serve MODEL`, field prompt_logprobs); for text rows a /v1/completions "
    "endpoint with `echo` and `logprobs` will do."
)


class Server:
    """One OpenAI-compatible server at `url` (`http://host:port/v1`). `OPENAI_API_KEY`, when set, is sent to it and nowhere else."""

    def __init__(self, url: str, model: str | None = None, timeout: float = 300.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{url!r} is not an http address.", "Give --against http://HOST:PORT/v1.")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._open = urllib.request.build_opener(_NoRedirect()).open
        self.model = model or self._first_model()
        self._echo = False

    def score(self, rows: list[Encoded]) -> Iterator[RowScore | Drift]:
        """The score of each row, in order, one request at a time; a Drift in place of a row whose tokens differ."""
        for row in rows:
            yield self._text(row) if row.row.text is not None else self._chat(row)

    def _chat(self, row: Encoded) -> RowScore | Drift:
        images = iter(row.row.images)
        answer = self._post(
            "chat/completions",
            {
                "messages": [{**m, "content": _content(m["content"], images)} for m in row.row.messages],
                "continue_final_message": True,
                "add_generation_prompt": False,
                "prompt_logprobs": 1,
                "return_token_ids": True,
            },
        )
        return self._judge(row, answer, _choice(answer))

    def _text(self, row: Encoded) -> RowScore | Drift:
        if not self._echo:
            answer = self._post("completions", {"prompt": row.text, "prompt_logprobs": 1, "return_token_ids": True})
            choice = _choice(answer)
            if choice.get("prompt_logprobs") or answer.get("prompt_logprobs"):
                return self._judge(row, answer, choice)
            self._echo = True
        answer = self._post("completions", {"prompt": row.text, "echo": True, "logprobs": 1})
        values = (_choice(answer).get("logprobs") or {}).get("token_logprobs") or []
        values = values[: len(values) - 1] if len(values) == len(row.ids) + 1 else values  # the one token generated
        if not any(isinstance(value, int | float) for value in values):
            raise EngineError(f"{self.url} returned no prompt log-probabilities for a text.", NO_LOGPROBS)
        if len(values) != len(row.ids):  # OpenAI's form names no ids: only their number can be compared
            return Drift(row.row.id, min(len(values), len(row.ids)), None, None)
        return _row(row, [value if isinstance(value, int | float) else math.nan for value in values[row.start :]])

    def _judge(self, row: Encoded, answer: dict[str, Any], choice: dict[str, Any]) -> RowScore | Drift:
        found = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
        if not found:
            raise EngineError(f"{self.url} returned no prompt log-probabilities.", NO_LOGPROBS)
        theirs = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        if theirs is not None and list(theirs) != list(row.ids):
            at = next(
                (i for i, (a, b) in enumerate(zip(row.ids, theirs, strict=False)) if a != b),
                min(len(row.ids), len(theirs)),
            )
            return Drift(row.row.id, at, _at(row.ids, at), _at(theirs, at))
        if len(found) != len(row.ids):
            return Drift(row.row.id, min(len(found), len(row.ids)), None, None)
        values = []
        for position in range(row.start, len(row.ids)):
            entry = (found[position] or {}).get(str(row.ids[position]))
            if entry is None:
                return Drift(row.row.id, position, row.ids[position], None)
            values.append(entry["logprob"] if isinstance(entry, dict) else entry)
        return _row(row, values)

    def _first_model(self) -> str:
        models = self._request("models", None).get("data") or []
        if not models or not isinstance(models[0].get("id"), str):
            raise EngineError(
                f"{self.url}/models names no model.", "Is this the /v1 address of an OpenAI-compatible server?"
            )
        return str(models[0]["id"])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request(path, {"model": self.model, "max_tokens": 1, "temperature": 0, **body})

    def _request(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310  the scheme is checked in __init__
            f"{self.url}/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        if key := os.environ.get("OPENAI_API_KEY"):
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with self._open(request, timeout=self.timeout) as reply:
                parsed = json.load(reply)
        except urllib.error.HTTPError as error:
            said = _said(error.read(4000))
            raise EngineError(f"{self.url}/{path} answered {error.code}: {said}", _hint(error.code, said)) from error
        except TimeoutError as error:
            raise EngineError(
                f"{self.url} did not answer within {self.timeout:.0f} s.", "Is the server overloaded?"
            ) from error
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(
                f"{self.url} cannot be reached: {reason}.", "Start the server, or correct --against."
            ) from error
        except ValueError as error:
            raise EngineError(f"{self.url}/{path} did not answer with JSON.", "Is this the /v1 address?") from error
        if not isinstance(parsed, dict):
            raise EngineError(f"{self.url}/{path} did not answer with a JSON object.", "Is this the /v1 address?")
        return parsed


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host: refuse it."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _content(content: Any, images: Iterator[bytes]) -> Any:
    """A message's content in OpenAI's form: pictures as base64 data addresses."""
    if isinstance(content, str):
        return content
    return [
        part
        if part["type"] == "text"
        else {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(next(images)).decode()},
        }
        for part in content
    ]


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _row(row: Encoded, logprobs: list[float]) -> RowScore:
    nll = -sum(logprobs)
    # vLLM writes -9999 for minus infinity (`clamp_prompt_logprobs`): as little a number as NaN is.
    finite = math.isfinite(nll) and min(logprobs) > -9999
    return RowScore(row.row.id, nll if finite else None, len(logprobs), ids_hash(row.ids))


def _at(ids: Any, position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def _said(body: bytes) -> str:
    """The server's own message, on one line."""
    text = body.decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
        error = parsed.get("error", parsed)
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300]


def _hint(code: int, said: str) -> str:
    if code in (401, 403):
        return "Set OPENAI_API_KEY to the server's key."
    if code == 404:
        return "Is this the /v1 address, and does the server know the model?"
    if "logprob" in said.lower():
        return NO_LOGPROBS
    if 300 <= code < 400:
        return "Give the address that it redirects to."
    return "See the server's log."
