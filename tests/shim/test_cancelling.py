"""What was begun is over before a cancelled caller goes on."""

from __future__ import annotations

import asyncio

import pytest

from dstack_shim.cancelling import to_its_end


class Work:
    """Something that takes until it is told to end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.ended = False

    async def run(self) -> str:
        await self.may_end.wait()
        self.ended = True
        return "done"

    async def fail(self) -> str:
        await self.run()
        raise LookupError("its own")


@pytest.fixture
async def work() -> Work:
    return Work()


async def test_the_result_is_the_works(work: Work) -> None:
    work.may_end.set()
    assert await to_its_end(work.run()) == "done"


async def test_an_error_is_the_works(work: Work) -> None:
    work.may_end.set()
    with pytest.raises(LookupError):
        await to_its_end(work.fail())


@pytest.mark.parametrize("cancels", [1, 3])
@pytest.mark.parametrize("what", ["run", "fail"])
async def test_a_cancelled_caller_waits_for_the_end(work: Work, what: str, cancels: int) -> None:
    caller = asyncio.ensure_future(to_its_end(getattr(work, what)()))
    for _ in range(cancels):
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.ended


async def test_work_that_is_cancelled_itself_is_no_hindrance() -> None:
    never = asyncio.get_running_loop().create_future()
    caller = asyncio.ensure_future(to_its_end(never))
    await asyncio.sleep(0)
    never.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
