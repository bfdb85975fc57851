"""``dstack-shim events``: what the shim did, from its log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from dstack_shim.commands import UNKNOWN_TASK
from dstack_shim.console.log_lines import LOOKED_AT, Event, Growth, last_lines, parse
from dstack_shim.console.options import lines_wanted
from dstack_shim.console.screen import Cell, Screen, as_json, note, screen
from dstack_shim.errors import ShimError
from dstack_shim.settings import Invocation

DEFAULT_LINES = 100
EVERY = 0.3
"""Seconds between two looks at a log that is followed."""

_LEVELS = {"warning": "warn", "critical": "fatal"}
_STYLES = {"warn": "yellow", "error": "red", "fatal": "red", "debug": "dim"}
_SHORT_ID = 8


def run(invocation: Invocation) -> int:
    """Tell the last events, and go on with new ones if wanted."""
    wanted = lines_wanted(invocation, DEFAULT_LINES)
    log = invocation.settings.home() / "shim.log"
    word = invocation.arguments[0] if invocation.arguments else ""
    growth = None
    try:
        if "follow" in invocation.options:
            growth = Growth(log)
        events, is_cut = _last(log, word, wanted)
    except OSError as error:
        raise ShimError(
            f"cannot read {log}: {error.strerror}; --shim-home says where it is"
        ) from error
    tasks = sorted({event.task for event in events} if word else ())
    if len(tasks) > 1 or (word and not tasks and growth is None):
        why = f"fits {len(tasks)} tasks: {', '.join(tasks[:5])}" if tasks else "is in no event"
        note(f"{word[:100]!r} {why}")
        return UNKNOWN_TASK
    here = screen()
    _tell(here, events, as_documents=invocation.json)
    if is_cut and (wanted is None or len(events) < wanted):
        note(f"only the last {LOOKED_AT >> 20} MB of {log} were looked at; --lines all reads more")
    if growth is not None:
        _follow(here, growth, tasks[0] if tasks else word, as_documents=invocation.json)
    return 0


def _last(log: Path, word: str, wanted: int | None) -> tuple[list[Event], bool]:
    """The last events, the oldest first: of the task of this id, else of those it begins."""
    limit = None if wanted is None else LOOKED_AT
    found: list[Event] = []
    is_cut = False
    for is_exact in (True, False) if word else (False,):
        lines, is_cut = last_lines(log, limit)
        found = list(islice(_matching(lines, word, is_exact=is_exact), wanted))
        if found:
            break
    return found[::-1], is_cut


def _matching(lines: Iterator[str], word: str, *, is_exact: bool) -> Iterator[Event]:
    for line in lines:
        if word not in line:
            continue  # most lines, where one task is asked for: not worth reading
        event = parse(line)
        if not word or event.task == word or (not is_exact and event.task.startswith(word)):
            yield event


def _follow(here: Screen, growth: Growth, task: str, *, as_documents: bool) -> None:
    try:
        while True:
            events = [parse(line) for line in growth.lines() if task in line]
            new = [event for event in events if not task or event.task == task]
            _tell(here, new, as_documents=as_documents)
            here.file.flush()
            time.sleep(EVERY)
    finally:
        growth.close()


def _tell(here: Screen, events: Sequence[Event], *, as_documents: bool) -> None:
    for event in events:
        if as_documents:
            here.line(as_json(document(event), indent=None))
        else:
            here.parts(parts(event, is_narrow=here.width is not None))


def document(event: Event) -> dict[str, object]:
    """For programs, one event a line; ``event`` is null for a line that is not of our form."""
    return {
        "time": event.time or None,
        "level": event.level or None,
        "event": event.name or None,
        "task": event.task or None,
        "fields": dict(event.fields),
        "line": None if event.name else event.line,
    }


def parts(event: Event, *, is_narrow: bool) -> tuple[Cell, ...]:
    """The parts of its line; where there is little room, a short time and a short id."""
    if not event.name:
        return (Cell(event.line),)
    level = _LEVELS.get(event.level, event.level)
    task = event.task or "-"
    moment = event.time
    if is_narrow:
        moment, task = moment[5:19].replace("T", " "), task[:_SHORT_ID]
    details = [f"{name}={text}" for name, text in event.fields.items() if name != "task"]
    return (
        Cell(f"{moment}  "),
        Cell(f"{level:<5}  ", _STYLES.get(level, "")),
        Cell(f"{task:<{_SHORT_ID}}  "),
        Cell(f"{event.name:<16}", "bold"),
        Cell("  " + " ".join(details) if details else ""),
    )
