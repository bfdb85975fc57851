"""What a shim waits for until its own limit: a pull and an install that go on for ever.

Their limits are 20 and 10 minutes, so both begin with the run, on a shim of their own, and are
looked at after all other cases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler

from tests.conformance.engine import Reply, Request
from tests.conformance.pulls import layer, line
from tests.conformance.shim import Shim, Task

_PACE = 1.0  # s between two signs of life
_ANNOUNCED = 1 << 30  # bytes: more than ever come


class Endless:
    """An answer that goes on until its client has had enough; it notes when that was."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._given_up = threading.Event()
        self._over = threading.Event()

    def pull(self, _: Request) -> Reply:
        """A pull that moves and never ends."""

        def script(send: Callable[[bytes], None]) -> None:
            message = line(layer("base", "Downloading", current=1, total=_ANNOUNCED))
            self._go_on(lambda: send(message))

        return Reply(script=script)

    def download(self, handler: BaseHTTPRequestHandler) -> None:
        """A file that comes byte by byte."""
        handler.send_response(200)
        handler.send_header("Content-Length", str(_ANNOUNCED))
        handler.end_headers()
        handler.close_connection = True

        def send() -> None:
            handler.wfile.write(b"#")
            handler.wfile.flush()

        self._go_on(send)

    def wait(self, within: float) -> float:
        """How long the client had patience; it must lose it within this many seconds."""
        assert self._given_up.wait(within), "it is still waiting"
        assert self.seconds is not None
        return self.seconds

    def close(self) -> None:
        """Let it end if nobody gave up."""
        self._over.set()

    def _go_on(self, send: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            while not self._over.wait(_PACE):
                send()
        except OSError:
            self.seconds = time.monotonic() - began
            self._given_up.set()


@dataclass
class Deadlines:
    """Both, under way."""

    shim: Shim
    task: Task
    pull: Endless
    install: Endless
