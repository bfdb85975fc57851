"""What an engine tells of its containers, asked of the real one and of the fake alike."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dstack_shim.engine.protocol import LABEL_IS_TASK, ContainerEvent, ContainerState, Engine
from dstack_shim.errors import EngineUnreachable
from tests.eventually import eventually_async
from tests.lab.fake_engine import Program
from tests.lab.worlds import RUNS_ON, World, job_spec, listed, run


class Listener:
    """Follows the engine's events in the background."""

    def __init__(self, engine: Engine, since: float) -> None:
        self.heard: list[ContainerEvent] = []
        self._begun = asyncio.Event()
        self.stream = asyncio.ensure_future(
            engine.events(since, self._begun.set, self.heard.append)
        )

    async def begun(self) -> None:
        """Wait for the engine's word that it tells from now on."""
        begin = asyncio.ensure_future(self._begun.wait())
        await asyncio.wait((begin, self.stream), timeout=10, return_when="FIRST_COMPLETED")
        assert begin.done()

    async def hears(self, *expected: tuple[str, str]) -> None:
        """Wait until these (container, action) were told, in this order."""

        def all_are_told() -> bool:
            return len(self.heard) >= len(expected)

        await eventually_async(all_are_told)
        assert [(event.container_id, event.action) for event in self.heard] == [*expected]


@pytest.fixture
async def listen(world: World) -> AsyncIterator[Callable[..., Listener]]:
    listeners: list[Listener] = []

    def listen(since: float | None = None) -> Listener:
        listeners.append(Listener(world.engine, time.time() if since is None else since))
        return listeners[-1]

    yield listen
    for listener in listeners:
        listener.stream.cancel()
        await asyncio.wait((listener.stream,))


async def test_what_becomes_of_a_task_container_is_told(
    world: World, listen: Callable[..., Listener]
) -> None:
    listener = listen()
    await listener.begun()
    began = time.time()
    container_id = await run(world, RUNS_ON)
    await listener.hears((container_id, "start"))
    await world.engine.stop(container_id, 0)
    await listener.hears((container_id, "start"), (container_id, "die"))
    await world.engine.remove(container_id)
    await listener.hears((container_id, "start"), (container_id, "die"), (container_id, "destroy"))
    assert [event.is_end for event in listener.heard] == [False, True, True]
    assert began - 1 < listener.heard[0].at <= listener.heard[-1].at < time.time() + 1


async def test_a_container_that_was_told_dead_is_so_when_inspected_though_the_list_may_be_behind(
    world: World, listen: Callable[..., Listener]
) -> None:
    listener = listen()
    await listener.begun()
    container_id = await run(world, Program(after=0.2, code=7))
    await listener.hears((container_id, "start"), (container_id, "die"))
    details = await world.engine.inspect(container_id)
    assert (details.container.state, details.exit_code) == (ContainerState.EXITED, 7)

    async def is_listed_so() -> bool:
        container = await listed(world.engine, container_id)
        return container is not None and container.state is ContainerState.EXITED

    await eventually_async(is_listed_so)


async def test_only_containers_of_tasks_are_told_of(
    world: World, listen: Callable[..., Listener]
) -> None:
    listener = listen()
    await listener.begun()
    image = world.image(RUNS_ON)
    other = await world.engine.create(job_spec(image, "other", labels={LABEL_IS_TASK: "no"}))
    await world.engine.start(other)
    ours = await run(world, RUNS_ON, "ours")
    await listener.hears((ours, "start"))


async def test_the_past_is_told_too(world: World, listen: Callable[..., Listener]) -> None:
    began = time.time()
    container_id = await run(world, RUNS_ON)
    await world.engine.stop(container_id, 0)
    listener = listen(began)
    await listener.hears((container_id, "start"), (container_id, "die"))
    later = listen(time.time() + 1)
    await later.begun()
    await world.engine.remove(container_id)
    await later.hears((container_id, "destroy"))


async def test_a_stream_that_nobody_wants_any_more_is_closed_at_once(
    world: World, listen: Callable[..., Listener]
) -> None:
    container_id = await run(world, RUNS_ON)
    before = resources()
    listeners = [listen(time.time() + 1) for _ in range(5)]
    for listener in listeners:
        await listener.begun()
        listener.stream.cancel()
        await asyncio.wait((listener.stream,), timeout=5)
        assert listener.stream.cancelled()
    await eventually_async(lambda: resources() <= before)
    await world.engine.stop(container_id, 0)
    assert [listener.heard for listener in listeners] == [[]] * 5


async def test_a_stream_that_breaks_says_so(world: World, listen: Callable[..., Listener]) -> None:
    listener = listen()
    await listener.begun()
    world.break_streams()
    await asyncio.wait((listener.stream,), timeout=10)
    assert isinstance(listener.stream.exception(), EngineUnreachable)


def resources() -> tuple[int, int]:
    """How many threads follow something, and how many sockets there are to an engine."""
    threads = [thread for thread in threading.enumerate() if thread.name == "engine apart"]
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself
            links.append(str(descriptor.readlink()))
    return len(threads), sum(link.startswith("socket:") for link in links)
