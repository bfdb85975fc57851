"""The routes over a stand-in shim: statuses, texts and shapes of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
import pytest
from dstack_shim_contracts.api import (
    ComponentInstallRequest,
    Components,
    HealthcheckResponse,
    InstanceHealth,
    InstanceInfo,
    Obstacle,
    ShutdownRefusal,
    TaskConfig,
    TaskInfo,
    TaskListItem,
)
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim import errors
from dstack_shim.api.app import make_app

T = TypeVar("T")
INFO = TaskInfo(id="a b", status=TaskStatus.RUNNING)


class StandIn:
    """A shim and its tasks that note what they are asked and raise what they are told."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.tasks = self

    def _note(self, *what: object) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error

    async def submit(self, config: TaskConfig) -> None:
        self._note("submit", config.id, config.registry_password)
        if self.gate is not None:
            await self.gate.wait()
            self._note("submitted", config.id)

    def list(self) -> tuple[TaskListItem, ...]:
        self._note("list")
        return (TaskListItem("a b", TaskStatus.RUNNING),)

    def info(self, task_id: str) -> TaskInfo:
        self._note("info", task_id)
        return INFO

    async def terminate(self, task_id: str, reason: str, message: str, timeout: int) -> TaskInfo:
        self._note("terminate", task_id, reason, message, timeout)
        return INFO

    async def remove(self, task_id: str) -> None:
        self._note("remove", task_id)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.ensure_future(work)

    def healthcheck(self) -> HealthcheckResponse:
        return HealthcheckResponse("dstack-shim", "1.2.3")

    async def components(self) -> Components:
        return Components(())

    def install(self, request: ComponentInstallRequest) -> None:
        self._note("install", request.name, request.url)

    async def instance_health(self) -> InstanceHealth:
        return InstanceHealth(None)

    async def metrics(self) -> str:
        return "y 1\n"

    async def task_metrics(self, task_id: str) -> str:
        self._note("metrics", task_id)
        return "x 1\n"

    def instance_info(self) -> InstanceInfo:
        return InstanceInfo()

    async def shut_down(self, *, force: bool, only_if_safe: bool = False) -> None:
        self._note("shut down", force, only_if_safe)


@pytest.fixture
def shim() -> StandIn:
    return StandIn()


@pytest.fixture
def client(shim: StandIn) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(make_app(shim), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


GETS = [
    "/api/healthcheck",
    "/api/instance/health",
    "/api/instance/info",
    "/api/components",
    "/api/tasks",
    "/api/tasks/x",
    "/metrics",
    "/metrics/tasks/x",
]
BODIES: dict[str, dict[str, object]] = {
    "/api/shutdown": {},
    "/api/components/install": {"name": "dstack-runner", "url": "http://x"},
    "/api/tasks": {"id": "x", "name": "n", "image_name": "i"},
    "/api/tasks/x/terminate": {},
}


@pytest.mark.parametrize("path", GETS)
async def test_get_is_answered_and_head_like_it(client: httpx.AsyncClient, path: str) -> None:
    got = await client.get(path)
    assert got.status_code == 200
    kind = "text/plain" if "metrics" in path else "application/json"
    assert got.headers["content-type"].startswith(kind)
    assert (await client.head(path)).status_code == 200


@pytest.mark.parametrize("path", [*BODIES, "/api/tasks/x/remove"])
async def test_post_is_answered(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, json=BODIES.get(path, {}))
    assert answer.status_code == 200
    if "terminate" in path:
        assert answer.json()["status"] == "running"
    else:
        assert answer.text == "\n"
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/api/healthcheck", {"GET", "HEAD"}),
        ("DELETE", "/api/tasks", {"GET", "HEAD", "POST"}),
        ("GET", "/api/tasks/x/remove", {"POST"}),
    ],
)
async def test_a_wrong_method_is_told_every_right_one(
    client: httpx.AsyncClient, method: str, path: str, allow: set[str]
) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].replace(" ", "").split(",")) == allow
    assert answer.text.endswith("\n")


@pytest.mark.parametrize("path", ["/", "/api", "/api/tasks/", "/api/healthcheck/", "/API/TASKS"])
async def test_an_unknown_path_or_a_trailing_slash_is_not_found(
    client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.get(path)
    assert answer.status_code == 404
    assert answer.text.endswith("\n")


async def test_an_id_in_the_path_is_percent_decoded(
    client: httpx.AsyncClient, shim: StandIn
) -> None:
    await client.get("/api/tasks/a%20b")
    assert shim.asked == [("info", "a b")]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("content", "kind", "status", "says"),
    [
        (b"", "application/json", 400, "body: expected"),
        (b" \n", "application/json", 400, "body: expected"),
        (b"{", "application/json", 400, "body"),
        (b"[]", "application/json", 400, "body"),
        (b'{"a":1}x', "application/json", 400, "body"),
        (b"{}", "text/plain", 415, "application/json"),
        (b"{" + b" " * 2_000_000 + b"}", "application/json", 413, "at most"),
    ],
)
async def test_a_body_that_is_none_is_refused_on_every_route_that_reads_one(
    client: httpx.AsyncClient,
    shim: StandIn,
    path: str,
    content: bytes,
    kind: str,
    status: int,
    says: str,
) -> None:
    answer = await client.post(path, content=content, headers={"Content-Type": kind})
    assert answer.status_code == status
    assert says in answer.text
    assert shim.asked == []


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON ; charset=UTF-8"])
async def test_the_content_types_case_and_parameters_are_free(
    client: httpx.AsyncClient, kind: str
) -> None:
    answer = await client.post("/api/shutdown", content=b"{}", headers={"Content-Type": kind})
    assert answer.status_code == 200


async def test_a_missing_content_type_is_fine(client: httpx.AsyncClient) -> None:
    assert (await client.post("/api/shutdown", content=b"{}")).status_code == 200


async def test_remove_takes_no_body(client: httpx.AsyncClient) -> None:
    assert (await client.post("/api/tasks/x/remove")).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.TaskNotFound("no such"), 404),
        (errors.TaskExists("there"), 409),
        (errors.TaskNotTerminated("runs"), 409),
        (errors.IllegalTransition("back"), 409),
        (errors.ShuttingDown("going"), 503),
        (errors.StoreError("full"), 500),
        (errors.ResourceError("busy"), 500),
        (errors.EngineUnreachable("gone"), 500),
        (errors.InstallRefused("name"), 400),
        (errors.InstallInProgress("busy"), 409),
        (errors.NoExporter("none"), 404),
        (errors.ExporterFailed("dead"), 502),
    ],
)
@pytest.mark.parametrize("path", ["/api/tasks/x", "/metrics/tasks/x"])
async def test_an_error_is_its_status_and_its_words(
    client: httpx.AsyncClient, shim: StandIn, path: str, error: Exception, status: int
) -> None:
    shim.error = error
    answer = await client.get(path)
    assert (answer.status_code, answer.text) == (status, f"{error}\n")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


async def test_a_fault_of_ours_keeps_its_words_in_the_log(
    client: httpx.AsyncClient, shim: StandIn
) -> None:
    shim.error = ValueError("secret inside")
    answer = await client.get("/api/tasks/x")
    assert (answer.status_code, answer.text) == (500, "internal error: ValueError\n")


async def test_what_was_begun_is_finished_when_the_client_goes_away(
    client: httpx.AsyncClient, shim: StandIn
) -> None:
    shim.gate = asyncio.Event()
    request = asyncio.ensure_future(client.post("/api/tasks", json=BODIES["/api/tasks"]))
    while not shim.asked:  # noqa: ASYNC110 - the loop turns until the request has arrived
        await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    shim.gate.set()
    while len(shim.asked) < 2:  # noqa: ASYNC110 - and until its work is done
        await asyncio.sleep(0)
    assert shim.asked[-1] == ("submitted", "x")


async def test_terminate_hands_on_what_was_asked(client: httpx.AsyncClient, shim: StandIn) -> None:
    body = {"termination_reason": "r", "termination_message": "m", "timeout": 7}
    await client.post("/api/tasks/x/terminate", json=body)
    assert shim.asked == [("terminate", "x", "r", "m", 7)]


async def test_a_negative_timeout_names_the_field(client: httpx.AsyncClient) -> None:
    answer = await client.post("/api/tasks/x/terminate", json={"timeout": -1})
    assert answer.status_code == 400
    assert answer.text.startswith("timeout: ")


async def test_shutdown_hands_on_force(client: httpx.AsyncClient, shim: StandIn) -> None:
    await client.post("/api/shutdown", json={"force": True})
    await client.post("/api/shutdown", json={"only_if_safe": True})
    assert shim.asked == [("shut down", True, False), ("shut down", False, True)]


async def test_a_shutdown_that_is_not_safe_is_409_with_what_is_in_the_way(
    client: httpx.AsyncClient, shim: StandIn
) -> None:
    obstacle = Obstacle("task", "t1", "pulling", "task t1 is pulling")
    shim.error = errors.ShutdownUnsafe(ShutdownRefusal((obstacle,)))
    answer = await client.post("/api/shutdown", json={"only_if_safe": True})
    assert (answer.status_code, answer.headers["content-type"]) == (409, "application/json")
    assert answer.json() == {
        "in_the_way": [
            {"kind": "task", "id": "t1", "status": "pulling", "why": "task t1 is pulling"}
        ]
    }
