"""The virtual loop: time that jumps, asyncio's own order, processes that can die anywhere."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from tests.simulation import loop as virtual
from tests.simulation.loop import Deadlock, Owner, VirtualLoop, outside


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


def test_time_jumps_to_the_next_timer(loop: VirtualLoop) -> None:
    async def main() -> list[float]:
        times = []
        for seconds in (0.5, 3600.0, 0.0):
            await asyncio.sleep(seconds)
            times.append(loop.time())
        return times

    assert loop.run(main()) == [0.5, 3600.5, 3600.5]


def test_timers_of_one_instant_come_in_the_order_they_were_set(loop: VirtualLoop) -> None:
    async def main() -> list[int]:
        seen: list[int] = []

        async def note(number: int) -> None:
            await asyncio.sleep(5)
            seen.append(number)

        await asyncio.gather(*(note(number) for number in range(20)))
        return seen

    assert loop.run(main()) == list(range(20))


def test_what_asyncio_offers_works(loop: VirtualLoop) -> None:
    async def main() -> None:
        lock, event = asyncio.Lock(), asyncio.Event()
        loop.call_later(2, event.set)
        async with lock:
            await event.wait()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 7)
        assert loop.time() == 9
        done, late = await asyncio.wait((asyncio.ensure_future(asyncio.sleep(60)),), timeout=1)
        assert (len(done), len(late)) == (0, 1)
        for task in late:
            task.cancel()

    loop.run(main())


def test_waiting_for_nothing_is_a_deadlock(loop: VirtualLoop) -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="everybody waits"):
        loop.run(main())
    loop.forget()


def test_a_run_without_an_end_is_noticed(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "TOO_MANY_TURNS", 1000)

    async def main() -> None:
        for _ in count():
            await asyncio.sleep(1)

    with pytest.raises(Deadlock, match="no end"):
        loop.run(main())
    loop.forget()


def test_a_callback_that_fails_is_told(loop: VirtualLoop) -> None:
    async def main() -> None:
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    loop.run(main())
    assert "ZeroDivisionError" in loop.broken[0]


def test_nothing_of_a_dead_process_runs_any_more(loop: VirtualLoop) -> None:
    seen = []

    async def work() -> None:
        try:
            while True:
                await asyncio.sleep(1)
                seen.append(loop.time())
        finally:
            seen.append(-1.0)
            await asyncio.sleep(1)  # what cannot be done by a process that is no more

    async def main() -> None:
        owner = Owner()
        owner.context.run(loop.create_task, work())
        await asyncio.sleep(2.5)
        owner.die()
        await asyncio.sleep(10)
        assert seen == [1.0, 2.0]
        owner.bury()

    loop.run(main())
    assert seen == [1.0, 2.0, -1.0]
    assert loop.broken == []


def test_what_a_process_has_begun_outside_outlives_it(loop: VirtualLoop) -> None:
    seen = []

    async def request() -> None:
        await asyncio.sleep(5)
        seen.append("done")

    async def process() -> None:
        outside(loop, request())

    async def main() -> None:
        owner = Owner()
        await owner.context.run(loop.create_task, process())
        owner.die()
        await asyncio.sleep(6)

    loop.run(main())
    assert seen == ["done"]
