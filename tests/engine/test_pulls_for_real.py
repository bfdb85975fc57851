"""Pulls from a real registry, and from ones that are slow, silent or broken."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import docker
import pytest
from dstack_shim_contracts.api import ImagePullProgress

from dstack_shim.engine.connection import Limits
from dstack_shim.engine.docker import DockerEngine
from dstack_shim.engine.protocol import Credentials
from dstack_shim.errors import EngineUnreachable, PullCancelled, PullFailed
from tests.eventually import eventually_async
from tests.lab.engine import PrivateEngine
from tests.lab.images import Images
from tests.lab.proxy import CountingProxy, Cut, Reply
from tests.lab.registry import Registry, SlowWay
from tests.lab.worlds import job_spec

LOGIN = Credentials("alice", "s3cret-of-alice")
SLOW_PORT = 5002


@pytest.fixture
async def engine(proxy: CountingProxy) -> AsyncIterator[DockerEngine]:
    engine = DockerEngine({"DOCKER_HOST": proxy.address})
    await engine.ping()
    yield engine
    await engine.close()


@pytest.fixture
def registry(open_registry: Registry | None) -> Registry:
    if open_registry is None:
        pytest.skip("this machine has no docker-registry")
    return open_registry


@pytest.fixture
def slow_way(registry: Registry) -> Iterator[SlowWay]:
    way = SlowWay(5000, SLOW_PORT, bytes_per_second=2_000_000)
    way.open()
    yield way
    way.close()


def push(
    registry: Registry, client: docker.APIClient, images: Images, name: str, size: int
) -> str:
    """An image of its own content in the registry; its path there."""
    local = images.plain(f"to-push/{name}:1", padding=size)
    registry.push(client, local, f"{name}:1")
    client.remove_image(local)
    images.forget(local)
    return f"{name}:1"


class Pull:
    """A pull under way."""

    def __init__(self, engine: DockerEngine, ref: str, login: Credentials | None = None) -> None:
        self.seen: list[ImagePullProgress] = []
        self.log = io.BytesIO()
        self.cancel = asyncio.Event()
        self.task = asyncio.ensure_future(
            engine.pull(ref, login, self.log, self.seen.append, self.cancel)
        )


def _inspect(client: docker.APIClient, image: str) -> dict[str, Any]:
    answer: dict[str, Any] = client.inspect_image(image)  # type: ignore[no-untyped-call]  # the stubs lack it
    return answer


def answer(*messages: Any) -> Reply:
    return Reply(200, b"".join(json.dumps(message).encode() + b"\r\n" for message in messages))


async def test_progress_moves_while_a_pull_runs(
    engine: DockerEngine,
    registry: Registry,
    slow_way: SlowWay,
    client: docker.APIClient,
    images: Images,
) -> None:
    path = push(registry, client, images, "slow", 1_000_000)
    pull = Pull(engine, f"{slow_way.host}/{path}")
    await pull.task
    downloaded = [progress.downloaded_bytes for progress in pull.seen]
    assert len(set(downloaded)) > 5
    assert downloaded == sorted(downloaded)
    last = pull.seen[-1]
    assert last.downloaded_bytes == last.total_bytes == last.extracted_bytes > 1_000_000
    assert last.is_total_bytes_final
    assert b"Status: Downloaded newer image" in pull.log.getvalue()


async def test_a_silent_pull_is_cancelled_within_a_second_in_the_engine_too(
    engine: DockerEngine,
    registry: Registry,
    slow_way: SlowWay,
    client: docker.APIClient,
    images: Images,
) -> None:
    path = push(registry, client, images, "silent", 3_000_000)
    pull = Pull(engine, f"{slow_way.host}/{path}")
    await eventually_async(lambda: pull.seen and pull.seen[-1].downloaded_bytes > 0)
    slow_way.bytes_per_second = 0
    quiet = len(pull.seen)
    await asyncio.sleep(0.3)  # the point is that nothing comes
    pull.cancel.set()
    began = time.monotonic()
    with pytest.raises(PullCancelled):
        await pull.task
    assert time.monotonic() - began < 1
    kept = pull.log.getvalue()
    # The engine gives up as well, as soon as the registry lets it: it does not fetch the rest.
    slow_way.bytes_per_second = 50_000
    await eventually_async(lambda: slow_way.open_connections == 0)
    assert pull.log.getvalue() == kept
    assert len(pull.seen) <= quiet + 2
    assert not await engine.has_image(f"{slow_way.host}/{path}")


async def test_a_pull_is_cancelled_before_the_engine_said_anything(engine: DockerEngine) -> None:
    with socket.create_server(("127.0.0.1", 5003)) as mute:
        pull = Pull(engine, "127.0.0.1:5003/a:1")
        connection, _ = await asyncio.get_running_loop().run_in_executor(None, mute.accept)
        pull.cancel.set()
        began = time.monotonic()
        with pytest.raises(PullCancelled):
            await pull.task
        assert time.monotonic() - began < 1
        connection.close()


async def test_a_pull_given_up_by_its_task_ends_as_well(
    engine: DockerEngine,
    registry: Registry,
    slow_way: SlowWay,
    client: docker.APIClient,
    images: Images,
) -> None:
    path = push(registry, client, images, "given-up", 3_000_000)
    pull = Pull(engine, f"{slow_way.host}/{path}")
    await eventually_async(lambda: pull.seen)
    pull.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull.task
    await eventually_async(lambda: slow_way.open_connections == 0)


async def test_a_pull_has_a_deadline_of_its_own(
    proxy: CountingProxy,
    registry: Registry,
    slow_way: SlowWay,
    client: docker.APIClient,
    images: Images,
) -> None:
    path = push(registry, client, images, "late", 3_000_000)
    engine = DockerEngine({"DOCKER_HOST": proxy.address}, limits=Limits(pull=1.5))
    pull = Pull(engine, f"{slow_way.host}/{path}")
    with pytest.raises(PullFailed, match=r"did not finish within 0\.025 minutes"):
        await pull.task
    assert pull.seen
    await engine.close()


async def test_an_engine_killed_in_a_pull_gave_no_answer(
    registry: Registry, slow_way: SlowWay, client: docker.APIClient, images: Images
) -> None:
    path = push(registry, client, images, "killed", 2_000_000)
    private = PrivateEngine(shares_network=True)
    private.start()
    engine = DockerEngine(private.environ)
    pull = Pull(engine, f"{slow_way.host}/{path}")
    await eventually_async(lambda: pull.seen)
    private.power_off()
    with pytest.raises(EngineUnreachable):
        await pull.task
    await engine.close()
    private.close()


async def test_a_registry_that_is_not_there_fails_with_its_address(engine: DockerEngine) -> None:
    with pytest.raises(PullFailed, match=r"127\.0\.0\.1:5099.*connection refused"):
        await Pull(engine, "127.0.0.1:5099/a:1").task


async def test_a_pull_takes_its_tag_or_digest_and_no_other(
    engine: DockerEngine,
    proxy: CountingProxy,
    registry: Registry,
    client: docker.APIClient,
    images: Images,
) -> None:
    path = push(registry, client, images, "digested", 1000)
    ref = f"{registry.host}/{path}"
    await Pull(engine, ref).task
    (repo_digest,) = _inspect(client, ref)["RepoDigests"]
    digest = repo_digest.partition("@")[2]
    client.remove_image(ref)
    for wanted in (repo_digest, f"{ref}@{digest}"):
        assert not await engine.has_image(wanted)
        proxy.forget()
        await Pull(engine, wanted).task
        (request,) = proxy.requests
        assert digest.replace(":", "%3A") in request.query
        assert await engine.has_image(wanted)
        container_id = await engine.create(job_spec(wanted))
        await engine.remove(container_id)
        client.remove_image(_inspect(client, wanted)["Id"], force=True)


async def test_credentials_go_with_the_pull_and_nowhere_else(
    engine: DockerEngine, proxy: CountingProxy
) -> None:
    proxy.forget()
    for login in (LOGIN, None):
        with suppress(PullFailed):
            await Pull(engine, "127.0.0.1:5099/a:1", login).task
    with suppress(PullFailed):
        await engine.has_image("127.0.0.1:5099/a:1")
    logins = [request.headers.get("x-registry-auth") for request in proxy.requests]
    assert [login is not None for login in logins] == [True, False, False]
    assert all("alice" not in request.query for request in proxy.requests)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            [
                {"status": "Downloading", "id": "a", "progressDetail": {"current": 1, "total": 9}},
                {"errorDetail": {"message": "write /x: no space left on device"}, "error": "x"},
            ],
            "no space left on device",
        ),
        ([{"status": "Pull complete", "id": "a"}], "without the engine saying"),
        ([], "without the engine saying"),
    ],
    ids=["error-after-200", "no-last-word", "nothing"],
)
async def test_a_200_is_not_yet_a_success(
    engine: DockerEngine, proxy: CountingProxy, messages: list[Any], words: str
) -> None:
    proxy.spoil(answer(*messages), path="/images/create")
    with pytest.raises(PullFailed, match=words):
        await Pull(engine, "a:1").task


async def test_a_stream_cut_short_is_no_answer(
    engine: DockerEngine,
    proxy: CountingProxy,
    registry: Registry,
    client: docker.APIClient,
    images: Images,
) -> None:
    path = push(registry, client, images, "cut", 500_000)
    proxy.spoil(Cut(after=600), path="/images/create")
    with pytest.raises(EngineUnreachable):
        await Pull(engine, f"{registry.host}/{path}").task


async def test_showing_progress_never_fails_a_pull(
    engine: DockerEngine, proxy: CountingProxy
) -> None:
    proxy.spoil(
        answer({"status": "Pull complete", "id": "a"}, {"status": "Status: Downloaded"}),
        path="/images/create",
    )

    def fail(progress: ImagePullProgress) -> None:
        raise LookupError(progress)

    await engine.pull("a:1", None, None, fail, asyncio.Event())


async def test_one_worker_is_not_held_up_by_a_pull_or_a_graceful_stop(
    private_engine: PrivateEngine, images: Images
) -> None:
    engine = DockerEngine(private_engine.environ, workers=1)
    with socket.create_server(("127.0.0.1", 5003)):
        pull = Pull(engine, "127.0.0.1:5003/a:1")
        container_id = await engine.create(job_spec(images.job("sleep 1000")))
        await engine.start(container_id)
        stop = asyncio.ensure_future(engine.stop(container_id, 60))
        await asyncio.wait_for(engine.list_task_containers(), 5)
        await asyncio.wait_for(engine.stop(container_id, 0), 5)
        await stop
        assert not pull.task.done()
        pull.cancel.set()
        with pytest.raises(PullCancelled):
            await pull.task
    await engine.close()


async def test_no_thread_is_left_behind_by_cancelled_pulls(
    engine: DockerEngine,
    registry: Registry,
    slow_way: SlowWay,
    client: docker.APIClient,
    images: Images,
) -> None:
    path = push(registry, client, images, "threads", 3_000_000)
    for _ in range(5):
        pull = Pull(engine, f"{slow_way.host}/{path}")
        await eventually_async(lambda: pull.seen)  # noqa: B023 - asked within the round
        pull.cancel.set()
        with pytest.raises(PullCancelled):
            await pull.task
    await eventually_async(
        lambda: not [t for t in threading.enumerate() if t.name == "engine apart"]
    )
