"""The typed client: paths, methods, bodies, and what it makes of answers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import respx
from dstack_shim_contracts import golden
from dstack_shim_contracts.api import (
    Component,
    ComponentInstallRequest,
    Components,
    ComponentStatus,
    HealthcheckResponse,
    InstanceHealth,
    InstanceInfo,
    Obstacle,
    ShutdownRefusal,
    ShutdownRequest,
    TaskConfig,
    TaskInfo,
    TaskListItem,
    TerminateRequest,
)
from dstack_shim_contracts.client import REQUEST_TIMEOUT, ShimClient
from dstack_shim_contracts.codec import encode
from dstack_shim_contracts.errors import (
    ClientError,
    ShimResponseError,
    ShimUnreachable,
    ShutdownRefused,
    UnexpectedAnswer,
)
from dstack_shim_contracts.statuses import TaskStatus

BASE = "http://localhost:10998"
INFO = TaskInfo("t1", TaskStatus.RUNNING, ports=(), container_name="n-0", container_id="c0")
NEWLINE = httpx.Response(200, text="\n")

Call = Callable[[ShimClient], Any]


@pytest.fixture
def shim() -> Iterator[respx.MockRouter]:
    with respx.mock(base_url=BASE, assert_all_called=True) as router:
        yield router


@pytest.fixture
def client() -> Iterator[ShimClient]:
    with ShimClient() as opened:
        yield opened


def answer(model: Any) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.Response(200, content=encode(model), headers=headers)


@pytest.mark.parametrize(
    ("path", "call", "model"),
    [
        (
            "/api/healthcheck",
            ShimClient.healthcheck,
            HealthcheckResponse("dstack-shim", "0.21.2", ("persisted-state",)),
        ),
        ("/api/instance/health", ShimClient.instance_health, InstanceHealth(None)),
        ("/api/instance/info", ShimClient.instance_info, InstanceInfo("nvidia")),
        (
            "/api/components",
            ShimClient.components,
            Components((Component("dstack-shim", "0.21.2", ComponentStatus.INSTALLED),)),
        ),
        ("/api/tasks/t1", lambda client: client.task("t1"), INFO),
    ],
)
def test_what_a_shim_answers_comes_back_as_a_model(
    shim: respx.MockRouter, client: ShimClient, path: str, call: Call, model: Any
) -> None:
    shim.get(path).mock(return_value=answer(model))
    assert call(client) == model


def test_the_task_list_comes_back_as_its_items(shim: respx.MockRouter, client: ShimClient) -> None:
    raw = b'{"tasks":[{"id":"t1","status":"pulling"}]}'
    shim.get("/api/tasks").mock(return_value=httpx.Response(200, content=raw))
    assert client.tasks() == (TaskListItem("t1", TaskStatus.PULLING),)


@pytest.mark.parametrize(
    ("path", "call", "body"),
    [
        ("/api/shutdown", ShimClient.shutdown, {"force": False}),
        (
            "/api/shutdown",
            lambda client: client.shutdown(ShutdownRequest(force=True)),
            {"force": True},
        ),
        (
            "/api/shutdown",
            lambda client: client.shutdown(ShutdownRequest(only_if_safe=True)),
            {"force": False, "only_if_safe": True},
        ),
        (
            "/api/components/install",
            lambda client: client.install_component(ComponentInstallRequest("dstack-shim", "u")),
            {"name": "dstack-shim", "url": "u"},
        ),
        (
            "/api/tasks",
            lambda client: client.submit(TaskConfig(id="t1")),
            json.loads(encode(TaskConfig(id="t1"))),
        ),
    ],
)
def test_a_body_is_sent_as_json(
    shim: respx.MockRouter, client: ShimClient, path: str, call: Call, body: object
) -> None:
    route = shim.post(path).mock(return_value=NEWLINE)
    assert call(client) is None
    request = route.calls.last.request
    assert request.headers["content-type"] == "application/json"
    assert json.loads(request.content) == body


def test_a_guarded_shutdown_that_is_refused_says_what_is_in_the_way(
    shim: respx.MockRouter, client: ShimClient
) -> None:
    refusal = ShutdownRefusal((Obstacle("task", "t1", "pulling", "task t1 is pulling"),))
    refused = httpx.Response(409, content=encode(refusal))
    shim.post("/api/shutdown").mock(return_value=refused)
    with pytest.raises(ShutdownRefused, match="409: task t1 is pulling") as caught:
        client.shutdown(ShutdownRequest(only_if_safe=True))
    assert caught.value.refusal == refusal
    with pytest.raises(ShimResponseError) as plain:
        client.shutdown()
    assert not isinstance(plain.value, ShutdownRefused)


def test_a_refusal_that_lists_nothing_readable_is_unexpected(
    shim: respx.MockRouter, client: ShimClient
) -> None:
    shim.post("/api/shutdown").mock(return_value=httpx.Response(409, text="busy\n"))
    with pytest.raises(UnexpectedAnswer, match="409"):
        client.shutdown(ShutdownRequest(only_if_safe=True))


def test_a_submit_sends_the_credentials(shim: respx.MockRouter, client: ShimClient) -> None:
    route = shim.post("/api/tasks").mock(return_value=NEWLINE)
    client.submit(TaskConfig(id="t1", registry_password="hunter2"))
    assert json.loads(route.calls.last.request.content)["registry_password"] == "hunter2"


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (None, {"termination_reason": "", "termination_message": "", "timeout": 0}),
        (
            TerminateRequest("max_duration_exceeded", "3 days", 10),
            {
                "termination_reason": "max_duration_exceeded",
                "termination_message": "3 days",
                "timeout": 10,
            },
        ),
    ],
)
def test_terminate_sends_its_reason_and_returns_the_task(
    shim: respx.MockRouter, client: ShimClient, request_: TerminateRequest | None, body: object
) -> None:
    route = shim.post("/api/tasks/t1/terminate").mock(return_value=answer(INFO))
    assert client.terminate("t1", request_) == INFO
    assert json.loads(route.calls.last.request.content) == body


def test_remove_sends_no_body(shim: respx.MockRouter, client: ShimClient) -> None:
    route = shim.post("/api/tasks/t1/remove").mock(return_value=NEWLINE)
    client.remove("t1")
    assert route.calls.last.request.content == b""


def test_metrics_come_back_as_text(shim: respx.MockRouter, client: ShimClient) -> None:
    text = "# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization\n"
    shim.get("/metrics/tasks/t1").mock(return_value=httpx.Response(200, text=text))
    assert client.task_metrics("t1") == text


def test_a_document_comes_back_as_it_came(shim: respx.MockRouter, client: ShimClient) -> None:
    raw = b'{"service":"dstack-shim","features":null}'
    shim.get("/api/healthcheck").mock(return_value=httpx.Response(200, content=raw))
    assert client.document("/api/healthcheck") == {"service": "dstack-shim", "features": None}


def test_ids_are_percent_encoded(client: ShimClient) -> None:
    with respx.mock() as router:
        route = router.route().mock(return_value=answer(INFO))
        client.task("a/b?c#d é%")
        client.terminate("a/b")
        client.remove("a/b")
        client.task_metrics("a/b")
        paths = [call.request.url.raw_path for call in route.calls]
    assert paths == [
        b"/api/tasks/a%2Fb%3Fc%23d%20%C3%A9%25",
        b"/api/tasks/a%2Fb/terminate",
        b"/api/tasks/a%2Fb/remove",
        b"/metrics/tasks/a%2Fb",
    ]


@pytest.mark.parametrize("status", [204, 302, 400, 404, 405, 409, 413, 415, 500, 502])
def test_any_other_status_is_an_error_with_its_text(
    shim: respx.MockRouter, client: ShimClient, status: int
) -> None:
    response = httpx.Response(status, text="task is running\n", headers={"Location": "/x"})
    shim.post("/api/tasks/t1/remove").mock(return_value=response)
    with pytest.raises(ShimResponseError) as caught:
        client.remove("t1")
    assert (caught.value.status, caught.value.message) == (status, "task is running")
    assert str(caught.value) == f"shim answered {status}: task is running"


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.ReadError("reset"),
        httpx.RemoteProtocolError("half a body"),
        httpx.DecodingError("not gzip"),
    ],
)
def test_no_whole_answer_is_unreachable(
    shim: respx.MockRouter, client: ShimClient, error: httpx.RequestError
) -> None:
    shim.get("/api/healthcheck").mock(side_effect=error)
    with pytest.raises(ShimUnreachable, match="GET /api/healthcheck") as caught:
        client.healthcheck()
    assert isinstance(caught.value, ClientError)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "body: expected JSON"),
        (b"<html>", "body: expected JSON"),
        (b"[]", "body: expected an object"),
        (b'{"tasks":[{"id":"a","status":"exited"}]}', r"tasks\[0\].status: expected one of"),
    ],
)
def test_a_200_that_breaks_the_contract_is_unexpected(
    shim: respx.MockRouter, client: ShimClient, raw: bytes, said: str
) -> None:
    shim.get("/api/tasks").mock(return_value=httpx.Response(200, content=raw))
    with pytest.raises(UnexpectedAnswer, match=f"^GET /api/tasks: {said}"):
        client.tasks()


def test_a_document_that_is_no_json_is_unexpected(
    shim: respx.MockRouter, client: ShimClient
) -> None:
    shim.get("/api/healthcheck").mock(return_value=httpx.Response(200, content=b"{"))
    with pytest.raises(UnexpectedAnswer, match=r"^GET /api/healthcheck: body: expected JSON"):
        client.document("/api/healthcheck")


@pytest.mark.parametrize("example", golden.good("task-info"), ids=str)
def test_every_good_task_is_read(
    shim: respx.MockRouter, client: ShimClient, example: golden.Example
) -> None:
    shim.get("/api/tasks/t1").mock(return_value=httpx.Response(200, content=example.raw))
    assert client.task("t1").id


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (10998, "http://localhost:10998/api/tasks"),
        (7, "http://localhost:7/api/tasks"),
        ("http://127.0.0.1:1234", "http://127.0.0.1:1234/api/tasks"),
        ("http://shim/prefix/", "http://shim/prefix/api/tasks"),
    ],
)
def test_a_shim_is_named_by_port_or_url(address: int | str, url: str) -> None:
    with respx.mock() as router, ShimClient(address) as client:
        route = router.get(url).mock(return_value=httpx.Response(200, content=b"{}"))
        assert client.tasks() == ()
        assert route.called


class NoTasks(http.server.BaseHTTPRequestHandler):
    """A shim without tasks."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"tasks":[]}')

    def log_message(self, *_: object) -> None:
        """Be silent."""


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), NoTasks) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_proxies_of_the_environment_are_not_used(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a real socket: a mocked transport would stand in for the proxy's as well.
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with ShimClient(f"http://127.0.0.1:{port}") as client:
        assert client.tasks() == ()


def test_a_refused_connection_is_unreachable() -> None:
    with ShimClient(1) as client, pytest.raises(ShimUnreachable):
        client.tasks()


def test_another_transport_can_be_given_and_is_closed_with_the_client() -> None:
    class Transport(httpx.BaseTransport):
        closed = False
        timeouts: object = None

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            self.timeouts = request.extensions["timeout"]
            return httpx.Response(200, content=b"{}", request=request)

        def close(self) -> None:
            self.closed = True

    transport = Transport()
    with ShimClient(transport=transport) as client:
        assert client.instance_info() == InstanceInfo()
    assert transport.closed
    assert transport.timeouts == dict.fromkeys(
        ("connect", "read", "write", "pool"), REQUEST_TIMEOUT
    )
