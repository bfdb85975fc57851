"""A real HTTP server for files, with the faults of real ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from attrs import define, field


@define
class Reply:
    """What a path answers.

    ``cut`` sends only that many bytes of the body and closes; ``chunked`` announces no
    length; ``until_close`` neither; ``hold`` waits for the event after half of the body.
    """

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(factory=dict)
    cut: int | None = None
    chunked: bool = False
    until_close: bool = False
    hold: threading.Event | None = None


@define
class FileServer:
    """Replies by path; may be changed while it serves."""

    port: int
    replies: dict[str, Reply] = field(factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(factory=list)
    sent: dict[str, int] = field(factory=dict)
    reached: threading.Event = field(factory=threading.Event)  # a reply with hold is half way

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def count(self, path: str) -> int:
        """How many requests for this path there were."""
        return sum(asked == path for asked, _ in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: FileServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.files.requests.append((path, {k.lower(): v for k, v in self.headers.items()}))
        reply = self.files.replies.get(path, Reply(b"no such file\n", 404))
        if self._unmodified(reply):
            reply = Reply(b"", 304)
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif reply.until_close:
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        with suppress(OSError):
            self._send_body(path, reply)

    def _unmodified(self, reply: Reply) -> bool:
        if "X-Ignores-Conditions" in reply.headers:
            return False
        etag, modified = reply.headers.get("ETag"), reply.headers.get("Last-Modified")
        return (etag is not None and self.headers.get("If-None-Match") == etag) or (
            modified is not None and self.headers.get("If-Modified-Since") == modified
        )

    def _send_body(self, path: str, reply: Reply) -> None:
        body = reply.body if reply.cut is None else reply.body[: reply.cut]
        half = len(body) // 2
        for part in (body[:half], body[half:]):
            if part:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part) if reply.chunked else part)
                self.wfile.flush()
                self.files.sent[path] = self.files.sent.get(path, 0) + len(part)
            if reply.hold is not None:
                self.files.reached.set()
                reply.hold.wait(30)
        if reply.cut is not None:
            self.close_connection = True
        elif reply.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: tests look at ``requests``."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that go away in the middle: that is what some tests do."""


@contextmanager
def serving() -> Iterator[FileServer]:
    """Serve on a free loopback port until the end of the block."""
    server = _Server(("127.0.0.1", 0), _Handler)
    files = FileServer(server.server_address[1])
    server.RequestHandlerClass = type("Handler", (_Handler,), {"files": files})
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield files
    finally:
        for reply in files.replies.values():
            if reply.hold is not None:
                reply.hold.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
