"""The engine's events: what becomes of task containers, told when it happens.

The engine filters by kind and label, so what comes is little. It answers the request before it
begins to listen for events itself, and a line may be lost with a connection: hence ``since``,
with which the engine also tells what it still has of the past (its latest 256 events, none from
before its own restart).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dstack_shim.engine.connection import Connection, Grip, Limits, allow_silence
from dstack_shim.engine.protocol import LABEL_IS_TASK, ContainerEvent
from dstack_shim.errors import EngineUnreachable

ACTIONS = ("start", "die", "destroy")
"""What the background step wants to hear of; ``start`` because a container whose start was given
up may run after all."""
_FILTERS = json.dumps(
    {"type": ["container"], "event": list(ACTIONS), "label": [f"{LABEL_IS_TASK}=true"]}
)
_LONGEST_LINE = 1 << 20


class EventLines:
    """Turns the bytes of the stream, one JSON object a line, into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[ContainerEvent]:
        """The events that are whole with these bytes.

        Raises ``EngineUnreachable`` for what is no event: nobody knows what was lost with it.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise EngineUnreachable("a line of the engine's events does not end")
        return [_event(line) for line in lines if line.strip()]


def _event(line: bytes) -> ContainerEvent:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise EngineUnreachable(f"the engine's events are no JSON objects: {line[:100]!r}")
    return ContainerEvent(_id(told), _text(told.get("Action")), _seconds(told.get("timeNano")))


def _id(told: dict[str, Any]) -> str:
    actor = told.get("Actor")
    return _text(actor.get("ID") if isinstance(actor, dict) else None) or _text(told.get("id"))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _seconds(nanoseconds: object) -> float:
    if not isinstance(nanoseconds, int) or not 0 <= nanoseconds < 1 << 63:
        return 0.0
    return nanoseconds / 10**9


class Following:
    """One stream of events, read in a thread and stopped from the event loop."""

    def __init__(
        self,
        connection: Connection,
        limits: Limits,
        on_begin: Callable[[], None],
        on_event: Callable[[ContainerEvent], None],
    ) -> None:
        self._connection = connection
        self._limits = limits
        self._on_begin = on_begin
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._grip = Grip()

    def run(self, since: float) -> None:
        """Read until the stream ends. Raises ``EngineError`` if it never begins, or breaks."""
        params = {"filters": _FILTERS, "since": f"{since:.6f}"}
        lines = EventLines()
        with (
            self._connection.open(
                "GET", "/events", limit=self._limits.ask, params=params
            ) as response,
            self._grip.on(response),
        ):
            allow_silence(response, self._limits.events)
            self._tell(self._on_begin)
            for chunk in response.iter_content(chunk_size=None):
                for event in lines.feed(chunk):
                    self._tell(self._on_event, event)

    def stop(self) -> None:
        """Close the connection; nothing is told from now on."""
        self._grip.cut()

    def _tell(self, tell: Callable[..., None], *args: ContainerEvent) -> None:
        def unless_stopped() -> None:
            if not self._grip.is_cut:
                tell(*args)

        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(unless_stopped)
