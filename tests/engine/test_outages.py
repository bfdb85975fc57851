"""The engine away and back: what it says about containers then, measured, not assumed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from dstack_shim.engine.docker import DockerEngine
from dstack_shim.engine.protocol import ContainerDetails, ContainerState, Engine
from dstack_shim.errors import EngineError, EngineUnreachable
from tests.eventually import eventually_async
from tests.lab.engine import PrivateEngine
from tests.lab.fake_engine import Program
from tests.lab.images import RUNS_ON, Images
from tests.lab.proxy import CountingProxy
from tests.lab.worlds import job_spec, listed, script_of

Make = Callable[[bool], PrivateEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def make(live_restore: bool) -> PrivateEngine:
        private = PrivateEngine(live_restore=live_restore, shares_network=True)
        private.start()
        made.append(private)
        return private

    yield make
    for private in made:
        private.close()


@pytest.fixture
async def connected() -> AsyncIterator[Callable[[PrivateEngine], DockerEngine]]:
    engines: list[DockerEngine] = []

    def connect(private: PrivateEngine) -> DockerEngine:
        engines.append(DockerEngine(private.environ))
        return engines[-1]

    yield connect
    for engine in engines:
        await engine.close()


async def run(engine: Engine, private: PrivateEngine, job: str) -> str:
    client = private.client()
    container_id = await engine.create(job_spec(Images(client).job(job)))
    client.close()
    await engine.start(container_id)
    return container_id


async def back(engine: Engine, container_id: str) -> ContainerDetails:
    """Its details once the engine has made up its mind about it."""

    async def settled() -> ContainerDetails | None:
        details = await engine.inspect(container_id)
        return details if not details.container.state.alive else None

    details = await eventually_async(settled, within=30)
    assert details is not None
    return details


@pytest.mark.parametrize("how", ["kill", "term"])
async def test_with_live_restore_a_container_outlives_its_engine(
    make: Make, connected: Callable[[PrivateEngine], DockerEngine], how: str
) -> None:
    private = make(True)
    engine = connected(private)
    container_id = await run(engine, private, RUNS_ON)
    before = await engine.inspect(container_id)
    getattr(private, how)()
    with pytest.raises(EngineUnreachable):
        await engine.list_task_containers()
    private.start()
    container = await listed(engine, container_id)
    assert container is not None
    assert container.state is ContainerState.RUNNING
    assert await engine.inspect(container_id) == before


async def test_an_exit_while_the_engine_is_away_keeps_its_code(
    make: Make, connected: Callable[[PrivateEngine], DockerEngine]
) -> None:
    private = make(True)
    engine = connected(private)
    container_id = await run(engine, private, "echo before; sleep 1; exit 7")

    async def has_printed() -> bool:
        return await engine.last_lines(container_id, 1) == "before"

    await eventually_async(has_printed)
    private.kill()
    await eventually_async(lambda: not private.has_container_processes(), within=10)
    private.start()
    details = await back(engine, container_id)
    assert (details.container.state, details.exit_code) == (ContainerState.EXITED, 7)
    # What it prints while nobody listens is lost: the daemon itself writes the log.
    assert await engine.last_lines(container_id, 5) == "before"


async def test_stopped_without_live_restore_it_stops_its_containers(
    make: Make, connected: Callable[[PrivateEngine], DockerEngine]
) -> None:
    private = make(False)
    engine = connected(private)
    listens = Program(after=None, on_term=3, lines=("listening",))
    container_id = await run(engine, private, script_of(listens))

    async def is_listening() -> bool:
        return await engine.last_lines(container_id, 1) == "listening"

    await eventually_async(is_listening)
    private.restart()
    details = await back(engine, container_id)
    assert (details.container.state, details.exit_code) == (ContainerState.EXITED, 3)


@pytest.mark.slow
async def test_killed_without_live_restore_it_kills_its_containers_when_back(
    make: Make, connected: Callable[[PrivateEngine], DockerEngine]
) -> None:
    """Only the real engine takes its time for this (12 s), silent all the while."""
    private = make(False)
    engine = connected(private)
    container_id = await run(engine, private, RUNS_ON)
    private.kill()
    private.start(within=40)
    details = await back(engine, container_id)
    assert (details.container.state, details.exit_code) == (ContainerState.EXITED, 137)


async def test_a_power_cut_ends_containers_with_255(
    make: Make, connected: Callable[[PrivateEngine], DockerEngine]
) -> None:
    private = make(True)
    engine = connected(private)
    container_id = await run(engine, private, RUNS_ON)
    Images(private.client()).job(RUNS_ON, tag="never-started")
    created = await engine.create(job_spec("job:never-started", "other"))
    private.power_off()
    private.start()
    details = await back(engine, container_id)
    assert (details.container.state, details.exit_code) == (ContainerState.EXITED, 255)
    container = await listed(engine, created)
    assert container is not None
    assert container.state is ContainerState.CREATED


async def test_a_vanished_socket_is_unreachable_until_it_is_back(
    private_engine: PrivateEngine, proxy: CountingProxy, images: Images
) -> None:
    engine = DockerEngine({"DOCKER_HOST": proxy.address})
    container_id = await engine.create(job_spec(images.job(RUNS_ON)))
    await engine.start(container_id)
    proxy.close()
    for _ in range(3):
        with pytest.raises(EngineUnreachable):
            await engine.list_task_containers()
    proxy.open()
    container = await listed(engine, container_id)
    assert container is not None
    assert container.state is ContainerState.RUNNING
    await engine.close()


async def test_a_restarted_engine_is_reached_over_the_same_client(
    make: Make, connected: Callable[[PrivateEngine], DockerEngine]
) -> None:
    """Connections kept open to the old one must not spoil the first call to the new one."""
    private = make(False)
    engine = connected(private)
    for _ in range(3):
        assert await engine.list_task_containers() == ()
        private.restart()
    assert await engine.list_task_containers() == ()
    with pytest.raises(EngineError):
        await engine.create(job_spec("nobody/nothing:1"))
