"""A web server for downloads, whose answers a case writes, and that keeps what was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]


class Web:
    """Serves paths by function; ``asked`` lists the paths requested, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, Answer] = {}
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                web.asked.append(self.path)
                answer = web.answers.get(self.path, with_status(404))
                answer(self)

            def log_message(self, *arguments: Any) -> None:
                """Say nothing: a failed case shows what matters."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def serve(self, path: str, answer: Answer | bytes) -> str:
        """Serve this under a path; the whole URL."""
        self.answers[path] = answer if callable(answer) else with_body(answer)
        return f"http://127.0.0.1:{self._server.server_port}{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def with_body(body: bytes) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def with_status(status: int, location: str = "") -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        if location:
            handler.send_header("Location", location)
        body = b"<html>an error page</html>"
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def cut_short(body: bytes, announced: int) -> Answer:
    """Announce more than is sent, then close."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(announced))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    return answer


def held(body: bytes, go_on: threading.Event) -> Answer:
    """Send half, wait for the event (a minute at most), send the rest."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        middle = len(body) // 2
        handler.wfile.write(body[:middle])
        handler.wfile.flush()
        go_on.wait(60)
        try:
            handler.wfile.write(body[middle:])
        except OSError:  # the client went away, which some cases are about
            handler.close_connection = True

    return answer
