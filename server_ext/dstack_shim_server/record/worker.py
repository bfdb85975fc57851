"""A thread with an event loop of its own: what runs in it never holds up who asks for it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs

from dstack_shim_server import guard

T = TypeVar("T")

# Seconds that what was handed in last may take to end.
LEFT_OVER = 5.0


@attrs.define
class Worker:
    """Runs one coroutine for as long as it lives, and others that are handed in."""

    _ending: asyncio.Event = attrs.Factory(asyncio.Event)
    _woken: asyncio.Event = attrs.Factory(asyncio.Event)
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    # Whether the loop still takes work, and the lock of whoever asks: what is handed in is run.
    _open: bool = False
    _door: threading.Lock = attrs.Factory(threading.Lock)

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the thread; `main` is to return soon after `ending`."""
        # A daemon: a database that does not answer must not keep the server from ending.
        self._loop, self._open = asyncio.new_event_loop(), True
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, main), name="shim-restart-record", daemon=True
        )
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Tell the coroutine to return and wait for it, but not longer than this."""
        self._call(self._ending.set)
        self._call(self._woken.set)
        if self._thread is not None:
            self._thread.join(timeout)

    def wake(self) -> None:
        """Let the coroutine go on from `wait`. From any thread."""
        self._call(self._woken.set)

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run another coroutine in the thread. Raises RuntimeError if that has ended."""
        with self._door:
            if self._loop is None or not self._open:
                raise RuntimeError("the record's thread does not run")
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    # For the coroutine ---------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """Whether it is to return."""
        return self._ending.is_set()

    async def rest(self, seconds: float) -> None:
        """Do nothing for so long, unless it is to return."""
        await _within(self._ending, seconds)

    async def wait(self, seconds: float | None) -> None:
        """Wait to be woken, or for so long."""
        await _within(self._woken, seconds)
        self._woken.clear()

    def _run(
        self, loop: asyncio.AbstractEventLoop, main: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            guard.shielded(
                "keeping the record", lambda: loop.run_until_complete(main()), lambda: None
            )
            with self._door:
                self._open = False
            loop.run_until_complete(_handed_in_last())
        finally:
            loop.close()

    def _call(self, function: Callable[[], None]) -> None:
        with self._door:
            if self._loop is not None and self._open:
                self._loop.call_soon_threadsafe(function)


async def _handed_in_last() -> None:
    await asyncio.sleep(0)  # what was handed in becomes a task only now
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=LEFT_OVER)


async def _within(event: asyncio.Event, seconds: float | None) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except (TimeoutError, asyncio.TimeoutError):  # two classes up to Python 3.10
        return
