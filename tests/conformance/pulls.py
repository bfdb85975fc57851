"""Pulls whose stream a case writes itself, message by message."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.conformance.engine import Reply, Request, Wire

SUCCESS = {"status": "Status: Downloaded newer image for conformance/pulled:latest"}


def line(message: dict[str, Any] | str) -> bytes:
    """One message as the engine sends it."""
    text = message if isinstance(message, str) else json.dumps(message)
    return f"{text}\r\n".encode()


def layer(id_: str, status: str, **detail: Any) -> dict[str, Any]:
    """A message about a layer; ``detail`` is its progressDetail."""
    return {"id": id_, "status": status, "progressDetail": detail}


class Stream:
    """A pull under way: the case says what the engine says."""

    def __init__(self) -> None:
        self._go_on = threading.Condition()
        self._waiting: list[bytes] = []
        self._ended = False
        self.asked: list[Request] = []
        self.closed = threading.Event()

    def say(self, *messages: dict[str, Any] | str) -> None:
        """Send these messages now."""
        with self._go_on:
            self._waiting += [line(message) for message in messages]
            self._go_on.notify()

    def end(self) -> None:
        """End the stream properly."""
        with self._go_on:
            self._ended = True
            self._go_on.notify()

    def succeed(self) -> None:
        """What a finished pull ends with."""
        self.say(SUCCESS)
        self.end()

    def answer(self, request: Request) -> Reply:
        """The rule for :meth:`Wire.rule`."""
        self.asked.append(request)
        return Reply(script=self._send)

    def _send(self, send: Callable[[bytes], None]) -> None:
        try:
            while True:
                with self._go_on:
                    self._go_on.wait_for(lambda: self._waiting or self._ended, timeout=600)
                    messages, self._waiting = self._waiting, []
                    ended = self._ended
                for message in messages:
                    send(message)
                if ended:
                    return
        except OSError:
            self.closed.set()
            raise


@contextmanager
def scripted(wire: Wire, image: str = "") -> Iterator[Stream]:
    """For a while, every pull (of an image whose name has this in it) is this stream."""
    stream = Stream()
    with wire.rule("POST", f"^/images/create.*{image}", stream.answer):
        yield stream
        stream.end()


def endless(closed: threading.Event) -> Callable[[Callable[[bytes], None]], None]:
    """A script for :class:`Reply`: a pull that never ends, and says when its client went away."""

    def script(send: Callable[[bytes], None]) -> None:
        sent = 0
        try:
            while True:
                sent += 1000
                send(line(layer("base", "Downloading", current=sent, total=999_000)))
                time.sleep(0.02)  # the pace of a registry, not a wait for something
        except OSError:
            closed.set()
            raise

    return script
