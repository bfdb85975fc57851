"""``dstack-shim logs``: what a task's container wrote."""

from __future__ import annotations

import asyncio
import codecs
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator

from dstack_shim.commands import FAILED, UNKNOWN_TASK
from dstack_shim.console.options import lines_wanted
from dstack_shim.console.ps import asked_for, tell_problems
from dstack_shim.console.screen import as_json, note, screen
from dstack_shim.console.sources import Sources, look
from dstack_shim.console.text import shown_output
from dstack_shim.console.view import TaskView
from dstack_shim.engine.output import STDERR, Piece, read_output
from dstack_shim.errors import ContainerNotFound, EngineError, UsageError
from dstack_shim.settings import Invocation

DEFAULT_LINES = 200
_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT[0-9:.]+Z) (.*)", re.ASCII | re.DOTALL)
_LONGEST_LINE = 8192  # characters of one line, and of what is kept while it does not end


def run(invocation: Invocation) -> int:
    """Print the output of one task's container."""
    tail = lines_wanted(invocation, DEFAULT_LINES)
    raw = "raw" in invocation.options
    if raw and sys.stdout.isatty():
        raise UsageError("--raw: not to a terminal; send it to a file or a pipe")
    sources = asyncio.run(look(invocation.settings))
    task = asked_for(invocation.arguments[0], sources)
    if task is None:
        return UNKNOWN_TASK
    if task.container is None:
        return _without_container(task, sources)
    follow = "follow" in invocation.options
    pieces = read_output(
        task.container.id,
        tail=tail,
        follow=follow,
        timestamps=invocation.json or "timestamps" in invocation.options,
    )
    try:
        if raw:
            _print_raw(pieces)
        else:
            lines = _lines(pieces, returns_end=not invocation.json)
            # The engine counts a bar that is drawn over and over as one line.
            _print(lines if follow or tail is None else deque(lines, tail), invocation.json)
    except ContainerNotFound:
        return _without_container(task, sources)
    except EngineError as error:
        note(str(error))
        return FAILED
    return 0


def _without_container(task: TaskView, sources: Sources) -> int:
    """Say why there is no output, and print the last words that are left of it."""
    tell_problems(sources)
    if sources.engine_answers:
        note(f"task {task.id} has no container, and its output is gone with it")
    else:
        note("the output is with the engine, which does not answer")
    words = task.record.termination_message
    if words:
        note("these are the last words in its record")
        here = screen()
        for line in words[: _LONGEST_LINE * 10].splitlines():
            here.line(shown_output(line, utf8=here.utf8))
    return FAILED


def _print_raw(pieces: Iterator[Piece]) -> None:
    for piece in pieces:
        sys.stdout.buffer.write(piece.data)
        sys.stdout.buffer.flush()


def _print(lines: Iterable[tuple[int, str]], as_documents: bool) -> None:
    here = screen()
    for stream, line in lines:
        if as_documents:
            here.line(as_json(_document(stream, line), indent=None))
        else:
            here.line(shown_output(line, utf8=here.utf8))
        here.file.flush()


def _lines(pieces: Iterator[Piece], *, returns_end: bool) -> Iterator[tuple[int, str]]:
    """Stream and text of each line, as soon as it is whole."""
    streams: dict[int, Lines] = {}
    for piece in pieces:
        lines = streams.setdefault(piece.stream, Lines(returns_end=returns_end))
        for line in lines.feed(piece.data):
            yield piece.stream, line
    for stream, lines in streams.items():
        for line in lines.finish():
            yield stream, line


def _document(stream: int, line: str) -> dict[str, object]:
    """``time`` is as the engine wrote it down, null for the later parts of a long line."""
    found = _STAMPED.fullmatch(line)
    return {
        "time": found[1] if found else None,
        "stream": "stderr" if stream == STDERR else "stdout",
        "line": found[2] if found else line,
    }


class Lines:
    """Bytes of one stream, cut anywhere, as lines. One without an end comes in parts.

    With ``returns_end`` a carriage return ends a line, too: a bar that is drawn over and over is
    a line a time, and nothing is drawn over unseen.
    """

    def __init__(self, *, returns_end: bool = True) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._returns_end = returns_end

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that are whole with the next bytes."""
        text = self._pending + self._decoder.decode(data)
        # A return at the very end may be half of a line end.
        text, held = (text[:-1], "\r") if text.endswith("\r") else (text, "")
        text = text.replace("\r\n", "\n")
        if self._returns_end:
            text = text.replace("\r", "\n")
        *whole, rest = text.split("\n")
        for line in whole:
            yield from _in_parts(line)
        while len(rest) > _LONGEST_LINE:
            yield rest[:_LONGEST_LINE]
            rest = rest[_LONGEST_LINE:]
        self._pending = rest + held

    def finish(self) -> Iterator[str]:
        """What is left at the end of the stream."""
        rest = (self._pending + self._decoder.decode(b"", final=True)).rstrip("\r")
        self._pending = ""
        if rest:
            yield from _in_parts(rest)


def _in_parts(line: str) -> Iterator[str]:
    for start in range(0, max(len(line), 1), _LONGEST_LINE):
        yield line[start : start + _LONGEST_LINE]
