"""Blocking work on a daemon thread of its own, awaited with a limit and cancelled politely."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def call_in_thread(
    call: Callable[[], T],
    *,
    name: str,
    cancelled: threading.Event,
    timeout: float | None = None,
    linger: bool = False,
) -> T:
    """Run ``call`` on a new daemon thread and return what it returns.

    When the caller is cancelled, or ``timeout`` seconds have passed, ``cancelled`` is set and
    the thread goes on alone: it must look at the event and clean up after itself. With
    ``linger`` a cancelled caller first waits for the thread to end; cancelled again, it does
    not.

    Daemon threads, because work that the kernel does not let go of must not keep the process
    from exiting.

    Raises:
        asyncio.TimeoutError: the limit has passed.
        RuntimeError: no thread can be started.
    """
    outcome = _begin(call, name)
    try:
        done, _ = await asyncio.wait([outcome], timeout=timeout)
    except asyncio.CancelledError:
        cancelled.set()
        if linger:
            await asyncio.wait([outcome])
        raise
    if not done:
        cancelled.set()
        raise asyncio.TimeoutError
    return outcome.result()


def _begin(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Start the thread; the future of the running loop is settled by it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    outcome.add_done_callback(_mark_seen)

    def deliver(settle: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle)

    def work() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            failure = error
            deliver(lambda: outcome.set_exception(failure))
        else:
            deliver(lambda: outcome.set_result(result))

    threading.Thread(target=work, name=name, daemon=True).start()
    return outcome


def _mark_seen(outcome: asyncio.Future[T]) -> None:
    # A cancelled caller never asks; asyncio would log "exception was never retrieved".
    if not outcome.cancelled():
        outcome.exception()
