"""A proxy before an engine's socket: tells which requests were made, and spoils the answers.

    with CountingProxy(engine.socket, directory / "p") as proxy:
        shim = start(DOCKER_HOST=proxy.address)
        proxy.spoil(Stall(after=40), path="/containers/json")
        assert proxy.count("GET", "/containers/json") == 1

Requests are read as HTTP, answers are passed on as they come.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

import attrs

_VERSION = re.compile(r"^/v(\d+\.\d+)(?=/)")
_CHUNK = 1 << 16


@attrs.frozen
class Request:
    """One request, its path without the API version, which is "" where there was none."""

    method: str
    path: str
    query: str
    version: str
    headers: dict[str, str] = attrs.field(repr=False)


@attrs.frozen
class Refuse:
    """Close the connection without an answer."""


@attrs.frozen
class Hang:
    """Never answer; the engine is not asked."""


@attrs.frozen
class Reply:
    """Answer this instead of the engine: bytes as they are, anything else as JSON."""

    status: int
    body: Any = b""


@attrs.frozen
class Cut:
    """Pass on so many bytes of the answer, head included, then close."""

    after: int


@attrs.frozen
class Stall:
    """Pass on so many bytes of the answer, head included, then stay silent."""

    after: int


@attrs.frozen
class Mute:
    """Pass on the head of the answer, then stay silent."""


@attrs.frozen
class First:
    """Do this, then pass the request on."""

    do: Callable[[], object]


Spoiler = Refuse | Hang | Reply | Cut | Stall | Mute | First


@attrs.define
class _Rule:
    spoiler: Spoiler
    method: str
    path: re.Pattern[str]
    times: int


class CountingProxy:
    """Listens at ``path`` and passes on to ``upstream``."""

    def __init__(self, upstream: Path, path: Path) -> None:
        self.path = path
        self.address = f"unix://{path}"
        self._upstream = upstream
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._rules: list[_Rule] = []
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None

    def __enter__(self) -> CountingProxy:  # noqa: PYI034 - Self is of Python 3.11
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def requests(self) -> tuple[Request, ...]:
        """All so far, in order."""
        with self._lock:
            return tuple(self._requests)

    def count(self, method: str = "", path: str = "") -> int:
        """How many requests had this method and a path that matches this whole pattern."""
        return sum(
            (not method or request.method == method)
            and (not path or re.fullmatch(path, request.path) is not None)
            for request in self.requests
        )

    def forget(self) -> None:
        """Count from zero."""
        with self._lock:
            self._requests.clear()

    def spoil(
        self, spoiler: Spoiler, *, method: str = "", path: str = ".*", times: int = 1 << 30
    ) -> None:
        """Treat the next ``times`` matching requests this way; earlier rules go first."""
        with self._lock:
            self._rules.append(_Rule(spoiler, method, re.compile(path), times))

    def mend(self) -> None:
        """Forget all rules; connections that hang are closed."""
        with self._lock:
            self._rules.clear()
        self.drop()

    def open(self) -> None:
        """Listen, again after :meth:`close`."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(256)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        """Stop listening, remove the socket, drop every connection."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
        self.drop()

    def drop(self) -> None:
        """Break every connection."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with (
            connection,
            suppress(OSError),
            connection.makefile("rb") as reader,
            closing(_Passage(connection, self._upstream)) as passage,
        ):
            while (head := _read_head(reader)) and self._handle(head, reader, passage):
                pass
        with self._lock:
            self._connections.discard(connection)

    def _handle(self, head: bytes, reader: BinaryIO, passage: _Passage) -> bool:
        """Whether the connection goes on."""
        request = _parse(head)
        spoiler = self._note(request)
        body = _read_body(request, reader)
        if isinstance(spoiler, Refuse):
            return False
        if isinstance(spoiler, Hang):
            return bool(reader.read(1))  # until the other side or mend() closes it
        if isinstance(spoiler, Reply):
            passage.reply(spoiler)
            return True
        if isinstance(spoiler, First):
            spoiler.do()
        passage.forward(head + body, spoiler)
        return True

    def _note(self, request: Request) -> Spoiler | None:
        with self._lock:
            self._requests.append(request)
            for rule in self._rules:
                fits = rule.method in ("", request.method) and rule.path.fullmatch(request.path)
                if fits and rule.times > 0:
                    rule.times -= 1
                    return rule.spoiler
        return None


class _Passage:
    """One client's connection and the one to the engine that belongs to it."""

    def __init__(self, client: socket.socket, upstream: Path) -> None:
        self._client = client
        self._path = upstream
        self._engine: socket.socket | None = None
        self._spoiler: Spoiler | None = None
        self._left = 0

    def close(self) -> None:
        if self._engine is not None:
            with suppress(OSError):
                self._engine.shutdown(socket.SHUT_RDWR)

    def reply(self, what: Reply) -> None:
        body = what.body if isinstance(what.body, bytes) else json.dumps(what.body).encode()
        head = (
            f"HTTP/1.1 {what.status} Spoilt\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._client.sendall(head.encode() + body)

    def forward(self, request: bytes, spoiler: Spoiler | None) -> None:
        self._spoiler = spoiler if isinstance(spoiler, Cut | Stall | Mute) else None
        self._left = spoiler.after if isinstance(spoiler, Cut | Stall) else 0
        if self._engine is None:
            self._engine = socket.socket(socket.AF_UNIX)
            self._engine.connect(str(self._path))
            threading.Thread(target=self._pass_back, args=(self._engine,), daemon=True).start()
        self._engine.sendall(request)

    def _pass_back(self, engine: socket.socket) -> None:
        with engine, suppress(OSError):
            while data := engine.recv(_CHUNK):
                if isinstance(self._spoiler, Mute):
                    # Engines write the head of a stream at once, in one piece.
                    head, end, _ = data.partition(b"\r\n\r\n")
                    data = head + end if end else b""
                elif self._spoiler is not None:
                    data, self._left = data[: self._left], self._left - len(data)
                if data:
                    self._client.sendall(data)
                if isinstance(self._spoiler, Cut) and self._left <= 0:
                    break
            self._client.shutdown(socket.SHUT_RDWR)


def _read_head(reader: BinaryIO) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = reader.readline()
        if not line:
            return b""
        head += line
    return head


def _parse(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    method, target, _ = first.split(" ", 2)
    path, _, query = target.partition("?")
    headers = (line.partition(":") for line in lines)
    fields = {name.strip().lower(): value.strip() for name, _, value in headers}
    version = _VERSION.match(path)
    return Request(method, _VERSION.sub("", path), query, version[1] if version else "", fields)


def _read_body(request: Request, reader: BinaryIO) -> bytes:
    if request.headers.get("transfer-encoding") != "chunked":
        return reader.read(int(request.headers.get("content-length", "0")))
    body = b""
    while True:
        size = reader.readline()
        chunk = reader.read(int(size, 16) + 2)
        body += size + chunk
        if int(size, 16) == 0:
            return body
