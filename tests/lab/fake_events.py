"""What an engine in memory tells of its containers, and to whom."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import attrs

from dstack_shim.engine.protocol import ContainerEvent
from dstack_shim.errors import EngineError

_KEPT = 256


@attrs.define(eq=False)
class Follower:
    """Somebody who is told what becomes of containers; ``ended`` with None or with an error."""

    on_event: Callable[[ContainerEvent], None]
    ended: asyncio.Future[None]

    def end(self, error: EngineError | None = None) -> None:
        """End the stream, as an engine does that goes away, or break it."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class TellsEvents:
    """The part of an engine that tells: now to its ``followers``, later what it has of the past."""

    def __init__(self) -> None:
        self.followers: list[Follower] = []
        self.past: deque[ContainerEvent] = deque(maxlen=_KEPT)

    def happened(self, event: ContainerEvent) -> None:
        """Remember the event and tell of it."""
        self.past.append(event)
        self.tell(event)

    def tell(self, event: ContainerEvent) -> None:
        """Tell whoever follows."""
        for follower in list(self.followers):
            if not follower.ended.done():
                follower.on_event(event)

    def restart(self) -> None:
        """The engine goes and comes back; it has forgotten what it has told."""
        self.past.clear()
        self.end_streams()

    def end_streams(self, error: EngineError | None = None) -> None:
        """Every stream of events ends, or breaks."""
        for follower in self.followers:
            follower.end(error)

    async def _follow(
        self,
        since: float,
        on_begin: Callable[[], None],
        on_event: Callable[[ContainerEvent], None],
    ) -> None:
        follower = Follower(on_event, asyncio.get_running_loop().create_future())
        self.followers.append(follower)
        try:
            on_begin()
            for event in tuple(self.past):
                if event.at >= since:
                    on_event(event)
            await follower.ended
        finally:
            self.followers.remove(follower)
