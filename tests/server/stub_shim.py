"""
A shim of words: answers the instance check's questions with given documents and keeps a list of
what it was asked. It decides nothing, so whatever is asked of it was dstack's decision.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JSON = "application/json"


class StubShim(ThreadingHTTPServer):
    """Says the documents it was given; `stub_shim` starts and ends one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.documents: Mapping[str, Any] = {}
        self.asked: list[tuple[str, str]] = []

    def says(self, healthcheck: object, components: object, tasks: object) -> None:
        """Answer with these documents from now on, and forget what was asked so far."""
        self.documents = {
            "/api/healthcheck": healthcheck,
            "/api/components": components,
            "/api/tasks": tasks,
        }
        self.asked = []


@contextmanager
def stub_shim() -> Iterator[StubShim]:
    """A stub that answers on a port of its own."""
    shim = StubShim()
    # The default poll of 0.5 s is what shutdown would wait for.
    thread = threading.Thread(target=shim.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield shim
    finally:
        shim.shutdown()
        thread.join()
        shim.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: StubShim
    protocol_version = "HTTP/1.1"  # a connection for a whole check, as with a real shim
    disable_nagle_algorithm = True  # or each answer waits 40 ms for an acknowledgement

    def do_GET(self) -> None:
        self.server.asked.append(("GET", self.path))
        document = self.server.documents.get(self.path)
        if document is None:
            self._answer(404, b"not found\n", "text/plain; charset=utf-8")
            return
        self._answer(200, json.dumps(document).encode(), JSON)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(("POST", self.path))
        self._answer(200, b"\n", "text/plain; charset=utf-8")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""
