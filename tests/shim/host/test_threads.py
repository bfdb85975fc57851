"""Blocking work on a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dstack_shim.host.threads import call_in_thread


async def test_result_and_error_are_the_calls_own() -> None:
    def fail() -> None:
        raise LookupError("not here")

    assert await call_in_thread(lambda: 5, name="x", cancelled=threading.Event()) == 5
    with pytest.raises(LookupError, match="not here"):
        await call_in_thread(fail, name="x", cancelled=threading.Event())


async def test_loop_goes_on_while_the_call_blocks() -> None:
    go = threading.Event()
    waiting = asyncio.ensure_future(
        call_in_thread(lambda: go.wait(20), name="x", cancelled=threading.Event())
    )
    await asyncio.sleep(0)

    go.set()

    assert await waiting


async def test_limit_sets_the_event_and_leaves_the_thread_alone() -> None:
    cancelled = threading.Event()

    with pytest.raises(asyncio.TimeoutError):
        await call_in_thread(
            lambda: cancelled.wait(20), name="x", cancelled=cancelled, timeout=0.01
        )

    assert cancelled.is_set()


@pytest.mark.parametrize("linger", [True, False])
async def test_cancelled_caller_waits_for_the_thread_only_if_it_lingers(linger: bool) -> None:
    cancelled, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        cancelled.wait(20)
        may_end.wait(20)
        ended.set()

    task = asyncio.ensure_future(
        call_in_thread(work, name="x", cancelled=cancelled, linger=linger)
    )
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=0.05)
    assert cancelled.is_set()
    assert task.done() is not linger

    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 20)


def test_answer_that_comes_after_the_loop_is_gone_is_dropped() -> None:
    cancelled = threading.Event()
    thread: list[threading.Thread] = []

    def work() -> None:
        thread.append(threading.current_thread())
        cancelled.wait(20)

    async def leave() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await call_in_thread(work, name="x", cancelled=threading.Event(), timeout=0.05)

    asyncio.run(leave())
    cancelled.set()
    thread[0].join(20)

    assert not thread[0].is_alive()
