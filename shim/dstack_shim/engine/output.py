"""The output of a container as it comes, for who wants to read along.

Apart from :mod:`dstack_shim.engine.docker`: the daemon asks for the last lines only, and must not
keep a connection as long as a person reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from urllib.parse import urlencode

import attrs

from dstack_shim.engine.glance import Glance, local_socket
from dstack_shim.errors import ContainerNotFound

PATIENCE = 3.0
"""Seconds for each answer. A person waits: sooner given up than by the daemon."""

STDERR = 2
"""Which of the two streams a frame is of, in the engine's numbers."""

_STDOUT = 1
_HEAD = 8
_LONGEST_SILENCE = 1e6  # s: as long as somebody reads along; about what poll(2) can wait


@attrs.frozen
class Piece:
    """Some bytes of one stream, cut anywhere."""

    stream: int
    data: bytes


class Frames:
    """Takes the engine's frames apart: a kind, three zeroes, a length and the payload.

    What does not follow that is taken as it is (a container with a terminal has no frames).
    """

    def __init__(self) -> None:
        self._pending = b""
        self._left = 0
        self._stream = _STDOUT
        self._is_raw = False

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The payloads in the next bytes."""
        data = self._pending + data
        self._pending = b""
        while data:
            if self._is_raw:
                yield Piece(_STDOUT, data)
                return
            if self._left:
                payload, data = data[: self._left], data[self._left :]
                self._left -= len(payload)
                yield Piece(self._stream, payload)
            elif not _may_be_head(data):
                self._is_raw = True
            elif len(data) < _HEAD:
                self._pending = data
                return
            else:
                self._stream = data[0]
                self._left = int.from_bytes(data[4:_HEAD], "big")
                data = data[_HEAD:]


def read_output(
    container_id: str,
    *,
    tail: int | None,
    follow: bool,
    timestamps: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Piece]:
    """The last ``tail`` lines of both streams in order (None: all), and what is added to them.

    Raises ``ContainerNotFound``, ``EngineUnreachable``, ``EngineError``.
    """
    wanted = {
        "stdout": "1",
        "stderr": "1",
        "tail": "all" if tail is None else str(tail),
        "follow": "1" if follow else "0",
        "timestamps": "1" if timestamps else "0",
    }
    path = f"/containers/{container_id}/logs"
    local = local_socket(environ)
    if local is not None:
        chunks = Glance(local, PATIENCE).stream(f"{path}?{urlencode(wanted)}", waits=follow)
    else:
        chunks = _from_elsewhere(path, wanted, environ)
    frames = Frames()
    for chunk in chunks:
        yield from frames.feed(chunk)


def _from_elsewhere(
    path: str, wanted: Mapping[str, str], environ: Mapping[str, str]
) -> Iterator[bytes]:
    from dstack_shim.engine.connection import (  # noqa: PLC0415 - slow to load
        Connection,
        Limits,
        Refusal,
    )

    connection = Connection(environ, limits=Limits(connect=PATIENCE), pool_size=1)
    limit = _LONGEST_SILENCE if wanted["follow"] == "1" else PATIENCE
    try:
        with connection.open("GET", path, limit=limit, params=wanted) as response:
            yield from response.iter_content(chunk_size=None)
    except Refusal as refusal:
        if refusal.status == 404:
            raise ContainerNotFound(str(refusal)) from refusal
        raise
    finally:
        connection.close()


def _may_be_head(data: bytes) -> bool:
    return data[0] <= STDERR and data[1:4] == b"\0\0\0"[: len(data[1:4])]
