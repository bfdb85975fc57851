"""The shim's log read back: the counterpart of :mod:`dstack_shim.log`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

LOOKED_AT = 8 << 20
"""Bytes at the end of the log that are looked at unless all of it is asked for."""

_CHUNK = 1 << 18
_HEAD = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ([A-Za-z]+(?: \d+)?) (\S+)(?: (.*))?"
)
_FIELD = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?: |$)')


@attrs.frozen
class Event:
    """One line of the log. A line of another shim, or of nobody, is an event without a name."""

    line: str
    time: str = ""
    level: str = ""
    name: str = ""
    fields: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def task(self) -> str:
        """The id of the task it is about, "" for none."""
        return self.fields.get("task", "")


def parse(line: str) -> Event:
    """Read one line. What is not of our form is kept as it is, without a name."""
    head = _HEAD.fullmatch(line)
    if head is None:
        return Event(line)
    fields: dict[str, str] = {}
    rest, place = head[4] or "", 0
    while place < len(rest):
        field = _FIELD.match(rest, place)
        if field is None:
            return Event(line)
        fields[field[1]] = _value(field[2])
        place = field.end()
    return Event(line, head[1], head[2].lower(), head[3], fields)


def last_lines(path: Path, limit: int | None) -> tuple[Iterator[str], bool]:
    """The lines of the file, the last first, and whether there are more than were looked at.

    ``limit`` in bytes, None: all. The file may grow meanwhile. Raises ``OSError``.
    """
    end = path.stat().st_size
    start = 0 if limit is None else max(end - limit, 0)
    return _backwards(path, start, end), start > 0


def _backwards(path: Path, start: int, end: int) -> Iterator[str]:
    with path.open("rb") as file:
        pending = b""
        while end > start:
            begin = max(start, end - _CHUNK)
            file.seek(begin)
            first, *others = (file.read(end - begin) + pending).split(b"\n")
            for line in reversed(others):
                if line:
                    yield _text(line)
            # Its beginning is in the chunk before; a line without an end must not grow for ever.
            pending, end = first[:LOOKED_AT], begin
        if pending and start == 0:
            yield _text(pending)


class Growth:
    """What is added to a file from now on, also once another file has taken its name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._pending = b""

    def lines(self) -> Iterator[str]:
        """The lines that were added since the last call."""
        while data := self._file.read(_CHUNK):
            *whole, self._pending = (self._pending + data).split(b"\n")
            yield from (_text(line) for line in whole if line)
        if self._is_another():
            self._file.close()
            self._file, self._pending = self._path.open("rb"), b""

    def close(self) -> None:
        """Read no more."""
        self._file.close()

    def _is_another(self) -> bool:
        try:
            named, opened = self._path.stat(), os.fstat(self._file.fileno())
        except FileNotFoundError:
            return False
        moved = (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino)
        return moved or named.st_size < self._file.tell()


def _value(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")
