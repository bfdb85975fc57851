"""An event loop whose time is a number: when nothing is ready, it jumps to the next timer.

The order of everything is the order of ``asyncio``'s own loops (first come, first served), so a
run is repeated exactly by its seed. What the loop runs can belong to an :class:`Owner`, a process
in the simulated world: once that is dead, none of its callbacks is run any more, wherever it was.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, cast

T = TypeVar("T")

START = 1_700_000_000.0
"""What the clocks of a simulated world show in the beginning (unix seconds)."""

TOO_MANY_TURNS = 2_000_000
"""Callbacks after which a run is taken for one that never ends."""


class Deadlock(Exception):
    """Somebody waits, and nothing is left that could wake them."""


class Dead(BaseException):
    """Raised in what is left of a dead process, should it still try to reach the world."""


class Owner:
    """A process: everything begun in its context ends with it, at whatever ``await`` it stands."""

    def __init__(self) -> None:
        self.dead = False
        self.context: Context = copy_context()
        self.context.run(OWNER.set, self)
        self.tasks: list[asyncio.Task[Any]] = []

    def die(self) -> None:
        """Stop here and now; nothing of it runs any more."""
        self.dead = True

    def bury(self) -> None:
        """Clean up after :meth:`die`, from outside of the owner's own code.

        Its coroutines are closed, which runs their ``finally`` blocks: harmless, because all
        that leads out of a dead process raises :class:`Dead`.
        """
        _close(self.tasks)


def _close(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if not task.done():
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio has no other way to say that this is meant
            coroutine = task.get_coro()
            assert coroutine is not None
            with suppress(Dead, RuntimeError):  # an await in a finally block
                coroutine.close()
    tasks.clear()


OWNER: ContextVar[Owner | None] = ContextVar("owner", default=None)


class _Handle:
    """A callback to come; the part of ``asyncio.Handle`` that is used."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "when")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: Context,
    ) -> None:
        self.when = when
        self.callback = callback
        self.args = args
        self.context = context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class VirtualLoop:
    """The loop; only what ``asyncio``'s tasks, futures, locks and timers need of one."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        """What reached the exception handler: a fault in the code under test."""
        self.turns = 0
        self._now = 0.0
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._number = 0
        self._self = cast("asyncio.AbstractEventLoop", self)
        self._unowned: list[asyncio.Task[Any]] = []

    # Running.

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end. Raises what it raises, and :class:`Deadlock`."""
        before = events._get_running_loop()
        events._set_running_loop(self._self)
        try:
            task = self.create_task(main)
            done, ready = task.done, self._ready
            while not done():
                if not ready:
                    self._jump()
                handle = ready.popleft()
                context = handle.context
                owner = context.get(OWNER)
                if handle.is_cancelled or (owner is not None and owner.dead):
                    continue
                self.turns += 1
                try:
                    context.run(handle.callback, *handle.args)
                except Exception as error:  # noqa: BLE001 - as every event loop does
                    self.call_exception_handler({"message": "callback failed", "exception": error})
            return task.result()
        finally:
            events._set_running_loop(before)

    def _jump(self) -> None:
        if self.turns > TOO_MANY_TURNS:
            raise Deadlock(f"no end after {self.turns} callbacks")
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock("everybody waits and no timer is set")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            if not handle.is_cancelled:
                self._ready.append(handle)

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        handle = _Handle(0.0, callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> _Handle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> _Handle:
        handle = _Handle(when, callback, args, copy_context() if context is None else context)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._self)

    def create_task(
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[T]:
        if context is not None:
            return context.run(self.create_task, coro, name=name)  # type: ignore[no-any-return]  # of Any
        task = asyncio.Task(coro, loop=self._self, name=name or "simulated")
        owner = OWNER.get()
        (self._unowned if owner is None else owner.tasks).append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Dead):
            self.broken.append(f"{context.get('message')}: {error!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def forget(self) -> None:
        """Drop all that is still to come, so that nothing of a finished run lives on."""
        self._ready.clear()
        self._timers.clear()
        _close(self._unowned)


class LoopClock:
    """The time of day of a virtual loop; see :class:`dstack_shim.clock.Clock`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return START + self._loop.time()


def outside(loop: VirtualLoop, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run it for nobody: what belongs to the world outlives every process in it."""
    return _NOBODY.run(loop.create_task, coroutine)


def nobody() -> Context:
    """A context of no process."""
    return _NOBODY.copy()


_NOBODY = Context()
