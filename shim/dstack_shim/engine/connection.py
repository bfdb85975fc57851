"""Blocking HTTP to the Docker Engine, over the transport of the ``docker`` SDK.

The only module that imports the SDK. Its low-level client gives the connection (unix socket,
tcp, tls, from ``DOCKER_HOST`` and its kin); the requests are made here, on purpose:

- the SDK's ``containers.list`` inspects each container: our list is one request;
- its ``create_container`` and ``pull`` add proxies and credentials they find in root's
  ``~/.docker/config.json``: ours send what the task says and nothing else;
- its ``logs`` inspects first, its ``stop`` knows one limit for connecting and waiting alike.

API version: what the engine offers, but not above :data:`NEWEST_API`, whose shapes we know.
Engines 20.10 (1.41) to 29 (which refuses clients below 1.44) meet within that.

An answer that did not come whole is :class:`~dstack_shim.errors.EngineUnreachable`: refused or
vanished socket, time out, broken protocol, a body cut short or not JSON. An answer of 300 and
above is a :class:`Refusal`, with the engine's own words.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import attrs
import requests
import urllib3
from docker import APIClient
from docker.errors import DockerException
from docker.utils import kwargs_from_env

from dstack_shim.errors import EngineError, EngineUnreachable

NEWEST_API = (1, 47)

_LARGEST_ANSWER = 64 << 20
_CHUNK = 1 << 16
# The engine was replaced by one of another generation: a new version must be agreed on.
_VERSION_REFUSED = "client version"


class Refusal(EngineError):
    """The engine answered with an error status; its text is the engine's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@attrs.frozen
class Limits:
    """How long, in seconds, an engine may keep us waiting for the next byte of an answer.

    A whole answer may take three times that.
    """

    connect: float = 3.0
    greeting: float = 4.0
    """Agreeing on the API version and asking who is there, at the start."""
    ask: float = 15.0
    """List, inspect, last lines."""
    work: float = 120.0
    """Create, start, remove: disks, drivers and hooks take their time."""
    stop: float = 30.0
    """Stop, on top of the grace it was asked to give."""
    pull: float = 1200.0
    """A whole pull, silences of minutes included."""
    events: float = 3600.0
    """Nothing happens to any container; longer than that is asked for anew."""


@attrs.frozen
class Answer:
    """A whole answer; 304 counts as one."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body's JSON, or ``EngineUnreachable``: the answer was cut short, or no engine's."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise EngineUnreachable(
                f"the engine's answer is cut short or not JSON: {error}"
            ) from error


class Connection:
    """One engine; any thread may call, each call waits until it has its whole answer."""

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        limits: Limits,
        pool_size: int,
    ) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        self.address = self._environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._limits = limits
        self._pool_size = pool_size
        self._lock = threading.Lock()
        self._client: APIClient | None = None
        self._version = ""

    @property
    def api_version(self) -> str:
        """The version agreed on; "" before the first call."""
        return self._version

    def call(
        self,
        method: str,
        path: str,
        *,
        limit: float,
        params: Mapping[str, str] | None = None,
        body: object = None,
    ) -> Answer:
        """Send one request, read its whole answer.

        Raises ``EngineUnreachable``, :class:`Refusal`.
        """

        def send() -> Answer:
            with self.open(method, path, limit=limit, params=params, body=body) as response:
                return Answer(response.status_code, self._read(response, limit * 3))

        try:
            return send()
        except Refusal as refusal:
            if refusal.status != 400 or _VERSION_REFUSED not in str(refusal):
                raise
        # Refused before it was looked at, so it may be sent again.
        self._version = ""
        return send()

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        *,
        limit: float,
        params: Mapping[str, str] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[requests.Response]:
        """Send one request and hand out its answer with the body still to be read.

        Reading it must happen inside, where a broken connection becomes ``EngineUnreachable``.
        Raises that, and :class:`Refusal` for an error status.
        """
        version = self._version or self.agree_on_version()
        with self._send(
            method, f"/v{version}{path}", limit=limit, params=params, body=body, headers=headers
        ) as response:
            if response.status_code >= 300 and response.status_code != 304:
                raise Refusal(response.status_code, _words(response, self._read(response, limit)))
            yield response

    def agree_on_version(self) -> str:
        """Ask for the engine's API versions and take the newest both sides know."""
        limit = self._limits.greeting
        with self._send("GET", "/version", limit=limit) as response:
            body = self._read(response, limit)
            if response.status_code != 200:
                raise Refusal(response.status_code, _words(response, body))
        offered = Answer(response.status_code, body).json()
        if not isinstance(offered, dict):
            raise EngineUnreachable(f"{self.address} is no Docker Engine")
        newest, oldest = _number(offered.get("ApiVersion")), _number(offered.get("MinAPIVersion"))
        if newest is None:
            raise EngineUnreachable(f"{self.address} is no Docker Engine: no ApiVersion")
        # An engine of the far future may not know our newest: better its words than none.
        chosen = max(min(NEWEST_API, newest), oldest or (0, 0))
        version = ".".join(map(str, chosen))
        self._version = version
        return version

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    @contextmanager
    def _send(
        self,
        method: str,
        path: str,
        *,
        limit: float,
        params: Mapping[str, str] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[requests.Response]:
        client = self._ready_client()
        with self._unreachable_if_broken():
            response = client.request(
                method,
                client.base_url + path,
                params=params,
                json=body,
                headers=headers,
                stream=True,
                timeout=(self._limits.connect, limit),
                allow_redirects=False,
            )
            with response:
                _check_framed(response)
                yield response

    def _ready_client(self) -> APIClient:
        with self._lock:
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> APIClient:
        try:
            # Given a version the client asks nobody; it is not used, paths carry their own.
            client = APIClient(
                version=".".join(map(str, NEWEST_API)),
                max_pool_size=self._pool_size,
                **kwargs_from_env(environment=self._environ),
            )
        except (DockerException, OSError, ValueError, AttributeError, TypeError) as error:
            # A bad DOCKER_HOST or certificate path, or a ~/.docker/config.json of another shape.
            raise EngineError(f"{self.address}: the client cannot be set up: {error}") from error
        # No proxies, no ~/.netrc: nothing but the call itself decides what is sent.
        client.trust_env = False
        return client

    def _read(self, response: requests.Response, limit: float) -> bytes:
        """The whole body, within ``limit`` seconds and a size no honest engine reaches."""
        deadline = time.monotonic() + limit
        body = bytearray()
        for chunk in response.iter_content(_CHUNK):
            body += chunk
            if len(body) > _LARGEST_ANSWER or time.monotonic() > deadline:
                raise EngineUnreachable(f"the engine's answer does not end ({len(body)} bytes)")
        return bytes(body)

    @contextmanager
    def _unreachable_if_broken(self) -> Iterator[None]:
        try:
            yield
        except (
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            http.client.HTTPException,
            OSError,
        ) as error:
            raise EngineUnreachable(
                f"no answer from the Docker Engine at {self.address}: {_cause(error)}"
            ) from error


class Grip:
    """Holds the connection of an answer that is being read, so that any thread may cut it off.

    Closing a connection does not wake a thread that reads from it, shutting it down does. The
    descriptor held is a copy: the number of the original may be another's by then.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    @contextmanager
    def on(self, response: requests.Response) -> Iterator[None]:
        """Hold this answer's connection while it is read."""
        with suppress(OSError, AttributeError), self._lock:
            self._socket = socket.socket(fileno=os.dup(response.raw.fileno()))
        if self.is_cut:
            self.cut()
        try:
            yield
        finally:
            with self._lock:
                if self._socket is not None:
                    self._socket.close()
                    self._socket = None

    def cut(self) -> None:
        """End the reading, at once even while the engine says nothing.

        Before the first byte of an answer there is no connection to take hold of: it is then
        cut as soon as the engine speaks.
        """
        self.is_cut = True
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


def allow_silence(response: requests.Response, seconds: float) -> None:
    """From here on let the engine be silent for so long within this answer."""
    connection = response.raw.connection
    if connection is not None and connection.sock is not None:
        connection.sock.settimeout(seconds)


def _check_framed(response: requests.Response) -> None:
    """Raise for an answer whose head was cut short, which the HTTP library takes as it comes.

    ``HTTP/1.1 404 Not Fo`` would pass as "no such container". An engine's answer says how long
    its body is, or cannot have one.
    """
    framed = {"Content-Length", "Transfer-Encoding"} & {name.title() for name in response.headers}
    if not framed and response.status_code not in (204, 304):
        raise EngineUnreachable("the engine's answer is cut short")


def _words(response: requests.Response, body: bytes) -> str:
    """What the engine says is wrong."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    message = answer.get("message") if isinstance(answer, dict) else None
    if isinstance(message, str) and message.strip():
        return message.strip()
    text = body.decode("utf-8", "replace").strip()[:1000]
    return text or f"the engine answered {response.status_code} {response.reason}"


def _cause(error: BaseException) -> str:
    """The innermost reason in a nest of exceptions, in words."""
    seen = error
    while True:
        inner = next(
            (item for item in (*seen.args, getattr(seen, "reason", None)) if _is_error(item)),
            None,
        )
        if inner is None:
            break
        seen = inner
    if isinstance(seen, OSError) and seen.strerror:
        return seen.strerror
    if isinstance(seen, TimeoutError | urllib3.exceptions.TimeoutError):
        return "timed out"
    return str(seen) or type(seen).__name__


def _is_error(item: object) -> bool:
    return isinstance(item, BaseException)


def _number(version: object) -> tuple[int, int] | None:
    major, dot, minor = version.partition(".") if isinstance(version, str) else ("", "", "")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        return None
    return int(major), int(minor)
