"""
Shims of words that live: they install, are restarted, come back as what is installed, and lose tasks
where a version is made to.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEEPS = ["persisted-state", "guarded-shutdown"]


class LiveShim(ThreadingHTTPServer):
    """One shim with one running task; knows how often it was restarted into which version."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, name: str, version: str, lossy: Collection[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.running = self.installed = version
        self.lossy = lossy
        self.tasks = {f"job-of-{name}": "running"}
        self.restarts: list[str] = []
        self.lock = threading.Lock()

    def answer(self, path: str) -> Any:
        """The document at a path."""
        if path == "/api/healthcheck":
            return {"service": "dstack-shim", "version": self.running, "features": KEEPS}
        if path == "/api/components":
            shim = {"name": "dstack-shim", "version": self.installed, "status": "installed"}
            return {"components": [{**shim, "features": KEEPS}]}
        if path == "/api/tasks":
            return {"tasks": [{"id": i, "status": s} for i, s in self.tasks.items()]}
        return None

    def take(self, path: str, body: Any) -> None:
        """Do what a request asks for."""
        with self.lock:
            if path == "/api/components/install" and body["name"] == "dstack-shim":
                self.installed = body["url"].rsplit("/", 2)[-2]
            if path == "/api/shutdown":
                assert body["only_if_safe"] is True
                self.restarts.append(self.installed)
                self.running = self.installed
                if self.running in self.lossy:
                    self.tasks = {}


class _Handler(BaseHTTPRequestHandler):
    server: LiveShim
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        document = self.server.answer(self.path)
        self._send(404 if document is None else 200, json.dumps(document).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.server.take(self.path, body)
        self._send(200, b"\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@contextmanager
def live_shims(count: int, version: str, lossy: Collection[str] = ()) -> Iterator[list[LiveShim]]:
    """So many shims, each on a port of its own."""
    shims = [LiveShim(f"box-{number}", version, lossy) for number in range(count)]
    threads = [
        threading.Thread(target=shim.serve_forever, kwargs={"poll_interval": 0.05})
        for shim in shims
    ]
    for thread in threads:
        thread.start()
    try:
        yield shims
    finally:
        for shim in shims:
            shim.shutdown()
            shim.server_close()
        for thread in threads:
            thread.join()
