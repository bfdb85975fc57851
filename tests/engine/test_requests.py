"""What goes over the engine's socket, and what becomes of answers nobody should give."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import docker
import pytest
from dstack_shim_contracts.api import PortMapping

from dstack_shim.engine.connection import Limits
from dstack_shim.engine.docker import DockerEngine
from dstack_shim.engine.protocol import LABEL_IS_TASK, LABEL_TASK_ID, ContainerState
from dstack_shim.errors import ContainerNotFound, EngineError, EngineUnreachable
from tests.eventually import eventually_async
from tests.lab.engine import PrivateEngine
from tests.lab.images import Images
from tests.lab.proxy import CountingProxy, Cut, Hang, Refuse, Reply, Spoiler, Stall
from tests.lab.worlds import job_spec

LIST = "/containers/json"
SHORT = Limits(connect=1, greeting=0.3, ask=0.3, work=0.3, stop=0.3, pull=0.3)


@pytest.fixture
async def engine(proxy: CountingProxy) -> AsyncIterator[DockerEngine]:
    """Through the proxy, past its first greeting."""
    engine = DockerEngine({"DOCKER_HOST": proxy.address})
    await engine.ping()
    proxy.forget()
    yield engine
    await engine.close()


@pytest.fixture
async def hasty(proxy: CountingProxy) -> AsyncIterator[DockerEngine]:
    """One that waits for 0.3 s, not longer."""
    engine = DockerEngine({"DOCKER_HOST": proxy.address}, limits=SHORT)
    yield engine
    await engine.close()


async def test_a_list_is_one_request_however_many_containers_there_are(
    engine: DockerEngine, proxy: CountingProxy, client: docker.APIClient, images: Images
) -> None:
    image = images.job("exit 0")
    for number in range(50):
        labels = {LABEL_IS_TASK: "true", LABEL_TASK_ID: f"task-{number}"}
        client.create_container(image, labels=labels)
    for _ in range(3):
        assert len(await engine.list_task_containers()) == 50
    assert proxy.count("GET", LIST) == len(proxy.requests) == 3


async def test_every_other_call_is_one_request_too(
    engine: DockerEngine, proxy: CountingProxy, images: Images
) -> None:
    image = images.job("echo hello; exit 3")
    container_id = await engine.create(job_spec(image))
    await engine.start(container_id)
    await engine.inspect(container_id)
    await engine.last_lines(container_id, 5)
    await engine.stop(container_id, 0)
    await engine.remove(container_id)
    await engine.has_image(image)
    assert [(request.method, request.path) for request in proxy.requests] == [
        ("POST", "/containers/create"),
        ("POST", f"/containers/{container_id}/start"),
        ("GET", f"/containers/{container_id}/json"),
        ("GET", f"/containers/{container_id}/logs"),
        ("POST", f"/containers/{container_id}/stop"),
        ("DELETE", f"/containers/{container_id}"),
        ("GET", f"/images/{image}/json"),
    ]
    assert all(request.version == "1.41" for request in proxy.requests)


async def test_a_hundred_calls_at_once_are_all_answered(
    engine: DockerEngine, proxy: CountingProxy
) -> None:
    await asyncio.gather(*(engine.list_task_containers() for _ in range(100)))
    assert proxy.count("GET", LIST) == 100


async def test_one_worker_is_enough(proxy: CountingProxy) -> None:
    engine = DockerEngine({"DOCKER_HOST": proxy.address}, workers=1)
    await asyncio.gather(*(engine.list_task_containers() for _ in range(10)))
    await engine.close()


CALLS: dict[str, Callable[[DockerEngine], Awaitable[object]]] = {
    "list": lambda engine: engine.list_task_containers(),
    "inspect": lambda engine: engine.inspect("x1"),
    "create": lambda engine: engine.create(job_spec("job:1")),
    "start": lambda engine: engine.start("x1"),
    "stop": lambda engine: engine.stop("x1", 0),
    "remove": lambda engine: engine.remove("x1"),
    "last_lines": lambda engine: engine.last_lines("x1", 5),
    "has_image": lambda engine: engine.has_image("job:1"),
    "pull": lambda engine: engine.pull("job:1", None, None, lambda now: None, asyncio.Event()),
}
MUTE: dict[str, Spoiler] = {
    "closes": Refuse(),
    "hangs": Hang(),
    "half-a-head": Cut(after=20),
    "half-a-head-then-hangs": Stall(after=20),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("spoiler", MUTE)
async def test_no_whole_answer_is_unreachable(
    hasty: DockerEngine, proxy: CountingProxy, call: str, spoiler: str
) -> None:
    await hasty.ping()
    proxy.spoil(MUTE[spoiler])
    # A pull's own deadline is as long as its patience with a silent connection.
    silent_pull = call == "pull" and isinstance(MUTE[spoiler], Hang | Stall)
    expected = EngineError if silent_pull else EngineUnreachable
    with pytest.raises(expected):
        await CALLS[call](hasty)


@pytest.mark.parametrize("spoiler", [Cut(after=250), Stall(after=250)], ids=["cut", "stalls"])
async def test_half_a_list_is_unreachable(
    hasty: DockerEngine,
    proxy: CountingProxy,
    client: docker.APIClient,
    images: Images,
    spoiler: Spoiler,
) -> None:
    client.create_container(images.job("exit 0"), labels={LABEL_IS_TASK: "true"})
    await hasty.ping()
    proxy.spoil(spoiler)
    with pytest.raises(EngineUnreachable):
        await hasty.list_task_containers()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(500, {"message": "driver failed"}), "driver failed"),
        (Reply(500, b""), "answered 500"),
        (Reply(502, b"<html>Bad Gateway</html>"), "Bad Gateway"),
        (Reply(403, {"message": ["odd"]}), "odd"),
        (Reply(301, b"elsewhere"), "elsewhere"),
    ],
    ids=["500", "empty", "html", "odd", "redirect"],
)
async def test_an_error_is_an_answer_with_the_engines_words(
    engine: DockerEngine, proxy: CountingProxy, call: str, reply: Reply, words: str
) -> None:
    proxy.spoil(reply)
    with pytest.raises(EngineError, match=words) as caught:
        await CALLS[call](engine)
    assert not isinstance(caught.value, EngineUnreachable | ContainerNotFound)


@pytest.mark.parametrize("answer", [b"null", b"{}", b"7", b"", b"[{]", b"[" * 100_000, b"\xff"])
async def test_what_is_no_list_says_nothing_about_containers(
    engine: DockerEngine, proxy: CountingProxy, answer: bytes
) -> None:
    proxy.spoil(Reply(200, answer), path=LIST)
    with pytest.raises(EngineUnreachable):
        await engine.list_task_containers()


GOOD = {
    "Id": "a" * 64,
    "Names": ["/linked/alias", "/job-1"],
    "State": "running",
    "Created": 1700000000,
    "Labels": {LABEL_IS_TASK: "true", LABEL_TASK_ID: "t1", "n": 7},
    "HostConfig": {"NetworkMode": "bridge"},
    "Ports": [
        {"IP": "::", "PrivatePort": 10999, "PublicPort": 40001, "Type": "tcp"},
        {"IP": "127.0.0.1", "PrivatePort": 10999, "PublicPort": 40002, "Type": "tcp"},
        {"IP": "127.0.0.1", "PrivatePort": 53, "PublicPort": 40003, "Type": "udp"},
        {"PrivatePort": 22, "Type": "tcp"},
        {"IP": 7, "PrivatePort": "x", "PublicPort": 1e9, "Type": "tcp"},
        None,
    ],
    "Mounts": [{"Type": "bind", "Source": "/a", "Destination": "/b"}, None, {"Type": 3}],
}


async def test_an_odd_container_costs_itself_only(
    engine: DockerEngine, proxy: CountingProxy, caplog: pytest.LogCaptureFixture
) -> None:
    odd: list[Any] = [
        None,
        [],
        {},
        {"Id": "b" * 64, "Labels": None},
        {"Id": "c" * 64, "Labels": {LABEL_IS_TASK: "true", LABEL_TASK_ID: 7}},
        {"Id": 7, "Labels": {LABEL_TASK_ID: "t2"}},
    ]
    proxy.spoil(Reply(200, [*odd, GOOD, *odd]), path=LIST)
    logging.getLogger("dstack_shim").propagate = True
    await engine.list_task_containers()
    (container,) = await engine.list_task_containers()
    assert container.id == "a" * 64
    assert container.name == "job-1"
    assert container.ports == (PortMapping(host=40002, container=10999),)
    assert container.network_mode == "bridge"
    told = [line for line in caplog.messages if "container.unreadable" in line]
    assert len(told) == len(set(told)) == 5  # not at every list; two of them have no id at all


@pytest.mark.parametrize("key", ["Names", "State", "Created", "HostConfig", "Ports", "Mounts"])
@pytest.mark.parametrize("value", [None, 7, "odd", [], {}, [None], [[]]])
async def test_an_odd_part_of_a_container_is_as_if_it_were_not_there(
    engine: DockerEngine, proxy: CountingProxy, key: str, value: Any
) -> None:
    proxy.spoil(Reply(200, [{**GOOD, key: value}]), path=LIST)
    (container,) = await engine.list_task_containers()
    assert (container.id, container.task_id) == ("a" * 64, "t1")
    if key == "State":
        assert container.state is ContainerState.UNKNOWN


@pytest.mark.parametrize("state", [{"Status": "exited"}, {"Status": "dead", "ExitCode": None}])
async def test_an_exit_code_is_never_guessed(
    engine: DockerEngine, proxy: CountingProxy, state: dict[str, Any]
) -> None:
    proxy.spoil(Reply(200, {"Id": "a" * 64, "State": state}))
    with pytest.raises(EngineError, match="ExitCode"):
        await engine.inspect("a" * 64)


@pytest.mark.parametrize("answer", [{}, [], None, {"Id": None}])
async def test_an_inspect_that_names_nobody_is_an_error(
    engine: DockerEngine, proxy: CountingProxy, answer: Any
) -> None:
    proxy.spoil(Reply(200, answer))
    with pytest.raises(EngineError):
        await engine.inspect("x1")


@pytest.mark.parametrize("ref", ["", "..", "../images", "a/b", "a?b", "ä", "a b"])
async def test_what_names_no_container_never_becomes_a_path(
    engine: DockerEngine, proxy: CountingProxy, ref: str
) -> None:
    with pytest.raises(ContainerNotFound):
        await engine.inspect(ref)
    assert proxy.requests == ()


@pytest.mark.parametrize(
    ("offered", "used"),
    [
        ({"ApiVersion": "1.41", "MinAPIVersion": "1.12"}, "1.41"),
        ({"ApiVersion": "1.40"}, "1.40"),
        ({"ApiVersion": "1.52", "MinAPIVersion": "1.44"}, "1.47"),
        ({"ApiVersion": "1.60", "MinAPIVersion": "1.50"}, "1.50"),
        ({"ApiVersion": "1.41", "MinAPIVersion": None}, "1.41"),
    ],
    ids=["20.10", "19.03", "29", "future", "no minimum"],
)
async def test_the_newest_version_both_sides_know_is_used(
    hasty: DockerEngine, proxy: CountingProxy, offered: dict[str, Any], used: str
) -> None:
    proxy.spoil(Reply(200, offered), path="/version")
    proxy.spoil(Reply(200, []), path=LIST)
    await hasty.list_task_containers()
    assert [request.version for request in proxy.requests] == ["", used]


@pytest.mark.parametrize(
    "answer", [b"", b"hello", [], {}, {"ApiVersion": 1.41}, {"ApiVersion": "x"}]
)
async def test_what_offers_no_version_is_no_engine(
    hasty: DockerEngine, proxy: CountingProxy, answer: Any
) -> None:
    proxy.spoil(Reply(200, answer), path="/version")
    with pytest.raises(EngineUnreachable):
        await hasty.ping()


@pytest.mark.parametrize(
    "words",
    [
        "client version 1.41 is too old. Minimum supported API version is 1.44, please upgrade",
        "client version 1.47 is too new. Maximum supported API version is 1.41",
    ],
)
async def test_an_engine_replaced_meanwhile_is_greeted_anew(
    engine: DockerEngine, proxy: CountingProxy, words: str
) -> None:
    proxy.spoil(Reply(400, {"message": words}), path=LIST, times=1)
    assert await engine.list_task_containers() == ()
    assert [request.path for request in proxy.requests] == [LIST, "/version", LIST]


async def test_no_answer_says_which_engine_and_why(private_engine: PrivateEngine) -> None:
    address = f"unix://{private_engine.directory}/nobody"
    engine = DockerEngine({"DOCKER_HOST": address})
    with pytest.raises(EngineUnreachable) as caught:
        await engine.ping()
    assert str(caught.value) == (
        f"no answer from the Docker Engine at {address}: No such file or directory"
    )
    await engine.close()


@pytest.mark.parametrize("host", ["gopher://x", "unix://", "tcp://127.0.0.1:1", "ssh://x"])
async def test_a_bad_address_is_an_error_in_words(host: str) -> None:
    engine = DockerEngine({"DOCKER_HOST": host}, limits=SHORT)
    with pytest.raises(EngineError, match=host.split(":", maxsplit=1)[0]):
        await engine.ping()
    await engine.close()


async def test_an_engine_is_reached_over_tcp(client: docker.APIClient) -> None:
    del client
    private = PrivateEngine(shares_network=True, arguments=["--host", "tcp://127.0.0.1:23751"])
    private.start()
    engine = DockerEngine({"DOCKER_HOST": "tcp://127.0.0.1:23751", "http_proxy": "http://no:1"})
    assert await engine.list_task_containers() == ()
    await engine.close()
    private.close()


async def test_a_removal_under_way_is_waited_for(
    engine: DockerEngine, proxy: CountingProxy, images: Images
) -> None:
    container_id = await engine.create(job_spec(images.job("exit 0")))
    busy = Reply(409, {"message": f"removal of container {container_id} is already in progress"})
    proxy.spoil(busy, method="DELETE", times=3)
    await engine.remove(container_id)
    assert await engine.list_task_containers() == ()


async def test_long_output_is_cut_at_its_beginning(engine: DockerEngine, images: Images) -> None:
    image = images.job("head -c 300000 /dev/zero | tr '\\0' x; echo; echo end; sleep 1; exit 1")
    container_id = await engine.create(job_spec(image))
    await engine.start(container_id)

    async def all_is_out() -> str | None:
        text = await engine.last_lines(container_id, 5)
        return text if text.endswith("end") else None

    lines = await eventually_async(all_is_out)
    assert lines is not None
    assert lines.endswith("x\nend")
    assert len(lines) <= 64 << 10


async def test_both_streams_and_bytes_that_are_no_text_are_kept(
    engine: DockerEngine, images: Images
) -> None:
    image = images.job("echo out; echo err >&2; printf 'caf\\351\\r\\n'; exit 1")
    container_id = await engine.create(job_spec(image))
    await engine.start(container_id)
    await engine.stop(container_id, 5)
    lines = (await engine.last_lines(container_id, 5)).split("\n")
    assert sorted(lines) == ["caf\ufffd", "err", "out"]
