"""An image pull as the engine tells it: JSON messages, one a line, until the stream ends.

Pure: bytes go in, progress and a verdict come out. What a message looks like is optional in
every detail, differs between the engine's two image stores, and is written by a registry nobody
vouches for; so nothing in here can fail a pull but the engine's own error message or the lack
of its last word.
"""

from __future__ import annotations

import json
from typing import Any

import attrs
from dstack_shim_contracts.api import ImagePullProgress

from dstack_shim.engine.protocol import Sink
from dstack_shim.errors import PullFailed
from dstack_shim.log import EventLog, event_log

_LONGEST_MESSAGE = 1 << 20
_MOST_LAYERS = 10_000  # an image has at most 127; a hostile stream may name more
_MOST_BYTES = (1 << 63) - 1  # what a server's parser and a 64-bit sum can bear
_BYTES = (None, "", "B", "bytes")
_AT_REST = frozenset({"Already exists", "Pull complete"})


@attrs.define
class _Layer:
    downloaded: int = 0
    extracted: int = 0
    total: int = 0
    at_rest: bool = False


class PullProgress:
    """What has been downloaded and extracted so far, over all layers; sums never fall."""

    def __init__(self) -> None:
        self._layers: dict[str, _Layer] = {}

    @property
    def now(self) -> ImagePullProgress | None:
        """The sums; None until a layer is seen."""
        if not self._layers:
            return None
        layers = self._layers.values()
        return ImagePullProgress(
            downloaded_bytes=_capped(sum(layer.downloaded for layer in layers)),
            extracted_bytes=_capped(sum(layer.extracted for layer in layers)),
            total_bytes=_capped(sum(layer.total for layer in layers)),
            is_total_bytes_final=all(layer.total or layer.at_rest for layer in layers),
        )

    def take(self, message: dict[str, Any]) -> None:
        """Count one message, if it is about a layer."""
        name, status = message.get("id"), message.get("status")
        if not isinstance(name, str) or not isinstance(status, str) or not name:
            return
        if status.startswith("Pulling from "):
            return  # the id of this one is the tag
        if name not in self._layers and len(self._layers) >= _MOST_LAYERS:
            return
        layer = self._layers.setdefault(name, _Layer())
        layer.at_rest = layer.at_rest or status in _AT_REST
        _count(layer, status, *_amounts(message.get("progressDetail")))


def _count(layer: _Layer, status: str, current: int, total: int) -> None:
    """Only upwards: a download that is tried again starts at zero, our sums don't."""
    if status in ("Downloading", "Extracting"):
        layer.total = max(layer.total, total)
    if status == "Downloading":
        layer.downloaded = max(layer.downloaded, current)
    if status == "Extracting":
        layer.extracted = max(layer.extracted, current)
    if status in ("Download complete", "Extracting", "Pull complete"):
        layer.downloaded = max(layer.downloaded, layer.total)
    if status == "Pull complete":
        layer.extracted = max(layer.extracted, layer.total)


def _amounts(detail: object) -> tuple[int, int]:
    """Current and total in bytes, 0 where not told. The containerd store extracts in seconds."""
    if not isinstance(detail, dict) or detail.get("units") not in _BYTES:
        return 0, 0
    return _whole(detail.get("current")), _whole(detail.get("total"))


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return _capped(max(value, 0))


def _capped(value: int) -> int:
    return min(value, _MOST_BYTES)


class PullStream:
    """Reads the stream of one pull: copies it to a sink, counts it, and knows how it ended."""

    def __init__(self, sink: Sink | None, log: EventLog | None = None) -> None:
        self._sink = sink
        self._log = log or event_log()
        self._progress = PullProgress()
        self._pending = b""
        self._skipping = False
        self._error: str | None = None
        self._has_last_word = False

    @property
    def progress(self) -> ImagePullProgress | None:
        """The sums so far; None until a layer is seen."""
        return self._progress.now

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream, cut anywhere."""
        self._copy(data)
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False  # this is the end of a message too long to keep
            else:
                self._take_line(line)
        if len(self._pending) > _LONGEST_MESSAGE:
            self._pending, self._skipping = b"", True

    def finish(self) -> None:
        """The stream has ended.

        Raises ``PullFailed`` with the engine's words, or if it never said that it has the image.
        """
        if self._pending and not self._skipping:
            self._take_line(self._pending)
        if self._error is not None:
            raise PullFailed(self._error)
        if not self._has_last_word:
            raise PullFailed("the pull ended without the engine saying that it has the image")

    def _copy(self, data: bytes) -> None:
        if self._sink is None:
            return
        try:
            self._sink.write(data)
        except (OSError, ValueError) as error:  # a full disk, a closed file
            self._log.warning("pull.log_failed", error=error)
            self._sink = None

    def _take_line(self, line: bytes) -> None:
        message = _parse(line)
        if message is None:
            return
        error = _error_text(message)
        if error is not None:
            self._error = self._error or error
            return
        status = message.get("status")
        if isinstance(status, str) and status.startswith("Status: ") and not message.get("id"):
            self._has_last_word = True
        self._progress.take(message)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _error_text(message: dict[str, Any]) -> str | None:
    """The text of an error message, None if it is not one."""
    detail = message.get("errorDetail")
    told = [detail.get("message")] if isinstance(detail, dict) else []
    told.append(message.get("error"))
    for text in told:
        if isinstance(text, str) and text:
            return text
    return "the engine reported an error without words" if detail or message.get("error") else None
