"""A Hugging Face Hub on loopback, from the standard library: repos from dicts of files, and every fault a network has.

    with HubServer({"org/name": {"config.json": b"{}", "model.safetensors": Sparse(head, size)}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)                      # or hub.env() for a subprocess
        hub.fail("*/config.json", status(503), times=2)                 # fails twice, then works; times=None: always
        hub.repos["org/name"].push({...})                               # a new commit; main moves
        ...
        assert [r.path for r in hub.log if r.range] == [...]            # hub.cdn_log: what reached the second host

Patterns are fnmatch patterns on the URL path (`/api/models/org/name/revision/main`, `/org/name/resolve/SHA/config.json`).
Faults come from `hub_faults`, `Sparse` and `Repo` from `hub_repos`.
`HubServer(cdn=True)` answers large files with a redirect to a second port, as the real Hub does; `latency` is in seconds a request.
As a process of its own (benchmarks): `python tests/hub_server.py --shards 163 --tensors 280 --latency 0.05` prints its URL and the
length of all headers, gives its counters as JSON on `GET /_log`, and lives until its stdin closes.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from hub_faults import Fault, error
from hub_repos import File, Repo, Sparse, sharded, tree_entry


@dataclass
class Request:
    """One request as it arrived, and what was sent back (`sent` counts body bytes handed to the socket)."""

    method: str
    path: str
    range: str | None
    headers: dict[str, str]
    peer: int
    """The client's port: the same for all requests of one connection."""
    status: int = 0
    sent: int = 0


@dataclass
class _Rule:
    pattern: str
    fault: Fault
    times: int | None
    met: dict[str, int] = field(default_factory=dict)
    """How often each path met it."""


class HubServer:
    """The loopback Hub; see the module's docstring."""

    def __init__(
        self,
        repos: Mapping[str, Mapping[str, File] | Repo],
        *,
        latency: float = 0.0,
        cdn: bool = False,
        tokens: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """`tokens` maps each valid token to the private or gated repos that it opens."""
        self.repos = {name: files if isinstance(files, Repo) else Repo(files) for name, files in repos.items()}
        self.latency = latency
        self.tokens = tokens
        self.log: list[Request] = []
        self.cdn_log: list[Request] = []
        self.most = 0
        """The largest number of requests that were held back at one time."""
        self._now = 0
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._servers = [_Server(self, self.log)] + ([_Server(self, self.cdn_log)] if cdn else [])
        self.url = self._servers[0].url
        self.cdn_url = self._servers[-1].url if cdn else None

    def __enter__(self) -> HubServer:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def env(self, **more: str) -> dict[str, str]:
        """The variables that point a Hub client in another process here."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", **more}

    def fail(self, pattern: str, fault: Fault, times: int | None = 1) -> None:
        """The next `times` requests (None: all) of each path that matches `pattern` meet `fault`; rules act in the order they came."""
        self._rules.append(_Rule(pattern, fault, times))

    def heal(self) -> None:
        """Forgets every fault."""
        self._rules.clear()

    def paths(self, pattern: str = "*") -> list[str]:
        """The paths asked of the first host, in order, that match `pattern`."""
        return [r.path for r in self.log if fnmatch.fnmatchcase(r.path, pattern)]

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the requests that are being held back."""
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        yield
        with self._lock:
            self._now -= 1

    def fault_for(self, path: str) -> Fault | None:
        """Takes the first fault that applies to this request."""
        with self._lock:
            for rule in self._rules:
                met = rule.met.get(path, 0)
                if fnmatch.fnmatchcase(path, rule.pattern) and (rule.times is None or met < rule.times):
                    rule.met[path] = met + 1
                    return rule.fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, hub: HubServer, log: list[Request]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.log = hub, log
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that hangs up is what these tests are about


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body leave in one write
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server.hub
        url = urlsplit(self.path)  # a client behind a proxy asks for the absolute URL: its path is served all the same
        path = unquote(url.path)
        headers = {k.lower(): v for k, v in self.headers.items()}
        self.seen = Request(self.command, path, headers.get("range"), headers, self.client_address[1])
        if path == "/_log":
            return self._json(200, _counters(self.server.log))
        self.server.log.append(self.seen)
        fault = hub.fault_for(path) or Fault()
        with hub.counted():
            time.sleep(hub.latency + fault.delay)
        if fault.drop:
            return self._hang_up(reset=fault.reset)
        if fault.status is not None:
            return self._send(fault.status, fault.headers, fault.body, fault)
        if path.startswith("/api/models/"):
            return self._api(path.removeprefix("/api/models/"), "blobs" in parse_qs(url.query), fault)
        return self._resolve(path, fault)

    def _api(self, path: str, blobs: bool, fault: Fault) -> None:
        name, kind, revision = path, "", "main"
        for marker in ("/revision/", "/tree/"):
            if marker in path:
                name, _, revision = path.partition(marker)
                kind = marker
        repo = self._repo(name, needs_access=False)
        if repo is None:
            return None
        sha = repo.resolve(revision)
        if sha is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        rows = list(repo.rows[sha].values())
        if kind == "/tree/":
            return self._json(200, [tree_entry(row) for row in rows])
        if not blobs or not repo.sizes:
            rows = [{"rfilename": row["rfilename"]} for row in rows]
        body = {"id": name, "sha": sha, "private": repo.private, "gated": repo.gated, "siblings": rows}
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode(), fault)

    def _resolve(self, path: str, fault: Fault) -> None:
        name, _, rest = path.lstrip("/").partition("/resolve/")
        repo = self._repo(name, needs_access=not self._is_cdn)
        if repo is None:
            return None
        revision, file = self._split(repo, rest)
        sha = repo.resolve(revision)
        if sha is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        data = repo.commits[sha].get(file)
        if data is None:
            return self._error(404, "EntryNotFound", "Entry not found")
        row = repo.rows[sha][file]
        etag = row["lfs"]["sha256"] if "lfs" in row else row["blobId"]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if "lfs" in row and self.server.hub.cdn_url and not self._is_cdn:
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{etag}"'}
            headers["Location"] = f"{self.server.hub.cdn_url}/{quote(name)}/resolve/{sha}/{quote(file)}?signature=1"
            return self._send(302, headers, b"", fault)
        return self._file(data, headers, fault)

    def _file(self, data: File, headers: dict[str, str], fault: Fault) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.seen.range or "")
        if wanted is None or fault.ignore_range:
            return self._send(200, headers, data, fault)
        start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
        if start >= len(data):
            return self._send(416, {"Content-Range": f"bytes */{len(data)}"}, b"", fault)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return self._send(206, headers, data[start:stop], fault)

    @property
    def _is_cdn(self) -> bool:
        return self.server.log is self.server.hub.cdn_log

    @staticmethod
    def _split(repo: Repo, rest: str) -> tuple[str, str]:
        ref = next((r for r in repo.refs if rest.startswith(r + "/")), rest.partition("/")[0])
        return ref, rest[len(ref) + 1 :]

    def _repo(self, name: str, needs_access: bool) -> Repo | None:
        """The repo, or None once the refusal is sent: the Hub's own, down to 401 for a repo that does not exist."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        tokens = self.server.hub.tokens
        opened = name in (tokens or {}).get(token, ())
        repo = self.server.hub.repos.get(name)
        if token and tokens is not None and token not in tokens and not self._is_cdn:
            self._error(401, "", "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and not opened):
            self._error(404 if token else 401, "RepoNotFound", "Repository not found")
        elif repo.gated and needs_access and not opened:
            self._error(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted.")
        else:
            return repo
        return None

    def _error(self, code: int, name: str, message: str) -> None:
        fault = error(code, name, message)
        self._send(code, fault.headers, fault.body, fault)

    def _json(self, code: int, value: Any) -> None:
        self._send(code, {"Content-Type": "application/json"}, json.dumps(value).encode(), Fault())

    def _send(self, code: int, headers: Mapping[str, str], body: File, fault: Fault) -> None:
        self.seen.status = code
        self.send_response_only(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) + len(fault.extra)))
        self.end_headers()
        if self.command != "HEAD":
            for piece in _pieces(body, fault):
                self.seen.sent += len(piece)  # before the write: whoever has read the bytes finds them counted
                self.wfile.write(piece)
        self.wfile.flush()
        if fault.cut is not None:
            self._hang_up(reset=fault.reset)

    def _hang_up(self, reset: bool) -> None:
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)


def _counters(log: list[Request]) -> dict[str, int]:
    weights = sum(r.sent for r in log if r.path.endswith(".safetensors"))
    return {"requests": len(log), "sent": sum(r.sent for r in log), "weights": weights}


def _pieces(body: File, fault: Fault, step: int = 1 << 18) -> Iterator[bytes]:
    length = len(body) if fault.cut is None else min(fault.cut, len(body))
    for start in range(0, length, step):
        yield body[start : min(start + step, length)]
    if fault.extra:
        yield fault.extra


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A loopback Hub with one sharded repo, bench/moe; lives until stdin closes."
    )
    parser.add_argument("--shards", type=int, default=163)
    parser.add_argument("--tensors", type=int, default=280)
    parser.add_argument("--latency", type=float, default=0.05)
    options = parser.parse_args()
    with HubServer({"bench/moe": sharded(options.shards, options.tensors)}, latency=options.latency) as hub:
        heads = sum(len(data.head) for data in hub.repos["bench/moe"].files.values() if isinstance(data, Sparse))
        print(hub.url, heads, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
