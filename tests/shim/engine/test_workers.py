from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from dstack_shim.engine.workers import Workers
from tests.eventually import eventually_async


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.fixture
def threads() -> Callable[[], list[threading.Thread]]:
    """The threads of workers made since the test began."""
    before = set(threading.enumerate())

    def threads() -> list[threading.Thread]:
        new = [thread for thread in threading.enumerate() if thread not in before]
        return [thread for thread in new if thread.name.startswith("engine")]

    return threads


async def test_a_result_arrives(workers: Workers) -> None:
    assert await workers.run(lambda: 7) == 7
    assert await workers.run_apart(lambda: 8) == 8


async def test_an_error_arrives_where_it_is_awaited(workers: Workers) -> None:
    def fail() -> None:
        raise LookupError("here")

    for run in (workers.run, workers.run_apart):
        with pytest.raises(LookupError, match="here"):
            await run(fail)


async def test_calls_run_beside_each_other_up_to_the_size(workers: Workers) -> None:
    meeting = threading.Barrier(2)
    await asyncio.gather(*(workers.run(lambda: meeting.wait(5)) for _ in range(2)))


async def test_one_worker_takes_all_calls_in_order() -> None:
    workers = Workers(1)
    seen: list[tuple[int, str]] = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    await asyncio.gather(*(workers.run(partial(note, number)) for number in range(50)))
    assert seen == [(number, "engine 1") for number in range(50)]
    workers.close()


async def test_threads_are_made_only_when_needed(
    threads: Callable[[], list[threading.Thread]], workers: Workers
) -> None:
    for _ in range(20):
        await workers.run(lambda: None)
    assert len(threads()) == 1


async def test_a_call_apart_holds_up_nobody() -> None:
    workers, release = Workers(1), threading.Event()
    apart = asyncio.ensure_future(workers.run_apart(lambda: release.wait(5)))
    assert await workers.run(lambda: 1) == 1
    release.set()
    assert await apart
    workers.close()


async def test_what_was_begun_is_finished_after_its_caller_gave_up(workers: Workers) -> None:
    begun, release, finished = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(5)
        finished.set()

    call = asyncio.ensure_future(workers.run(work))
    await eventually_async(begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    release.set()
    await eventually_async(finished.is_set)


async def test_what_was_not_begun_is_not_done_once_its_caller_gave_up() -> None:
    workers, release, done = Workers(1), threading.Event(), []
    first = asyncio.ensure_future(workers.run(lambda: release.wait(5)))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(workers.run(lambda: done.append(2)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    await first
    await workers.run(lambda: None)
    assert done == []
    workers.close()


async def test_close_ends_idle_threads(
    threads: Callable[[], list[threading.Thread]],
) -> None:
    workers = Workers(2)
    await workers.run(lambda: None)
    workers.close()
    await eventually_async(lambda: not threads())


async def test_after_close_nothing_waits_for_ever() -> None:
    workers = Workers(2)
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        await workers.run(lambda: None)
