"""The engine's events, as far as the background step is concerned: they wake it, no more.

What an event says is never believed: it is a reason to ask. So an event that comes twice or late
costs a list, and one that is lost costs time only. That is why it matters to know whether the
stream can be relied on: while it can, the step lists seldom.

The ends it told of are remembered, because the list may be behind: Docker tells that a container
died, then takes its mounts and network away, and only then changes what its list says.

Nothing falls between two streams, or between the start of the shim and the first: each stream
is asked for what happened since the last event of the one before, and when it begins the step
lists once, for an engine that was restarted remembers nothing.
"""

from __future__ import annotations

import asyncio
from functools import partial

from dstack_shim.clock import Clock
from dstack_shim.engine.protocol import ContainerEvent, Engine
from dstack_shim.errors import EngineError
from dstack_shim.log import EventLog

OVERLAP = 1.0
"""Seconds that a stream is asked for again: clocks and stamps are not that exact."""
PATIENCE = 2.0
"""Seconds within which the event must come of an end that a list has shown."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two streams, doubled each time one does not live for :data:`STEADY`."""
STEADY = 10.0
_REMEMBERED = 1000


class Watch:
    """Follows the engine's events and wakes whoever waits for :attr:`wake`."""

    def __init__(self, engine: Engine, clock: Clock, log: EventLog) -> None:
        self.wake = asyncio.Event()
        self._engine = engine
        self._clock = clock
        self._log = log
        self._stream: asyncio.Future[None] | None = None
        self._began_at: float | None = None
        self._is_doubted = False
        self._latest = 0.0
        self._ended: dict[str, None] = {}
        self._was_told: str | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether an end of a container would be heard of."""
        return self._began_at is not None and not self._is_doubted

    def has_told_end(self, container_id: str) -> bool:
        """Whether the container has ended by what was told, whatever a list says."""
        return container_id in self._ended

    def disprove(self, container_id: str) -> None:
        """The engine says that it runs, asked after that was told."""
        self._ended.pop(container_id, None)

    async def run(self) -> None:
        """Follow the engine's events, again and again; never ends but when cancelled."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        while True:
            began = loop.time()
            self._lost(await self._follow())
            lived = loop.time() - began
            pause = FIRST_PAUSE if lived >= STEADY else min(pause * 2, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    def ended(self, container_id: str, at: float | None) -> None:
        """A list has shown the end of a container, which was at ``at`` (unix seconds) or lately.

        If the stream does not tell of it, now that it could have, the stream is silent for
        another reason than that nothing happens.
        """
        stream = self._stream
        if stream is None or self._began_at is None or container_id in self._ended:
            return
        if (self._clock.now() - PATIENCE if at is None else at) < self._began_at:
            return  # it may have happened before the stream began
        loop = asyncio.get_running_loop()
        loop.call_later(PATIENCE, partial(self._doubt, container_id, stream))

    async def _follow(self) -> str:
        """Follow one stream to its end, and say why it ended."""
        since = self._latest or self._clock.now()
        self._stream = stream = asyncio.ensure_future(
            self._engine.events(since - OVERLAP, self._begin, self._hear)
        )
        try:
            await asyncio.wait((stream,))
        finally:
            self._began_at = None
            stream.cancel()
            await asyncio.wait((stream,))
        if stream.cancelled():
            return "it is silent about what a list shows"
        error = stream.exception()
        if error is None:
            return "the engine ended it"
        if not isinstance(error, EngineError):
            self._log.fault("events.broken", error)
        return str(error)

    def _begin(self) -> None:
        self._began_at = self._clock.now()
        self._was_told = None
        self._log.info("events.followed")
        self.wake.set()

    def _hear(self, event: ContainerEvent) -> None:
        self._latest = max(self._latest, event.at)
        if self._began_at is not None and event.at >= self._began_at:
            self._is_doubted = False  # told anew, not from the engine's memory
        if event.is_end:
            self._ended[event.container_id] = None
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
        self.wake.set()

    def _doubt(self, container_id: str, stream: asyncio.Future[None]) -> None:
        if container_id not in self._ended and stream is self._stream:
            self._is_doubted = True
            stream.cancel()

    def _lost(self, why: str) -> None:
        if why != self._was_told:  # an engine that is away for long is told of once
            self._log.warning("events.lost", why=why)
        self._was_told = why
