"""What an engine is to the core, asked of the real one and of the fake alike.

Whatever a simulation concludes from the fake rests on this file: a behaviour the core depends
on that is not here is a behaviour nobody compared.
"""

from __future__ import annotations

import asyncio
import io

import attrs
import pytest
from dstack_shim_contracts.api import ImagePullProgress

from dstack_shim.engine.protocol import (
    LABEL_IS_TASK,
    ContainerDetails,
    ContainerState,
    Credentials,
    Engine,
    Mount,
    PortBinding,
)
from dstack_shim.errors import (
    ContainerNotFound,
    EngineError,
    EngineUnreachable,
    ImageNotFound,
    NameConflict,
    PullCancelled,
    PullFailed,
    StartFailed,
)
from tests.eventually import eventually_async
from tests.lab.fake_engine import Program
from tests.lab.worlds import LOGIN, RUNS_ON, World, job_spec, listed, run


@pytest.fixture
def engine(world: World) -> Engine:
    return world.engine


@pytest.fixture
def registry_world(world: World) -> World:
    if not world.has_registry:
        pytest.skip("this machine has no docker-registry")
    return world


async def finished(engine: Engine, container_id: str) -> ContainerDetails:
    """Its details once it has ended by itself."""

    async def ended() -> ContainerDetails | None:
        details = await engine.inspect(container_id)
        return details if details.container.state.finished else None

    details = await eventually_async(ended)
    assert details is not None
    return details


async def pull(
    world: World, reference: str, credentials: Credentials | None = None
) -> list[ImagePullProgress]:
    seen: list[ImagePullProgress] = []
    await world.engine.pull(reference, credentials, None, seen.append, asyncio.Event())
    return seen


async def test_ping_says_who_is_there(engine: Engine) -> None:
    info = await engine.ping()
    assert info.version
    assert info.api_version.startswith("1.")
    assert info.root_dir.startswith("/")


async def test_no_containers_are_an_empty_list(engine: Engine) -> None:
    assert await engine.list_task_containers() == ()


async def test_a_created_container_is_listed_as_created(world: World) -> None:
    container_id = await world.engine.create(job_spec(world.image(RUNS_ON)))
    container = await listed(world.engine, container_id)
    assert container is not None
    assert container.state is ContainerState.CREATED
    assert (container.name, container.task_id, container.home) == (
        "job-1",
        "task-1",
        "/home/of/shim",
    )
    assert container.network_mode == "host"
    assert container.ports == ()


async def test_a_created_container_was_never_started(world: World) -> None:
    container_id = await world.engine.create(job_spec(world.image(RUNS_ON)))
    details = await world.engine.inspect(container_id)
    assert (details.started_at, details.finished_at, details.exit_code) == (None, None, 0)


async def test_only_containers_of_tasks_are_listed(world: World) -> None:
    image = world.image(RUNS_ON)
    await world.engine.create(job_spec(image, "other", labels={LABEL_IS_TASK: "false"}))
    ours = await world.engine.create(job_spec(image, "ours"))
    assert [container.id for container in await world.engine.list_task_containers()] == [ours]


async def test_mounts_are_listed(world: World) -> None:
    spec = attrs.evolve(job_spec(world.image(RUNS_ON)), mounts=(Mount("/tmp", "/data"),))
    container = await listed(world.engine, await world.engine.create(spec))
    assert container is not None
    assert container.mounts == (Mount("/tmp", "/data", "bind"),)


async def test_a_name_is_taken_once_and_says_by_whom(world: World) -> None:
    image = world.image(RUNS_ON)
    first = await world.engine.create(job_spec(image))
    with pytest.raises(NameConflict) as caught:
        await world.engine.create(job_spec(image, task_id="task-2"))
    assert caught.value.container_id == first


async def test_a_missing_image_creates_nothing(engine: Engine) -> None:
    with pytest.raises(ImageNotFound, match=r"(?i)no such image"):
        await engine.create(job_spec("nobody/nothing:1"))
    assert await engine.list_task_containers() == ()


async def test_a_missing_mount_source_creates_nothing(world: World) -> None:
    spec = attrs.evolve(job_spec(world.image(RUNS_ON)), mounts=(Mount("/no/such", "/data"),))
    with pytest.raises(EngineError, match="source path does not exist: /no/such"):
        await world.engine.create(spec)
    assert await world.engine.list_task_containers() == ()


async def test_an_unknown_runtime_creates_nothing(world: World) -> None:
    spec = attrs.evolve(job_spec(world.image(RUNS_ON)), runtime="unheard-of")
    with pytest.raises(EngineError, match=r"(?i)unknown.*runtime.*unheard-of"):
        await world.engine.create(spec)
    assert await world.engine.list_task_containers() == ()


async def test_a_started_container_runs(world: World) -> None:
    container_id = await run(world, RUNS_ON)
    container = await listed(world.engine, container_id)
    assert container is not None
    assert container.state is ContainerState.RUNNING
    details = await world.engine.inspect(container_id)
    assert details.started_at is not None
    assert details.started_at >= details.container.created - 1
    assert details.finished_at is None


async def test_starting_what_runs_changes_nothing(world: World) -> None:
    container_id = await run(world, RUNS_ON)
    before = await world.engine.inspect(container_id)
    await world.engine.start(container_id)
    assert await world.engine.inspect(container_id) == before


@pytest.mark.parametrize("code", [0, 1, 7, 255])
async def test_an_exit_code_arrives(world: World, code: int) -> None:
    container_id = await run(world, Program(code=code))
    details = await finished(world.engine, container_id)
    assert (details.container.state, details.exit_code) == (ContainerState.EXITED, code)
    assert details.finished_at is not None
    assert details.started_at is not None
    # A real engine stamps a start up to milliseconds after the end of a very short life.
    assert details.finished_at > details.started_at - 1


async def test_an_exited_container_is_still_listed(world: World) -> None:
    container_id = await run(world, Program(code=1))
    await finished(world.engine, container_id)
    container = await listed(world.engine, container_id)
    assert container is not None
    assert container.state is ContainerState.EXITED


async def test_inspect_takes_a_name(world: World) -> None:
    container_id = await world.engine.create(job_spec(world.image(RUNS_ON), "by-name"))
    assert (await world.engine.inspect("by-name")).container.id == container_id


@pytest.mark.parametrize(
    ("program", "code"), [("/no/such/program", 127), ("/etc/passwd", 126)], ids=["127", "126"]
)
async def test_what_cannot_be_executed_stays_created(
    world: World, program: str, code: int
) -> None:
    spec = attrs.evolve(job_spec(world.image(RUNS_ON)), entrypoint=(program,))
    container_id = await world.engine.create(spec)
    with pytest.raises(StartFailed, match=program):
        await world.engine.start(container_id)
    details = await world.engine.inspect(container_id)
    assert details.container.state is ContainerState.CREATED
    assert details.exit_code == code
    assert details.started_at is None


async def test_a_taken_port_fails_the_start(world: World) -> None:
    image = world.image(RUNS_ON)
    ports = (PortBinding(10999, host=23456),)
    first = await world.engine.create(job_spec(image, "first", network_mode="bridge", ports=ports))
    await world.engine.start(first)
    second = await world.engine.create(
        job_spec(image, "second", network_mode="bridge", ports=ports)
    )
    with pytest.raises(StartFailed, match=r"(?i)port is already allocated"):
        await world.engine.start(second)
    details = await world.engine.inspect(second)
    assert details.container.state is ContainerState.CREATED


async def test_bridge_ports_are_mapped_and_known_to_list_and_inspect(world: World) -> None:
    ports = (PortBinding(10999), PortBinding(10022))
    image = world.image(RUNS_ON)
    containers = []
    for name in ("one", "two"):
        container_id = await world.engine.create(
            job_spec(image, name, network_mode="bridge", ports=ports)
        )
        await world.engine.start(container_id)
        container = await listed(world.engine, container_id)
        assert container is not None
        assert [mapping.container for mapping in container.ports] == [10022, 10999]
        assert (await world.engine.inspect(container_id)).container.ports == container.ports
        containers.append(container)
    hosts = [mapping.host for container in containers for mapping in container.ports]
    assert len(set(hosts)) == 4
    assert all(1024 < port < 65536 for port in hosts)


async def test_ports_of_the_host_network_are_not_mapped(world: World) -> None:
    container_id = await world.engine.create(
        job_spec(world.image(RUNS_ON), ports=(PortBinding(10999),))
    )
    await world.engine.start(container_id)
    container = await listed(world.engine, container_id)
    assert container is not None
    assert container.ports == ()


async def test_a_stopped_container_has_no_ports(world: World) -> None:
    spec = job_spec(world.image(RUNS_ON), network_mode="bridge", ports=(PortBinding(10999),))
    container_id = await world.engine.create(spec)
    await world.engine.start(container_id)
    await world.engine.stop(container_id, 0)
    container = await listed(world.engine, container_id)
    assert container is not None
    assert container.ports == ()


async def test_stop_with_no_grace_kills(world: World) -> None:
    container_id = await run(world, RUNS_ON)
    await world.engine.stop(container_id, 0)
    details = await world.engine.inspect(container_id)
    assert (details.container.state, details.exit_code) == (ContainerState.EXITED, 137)
    assert not details.oom_killed


async def test_stop_gives_the_grace_it_is_told(world: World) -> None:
    container_id = await run(world, Program(after=None, on_term=3, lines=("listening",)))

    async def listens() -> bool:
        return "listening" in await world.engine.last_lines(container_id, 1)

    await eventually_async(listens)
    await world.engine.stop(container_id, 30)
    details = await world.engine.inspect(container_id)
    assert (details.container.state, details.exit_code) == (ContainerState.EXITED, 3)


async def test_stop_kills_when_the_grace_is_over(world: World) -> None:
    container_id = await run(world, RUNS_ON)
    await world.engine.stop(container_id, 1)
    assert (await world.engine.inspect(container_id)).exit_code == 137


async def test_stop_ends_a_paused_container(world: World) -> None:
    container_id = await run(world, RUNS_ON)
    world.pause(container_id)
    container = await listed(world.engine, container_id)
    assert container is not None
    assert container.state is ContainerState.PAUSED
    await world.engine.stop(container_id, 0)
    assert (await world.engine.inspect(container_id)).container.state is ContainerState.EXITED


async def test_stop_of_what_is_removed_meanwhile_comes_to_an_end(world: World) -> None:
    container_id = await run(world, RUNS_ON)
    stop = asyncio.ensure_future(world.engine.stop(container_id, 60))
    await asyncio.sleep(0)
    world.delete(container_id)
    await asyncio.wait_for(stop, 30)
    assert await listed(world.engine, container_id) is None


async def test_stop_of_what_does_not_run_is_fine(world: World) -> None:
    container_id = await world.engine.create(job_spec(world.image(Program(code=4))))
    await world.engine.stop(container_id, 0)
    assert (await world.engine.inspect(container_id)).container.state is ContainerState.CREATED
    await world.engine.start(container_id)
    await finished(world.engine, container_id)
    await world.engine.stop(container_id, 0)
    assert (await world.engine.inspect(container_id)).exit_code == 4


async def test_remove_takes_a_running_container(world: World) -> None:
    container_id = await run(world, RUNS_ON)
    await world.engine.remove(container_id)
    assert await world.engine.list_task_containers() == ()


async def test_remove_frees_the_name(world: World) -> None:
    first = await run(world, RUNS_ON)
    await world.engine.remove(first)
    assert await run(world, RUNS_ON) != first


async def test_a_container_that_is_gone_is_gone_for_every_call(world: World) -> None:
    container_id = await run(world, RUNS_ON)
    world.delete(container_id)
    engine = world.engine
    await engine.stop(container_id, 0)
    await engine.remove(container_id)
    for call in (
        engine.inspect(container_id),
        engine.start(container_id),
        engine.last_lines(container_id, 5),
    ):
        with pytest.raises(ContainerNotFound):
            await call
    assert await listed(engine, container_id) is None


async def test_the_last_lines_are_the_last(world: World) -> None:
    lines = tuple(f"line {number} äö" for number in range(10))
    container_id = await run(world, Program(lines=lines, code=1))
    await finished(world.engine, container_id)
    assert await world.engine.last_lines(container_id, 5) == "\n".join(lines[-5:])


async def test_fewer_lines_than_asked_for_are_all_of_them(world: World) -> None:
    container_id = await run(world, Program(lines=("only",), code=1))
    await finished(world.engine, container_id)
    assert await world.engine.last_lines(container_id, 5) == "only"


async def test_no_output_is_an_empty_text(world: World) -> None:
    container_id = await run(world, Program(code=1))
    await finished(world.engine, container_id)
    assert await world.engine.last_lines(container_id, 5) == ""


async def test_has_image_tells_what_is_here(world: World) -> None:
    assert await world.engine.has_image(world.image(RUNS_ON))
    assert not await world.engine.has_image("nobody/nothing:1")


async def test_a_reference_that_is_none_is_refused(world: World) -> None:
    for call in (world.engine.has_image("no Such//thing"), pull(world, "no Such//thing")):
        with pytest.raises(PullFailed, match="is not an image reference"):
            await call


async def test_a_pulled_image_is_here_and_runs(registry_world: World) -> None:
    reference = registry_world.remote_image("pulled", Program(code=9))
    assert not await registry_world.engine.has_image(reference)
    seen = await pull(registry_world, reference)
    assert await registry_world.engine.has_image(reference)
    assert seen[-1].is_total_bytes_final
    for amount in ("downloaded_bytes", "extracted_bytes", "total_bytes"):
        values = [getattr(progress, amount) for progress in seen]
        assert values == sorted(values)
    container_id = await registry_world.engine.create(job_spec(reference))
    await registry_world.engine.start(container_id)
    assert (await finished(registry_world.engine, container_id)).exit_code == 9


async def test_the_stream_of_a_pull_is_kept(registry_world: World) -> None:
    reference = registry_world.remote_image("kept", Program(code=8))
    log = io.BytesIO()
    await registry_world.engine.pull(reference, None, log, lambda progress: None, asyncio.Event())
    assert b'"status":' in log.getvalue().replace(b" ", b"")
    assert b"Status: Downloaded newer image" in log.getvalue()


async def test_a_missing_tag_fails_with_the_registrys_words(registry_world: World) -> None:
    with pytest.raises(PullFailed, match="manifest unknown"):
        await pull(registry_world, registry_world.remote_name("nothing"))


async def test_a_login_is_needed_and_taken(registry_world: World) -> None:
    reference = registry_world.remote_image("locked", Program(code=6), needs_login=True)
    with pytest.raises(PullFailed, match="no basic auth credentials"):
        await pull(registry_world, reference)
    with pytest.raises(PullFailed, match="unauthorized") as caught:
        await pull(registry_world, reference, Credentials("alice", "wrong-s3cret"))
    assert "wrong-s3cret" not in str(caught.value)
    await pull(registry_world, reference, LOGIN)
    assert await registry_world.engine.has_image(reference)


async def test_a_pull_that_is_cancelled_before_it_begins_fetches_nothing(
    registry_world: World,
) -> None:
    reference = registry_world.remote_image("cancelled", Program(code=5))
    cancel = asyncio.Event()
    cancel.set()
    with pytest.raises(PullCancelled):
        await registry_world.engine.pull(reference, None, None, lambda progress: None, cancel)


async def test_unreachable_is_not_gone(world: World) -> None:
    engine = world.cut_off()
    for call in (
        engine.ping(),
        engine.list_task_containers(),
        engine.events(0, lambda: None, lambda event: None),
        engine.inspect("x1"),
        engine.create(job_spec("job:1")),
        engine.start("x1"),
        engine.stop("x1", 0),
        engine.remove("x1"),
        engine.last_lines("x1", 5),
        engine.has_image("job:1"),
        engine.pull("job:1", None, None, lambda progress: None, asyncio.Event()),
    ):
        with pytest.raises(EngineUnreachable):
            await call
    await engine.close()
