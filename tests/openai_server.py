"""An OpenAI-compatible server for tests that wraps a real model and answers as vLLM does.

It tokenises, runs and takes log-probabilities by itself, sharing no code with `ckaudit.perplexity`, so that agreement means something.
`with OpenAIServer(folder) as url:` serves on a free port; keyword arguments plant what real servers get wrong.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2VLForConditionalGeneration

from ckaudit.perplexity.processor import load_processor


class OpenAIServer:
    """`logprobs=False` gives none; `token_ids=False` leaves ids out; `prompt_logprobs=False` knows only `echo` (an older server);
    `template` replaces the chat template; `status` answers every POST with that code."""

    def __init__(
        self,
        folder: Path,
        *,
        logprobs: bool = True,
        token_ids: bool = True,
        prompt_logprobs: bool = True,
        template: str | None = None,
        status: int = 200,
    ) -> None:
        self.processor = load_processor(folder)
        self.model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype="float32").eval()
        if template:
            self.processor.chat_template = template
        self.logprobs, self.token_ids, self.prompt_logprobs, self.status = logprobs, token_ids, prompt_logprobs, status
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.lock = threading.Lock()

    def __enter__(self) -> str:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, body, dict(self.headers)))
                if outer.status != 200:
                    self.answer(outer.status, {"error": {"message": "planted\nfailure"}})
                    return
                with outer.lock:
                    self.answer(200, outer.chat(body) if "chat" in self.path else outer.complete(body))

            def answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                if 300 <= status < 400:
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["continue_final_message"]
        assert not body["add_generation_prompt"]
        images, messages = [], []
        for message in body["messages"]:
            content = message["content"]
            if not isinstance(content, str):
                for part in content:
                    if part["type"] == "image_url":
                        data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                        images.append(Image.open(io.BytesIO(data)).convert("RGB"))
                content = [{"type": "image"} if p["type"] == "image_url" else p for p in content]
            messages.append({"role": message["role"], "content": content})
        text = self.processor.apply_chat_template(messages, continue_final_message=True, tokenize=False)
        inputs = self.processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
        ids, values = self.run(inputs)
        answer: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": "."}}]}
        if self.logprobs:
            answer["prompt_logprobs"] = self.as_vllm(ids, values)
        if self.token_ids:
            answer["prompt_token_ids"] = ids
        return answer

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, values = self.run(self.processor.tokenizer([body["prompt"]], return_tensors="pt"))
        choice: dict[str, Any] = {"text": ".", "logprobs": None}
        if self.logprobs and self.prompt_logprobs and "prompt_logprobs" in body:
            choice["prompt_logprobs"] = self.as_vllm(ids, values)
            if self.token_ids:
                choice["prompt_token_ids"] = ids
        if self.logprobs and body.get("echo"):  # the prompt's, then the one token generated
            choice["logprobs"] = {"token_logprobs": [None, *values[1:], -0.5]}
        return {"choices": [choice]}

    def run(self, inputs: Any) -> tuple[list[int], list[float]]:
        """Token ids, and the log-probability of each given those before it (0 for the first, which has none)."""
        with torch.no_grad():
            logits = self.model(**inputs).logits[0].double()
        ids = inputs["input_ids"][0].tolist()
        table = torch.log_softmax(logits, -1)
        return ids, [0.0, *(table[i - 1, token].item() for i, token in enumerate(ids) if i)]

    def as_vllm(self, ids: list[int], values: list[float]) -> list[Any]:
        entries = [{str(token): {"logprob": value, "rank": 1}} for token, value in zip(ids, values, strict=True)]
        return [None, *entries[1:]]
