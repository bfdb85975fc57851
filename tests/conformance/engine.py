"""The engine of the instance, and a socket in front of it where cases watch, answer and break.

:class:`Wire` is a small HTTP/1.1 proxy on a Unix socket. It hands every request to the real engine
unless a :class:`Rule` takes it, and keeps what went by. A shim under test is given its socket.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_END_OF_HEAD = b"\r\n\r\n"
_VERSION = re.compile(r"^/v\d+\.\d+(?=/)")


@dataclass(frozen=True)
class Request:
    """One request of the shim to its engine."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        """The target without the API version, with the query."""
        return _VERSION.sub("", self.target)

    @property
    def wants(self) -> str:
        """The image a pull asks for, whichever way its two parameters are filled."""
        query = parse_qs(urlsplit(self.path).query)
        image, tag = query.get("fromImage", [""])[0], query.get("tag", [""])[0]
        if not tag:
            return image
        return f"{image}@{tag}" if ":" in tag else f"{image}:{tag}"

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """What a rule answers instead of the engine: a plain body, or a stream in chunks.

    ``script`` is called with a function that sends one chunk; the stream ends when it returns,
    by a proper end of the chunked body unless ``cut`` is set.
    """

    status: int = 200
    body: bytes = b""
    script: Callable[[Callable[[bytes], None]], None] | None = None
    cut: bool = False


@dataclass(eq=False)
class Rule:
    """Takes matching requests; ``then`` may answer, change the request, or let it pass (None)."""

    method: str
    path: re.Pattern[str]
    then: Callable[[Request], Reply | Request | None]

    def takes(self, request: Request) -> bool:
        return request.method == self.method and self.path.search(request.path) is not None


class Wire:
    """The socket in front of the engine.

    ``told`` is given each request, ``change`` what the engine answers.
    """

    def __init__(
        self,
        path: Path,
        engine: Path,
        *,
        told: Callable[[Request], None] = lambda _: None,
        change: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.path = path
        self._engine = engine
        self._told = told
        self._change = change
        self._rules: list[Rule] = []
        self._seen: list[Request] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def close(self) -> None:
        self._listener.close()

    def another(self, name: str) -> Wire:
        """A second socket in front of the same engine, with rules of its own."""
        return Wire(self.path.with_name(name), self._engine, told=self._told)

    def forget(self) -> None:
        """Let :meth:`seen` begin anew."""
        with self._lock:
            self._seen.clear()

    def seen(self, method: str = "", path: str = "") -> list[Request]:
        """Requests that went by, those of a method and with a match of ``path`` only."""
        with self._lock:
            return [
                request
                for request in self._seen
                if request.method.startswith(method) and re.search(path, request.path)
            ]

    def ask(self, request: Request) -> tuple[int, bytes]:
        """The engine's own answer to a request: status and body."""
        connection = http.client.HTTPConnection("localhost", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self._engine))
        with contextlib.closing(connection):
            connection.request(request.method, request.target, request.body or None)
            answer = connection.getresponse()
            return answer.status, answer.read()

    @contextlib.contextmanager
    def rule(
        self, method: str, path: str, then: Callable[[Request], Reply | Request | None]
    ) -> Iterator[None]:
        """For a while, ask ``then`` about each matching request; the newest rule is asked first."""
        added = Rule(method, re.compile(path), then)
        with self._lock:
            self._rules.insert(0, added)
        try:
            yield
        finally:
            with self._lock:
                self._rules.remove(added)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            reader = client.makefile("rb")
            while (request := _read_request(reader)) is not None:
                if not self._handle(request, client):
                    return

    def _handle(self, request: Request, client: socket.socket) -> bool:
        """Answer one request; True if the connection can carry another one."""
        self._told(request)
        with self._lock:
            self._seen.append(request)
            rules = [rule for rule in self._rules if rule.takes(request)]
        for rule in rules:
            decided = rule.then(request)
            if isinstance(decided, Reply):
                return _send(decided, client)
            if isinstance(decided, Request):
                request = decided
        self._pass_on(request, client)
        return False

    def _pass_on(self, request: Request, client: socket.socket) -> None:
        """Give the engine the request and the client whatever comes back, until either closes."""
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(str(self._engine))
            engine.sendall(_as_bytes(request))
            threading.Thread(target=_copy, args=(client, engine), daemon=True).start()
            _copy(engine, client, self._change)
            for side in (engine, client):
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)


def _copy(
    source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes] = bytes
) -> None:
    """Copy until the source ends, and say so: a hijacked stream ends one way first."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(change(data))
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _read_request(reader: Any) -> Request | None:
    line = reader.readline().decode("latin-1").strip()
    if not line:
        return None
    method, target, _ = line.split(" ", 2)
    headers: dict[str, str] = {}
    while text := reader.readline().decode("latin-1").strip():
        name, _, value = text.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Request(method, target, headers, _read_body(reader, headers))


def _read_body(reader: Any, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        length = int(headers.get("content-length", "0"))
        return bytes(reader.read(length))
    body = b""
    while size := int(reader.readline().split(b";")[0], 16):
        body += reader.read(size)
        reader.readline()
    reader.readline()
    return body


def _as_bytes(request: Request) -> bytes:
    """The request again, with its body's own length, for a connection used once."""
    headers = {
        name: value
        for name, value in request.headers.items()
        if name not in {"content-length", "transfer-encoding", "connection"}
    }
    if request.body or request.method in {"POST", "PUT"}:
        headers["content-length"] = str(len(request.body))
    headers["connection"] = "Upgrade" if "upgrade" in headers else "close"
    lines = [f"{request.method} {request.target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1") + _END_OF_HEAD + request.body


def _send(reply: Reply, client: socket.socket) -> bool:
    head = f"HTTP/1.1 {reply.status} X\r\nApi-Version: 1.41\r\nContent-Type: application/json\r\n"
    if reply.script is None:
        head += f"Content-Length: {len(reply.body)}\r\n\r\n"
        client.sendall(head.encode() + reply.body)
        return True
    head += "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.sendall(head.encode())

    def chunk(data: bytes) -> None:
        client.sendall(b"%x\r\n%b\r\n" % (len(data), data))

    reply.script(chunk)
    if not reply.cut:
        client.sendall(b"0\r\n\r\n")
    return False


def refusal(status: int, message: str) -> Reply:
    """An error in the engine's own form."""
    return Reply(status, json.dumps({"message": message}).encode())
