"""Threads for blocking calls to the engine.

Not ``concurrent.futures``: its threads are joined when the interpreter exits, so one call to an
engine that hangs would keep the shim from going away. These are daemons; a call that was begun
is never interrupted, only no longer waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_Deliver = Callable[[], None]
_Work = Callable[[], _Deliver]
"""Does a call and returns how to tell its outcome."""


class Workers:
    """At most ``size`` threads that take calls in order, started when first needed.

    With ``size`` 1 all short calls come from one thread, which is what crash tests count
    system calls in.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._started = 0
        self._outstanding = 0  # calls that wait or run
        self._closed = False
        self._lock = threading.Lock()
        self._calls: SimpleQueue[_Work | None] = SimpleQueue()

    async def run(self, call: Callable[[], T]) -> T:
        """Do a short call on one of the threads. Raises ``RuntimeError`` once closed."""
        outcome, work = _prepare(call)
        with self._lock:
            if self._closed:
                raise RuntimeError("the workers are closed")
            self._outstanding += 1
            grow = self._started < min(self._outstanding, self.size)
            self._started += grow
            name = f"engine {self._started}"
            self._calls.put(work)  # under the lock: never behind the word that ends the threads
        if grow:
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return await outcome

    async def run_apart(self, call: Callable[[], T]) -> T:
        """Do a call that may take long on a thread of its own, so that none waits behind it."""
        outcome, work = _prepare(call)

        def do() -> None:
            work()()

        threading.Thread(target=do, name="engine apart", daemon=True).start()
        return await outcome

    def close(self) -> None:
        """Let the threads end; a call under way ends by itself."""
        with self._lock:
            self._closed = True
            for _ in range(self._started):
                self._calls.put(None)

    def _work(self) -> None:
        while (work := self._calls.get()) is not None:
            deliver = work()
            # First: whoever learns of the outcome may call again, and this thread is free.
            with self._lock:
                self._outstanding -= 1
            deliver()


def _prepare(call: Callable[[], T]) -> tuple[asyncio.Future[T], _Work]:
    """A future for the running loop, and the work that settles it from any thread."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settled_by(settle: Callable[[], None]) -> _Deliver:
        def unless_given_up() -> None:
            if not outcome.done():
                settle()

        def deliver() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(unless_given_up)

        return deliver

    def work() -> _Deliver:
        if outcome.cancelled():
            return lambda: None  # given up before it was begun
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            failure = error
            return settled_by(lambda: outcome.set_exception(failure))
        return settled_by(lambda: outcome.set_result(result))

    return outcome, work
