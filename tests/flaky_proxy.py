"""A proxy before a test's S3 server that fails when it is told to: refusals, 503s, uploads whose connection breaks."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Faults:
    """busy_every: each so many requests one is answered 503. drops: so many uploads of shards are cut in the middle.
    refusal: (status, S3 code) for every upload of a name that holds `refused`."""

    busy_every: int | None = None
    drops: int = 0
    refusal: tuple[int, str] | None = None
    refused: str = ""
    seen: dict[str, int] = field(default_factory=lambda: {"requests": 0, "busy": 0, "dropped": 0, "refused": 0})


class FlakyProxy:
    """`endpoint`: where clients go. Passes everything on to `upstream` outside of `failing`."""

    def __init__(self, upstream: str) -> None:
        self.faults = Faults()
        self.lock = threading.Lock()
        address = urlsplit(upstream)
        handler = type("Handler", (_Handler,), {"proxy": self, "upstream": (address.hostname, address.port)})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @contextmanager
    def failing(self, **faults: Any) -> Iterator[Faults]:
        self.faults = Faults(**faults)
        try:
            yield self.faults
        finally:
            self.faults = Faults()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fate(self, method: str, path: str) -> str:
        """What becomes of a request: pass, busy, dropped or refused."""
        faults = self.faults
        with self.lock:
            faults.seen["requests"] += 1
            fate = "pass"
            if faults.refusal and method in ("PUT", "POST") and faults.refused in path:
                fate = "refused"
            elif faults.busy_every and faults.seen["requests"] % faults.busy_every == 0:
                fate = "busy"
            elif method == "PUT" and "/part-" in path and faults.seen["dropped"] < faults.drops:
                fate = "dropped"
            if fate != "pass":
                faults.seen[fate] += 1
        return fate


class _Handler(BaseHTTPRequestHandler):
    proxy: FlakyProxy
    upstream: tuple[str, int]
    protocol_version = "HTTP/1.1"  # answers "Expect: 100-continue" at once

    def _handle(self) -> None:
        fate = self.proxy.fate(self.command, self.path)
        pieces = self._pieces()
        if fate == "dropped":
            next(pieces)
            self.close_connection = True
            return
        body = b"".join(pieces)
        if fate == "busy":
            self._answer(503, _error("SlowDown"))
        elif fate == "refused":
            assert self.proxy.faults.refusal
            status, code = self.proxy.faults.refusal
            self._answer(status, _error(code))
        else:
            self._pass_on(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _pieces(self) -> Iterator[bytes]:
        """The request's body; in two halves, where its length is given at the start."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        length = int(self.headers.get("Content-Length") or 0)
        yield self.rfile.read(length // 2)
        yield self.rfile.read(length - length // 2)

    def _pass_on(self, body: bytes) -> None:
        connection = http.client.HTTPConnection(*self.upstream, timeout=60)
        own = ("expect", "connection", "transfer-encoding", "content-length")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in own}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                self.send_header(name, value)
        size = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", size or str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        connection.close()

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _error(code: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()
