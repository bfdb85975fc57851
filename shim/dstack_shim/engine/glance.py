"""One look at an engine on this host, by the standard library alone.

A person waits for it, and the SDK takes longer to load than the rest of a short command. Only
the engine's own socket is looked at like this; one elsewhere, over TLS perhaps, is asked as the
daemon asks, by :mod:`dstack_shim.engine.docker`.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from dstack_shim.engine.engine_json import (
    Unreadable,
    container_from_list,
    details_from_inspect,
)
from dstack_shim.engine.protocol import LABEL_IS_TASK, Container, ContainerDetails, EngineInfo
from dstack_shim.errors import ContainerNotFound, EngineError, EngineUnreachable

DEFAULT = "unix:///var/run/docker.sock"

_SCHEME = "unix://"
_LARGEST_ANSWER = 64 << 20
_CHUNK = 1 << 16
_ONLY_TASKS = {"all": "1", "filters": json.dumps({"label": [f"{LABEL_IS_TASK}=true"]})}


def local_socket(environ: Mapping[str, str]) -> str | None:
    """The path of the engine's socket, None if ``environ`` points elsewhere."""
    address = environ.get("DOCKER_HOST") or DEFAULT
    return address.removeprefix(_SCHEME) if address.startswith(_SCHEME) else None


class Glance:
    """Asks the engine behind one socket; ``patience`` is in seconds for each answer."""

    def __init__(self, path: str, patience: float) -> None:
        self._path = path
        self._patience = patience

    def ping(self) -> EngineInfo:
        """Who is there.

        Raises ``EngineUnreachable``, ``EngineError``.
        """
        version, info = self._ask("/version"), self._ask("/info")
        return EngineInfo(
            version=_text(version, "Version"),
            api_version=_text(version, "ApiVersion"),
            root_dir=_text(info, "DockerRootDir"),
        )

    def list_task_containers(self) -> tuple[Container, ...]:
        """All containers labelled as tasks; one that cannot be read is left out.

        Raises ``EngineUnreachable``, ``EngineError``.
        """
        answer = self._ask("/containers/json?" + urlencode(_ONLY_TASKS))
        if not isinstance(answer, list):
            raise EngineUnreachable("the engine's list of containers is no list")
        found = []
        for item in answer:
            try:
                found.append(container_from_list(item))
            except Unreadable:
                continue  # the daemon's log names it
        return tuple(found)

    def inspect(self, container_id: str) -> ContainerDetails:
        """Everything about one container.

        Raises ``ContainerNotFound``, ``EngineUnreachable``, ``EngineError``.
        """
        try:
            return details_from_inspect(self._ask(f"/containers/{container_id}/json"))
        except Unreadable as why:
            raise EngineError(f"the engine's words on container {container_id}: {why}") from why

    def stream(self, path: str, *, waits: bool) -> Iterator[bytes]:
        """An answer as it comes; one that ``waits`` may be silent for as long as it likes.

        Raises ``ContainerNotFound``, ``EngineUnreachable``, ``EngineError``.
        """
        with self._asked(path, waits=waits) as response:
            if response.status != http.client.OK:
                _content(response.status, response.read(_LARGEST_ANSWER))
            while chunk := response.read1(_CHUNK):
                yield chunk

    def _ask(self, path: str) -> Any:
        with self._asked(path) as response:
            body = response.read(_LARGEST_ANSWER + 1)
        if response.length:  # what is left of the announced length
            raise EngineUnreachable("the engine's answer is cut short, or has no end")
        return _content(response.status, body)

    @contextmanager
    def _asked(self, path: str, *, waits: bool = False) -> Iterator[http.client.HTTPResponse]:
        connection = _Connection(self._path, self._patience)
        try:
            # Without a version in the path an engine answers in its newest, which we read too.
            connection.request("GET", path, headers={"Host": "docker"})
            response = connection.getresponse()
            if waits:
                connection.sock.settimeout(None)
            yield response
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise EngineUnreachable(
                f"no answer from the Docker Engine at {_SCHEME}{self._path}: {why}"
            ) from error
        finally:
            connection.close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, patience: float) -> None:
        super().__init__("localhost", timeout=patience)
        self._path = path
        self._patience = patience

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._patience)
        self.sock.connect(self._path)


def _content(status: int, body: bytes) -> Any:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EngineUnreachable(
            f"the engine's answer is cut short or not JSON: {error}"
        ) from error
    if status == http.client.OK:
        return answer
    words = _text(answer, "message") or f"the engine answered {status}"
    raise ContainerNotFound(words) if status == http.client.NOT_FOUND else EngineError(words)


def _text(answer: Any, key: str) -> str:
    value = answer.get(key) if isinstance(answer, dict) else None
    return value if isinstance(value, str) else ""
