"""A: the HTTP API, without what a submit body may hold (test_submit_body)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from ipaddress import ip_network
from typing import Any

import docker
import httpx
import pytest

from tests.conformance.conftest import MakeShim
from tests.conformance.engine import Reply, Request, Wire, refusal
from tests.conformance.images import Images
from tests.conformance.rows import row
from tests.conformance.shim import Setting, Shim, run_to_end
from tests.eventually import eventually

GETS = (
    "/api/healthcheck",
    "/api/instance/health",
    "/api/instance/info",
    "/api/components",
    "/api/tasks",
    "/api/tasks/{id}",
)
POSTS = (
    "/api/shutdown",
    "/api/components/install",
    "/api/tasks/{id}/terminate",
    "/api/tasks/{id}/remove",
)
INFO_KEYS = [
    "id",
    "status",
    "termination_reason",
    "termination_message",
    "ports",
    "image_pull_progress",
    "container_name",
    "container_id",
    "gpus_ids",
]

STOPS = r"^/containers/[^/]+/(stop|kill)"


@pytest.fixture
def path_of(shim: Shim, images: Images) -> Callable[[str], str]:
    """A route with the id of a real task in it."""

    def with_id(route: str) -> str:
        return route.format(id=shim.run(images.idle).id) if "{id}" in route else route

    return with_id


@row("A1")
def test_only_localhost_is_listened_on(shim: Shim, engine: docker.DockerClient) -> None:
    bridge = engine.networks.get("bridge").attrs["IPAM"]["Config"][0]["Subnet"]
    address = next(ip_network(bridge).hosts())  # the host's own address on it
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}:{shim.port}/api/healthcheck", trust_env=False)


@row("A2")
@pytest.mark.parametrize("route", GETS)
def test_result_is_json(route: str, shim: Shim, path_of: Callable[[str], str]) -> None:
    answer = shim.get(path_of(route))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert isinstance(json.loads(answer.content.decode("utf-8")), dict)


@row("A3")
def test_remove_answers_with_nothing(shim: Shim, images: Images) -> None:
    task = shim.submit(images.exits(0))
    task.end()
    answer = task.remove()
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text.strip() == ""


@row("A4")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/nothing", 404),
        ("GET", "/api/tasks/nobody", 404),
        ("POST", "/api/tasks", 400),
        ("POST", "/api/tasks/nobody/remove", 404),
    ],
)
def test_error_is_a_line_of_text(method: str, path: str, status: int, shim: Shim) -> None:
    answer = shim.http.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text.strip()
    assert answer.text.endswith("\n")


@row("A5")
@pytest.mark.parametrize("route", GETS)
def test_head_is_get_without_a_body(route: str, shim: Shim, path_of: Callable[[str], str]) -> None:
    path = path_of(route)
    answer = shim.http.head(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == b""
    head = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    assert shim.raw(head).endswith(b"\r\n\r\n")  # nothing after the headers on the wire either


@row("A6")
@pytest.mark.parametrize("route", GETS)
def test_wrong_method_on_a_get_route_is_405(route: str, shim: Shim) -> None:
    answer = shim.http.delete(route.format(id="some"))
    assert answer.status_code == 405
    assert "GET" in re.split(r",\s*", answer.headers["allow"])


@row("A6")
@pytest.mark.parametrize("route", POSTS)
def test_wrong_method_on_a_post_route_is_405(route: str, shim: Shim) -> None:
    answer = shim.get(route.format(id="some"))
    assert answer.status_code == 405
    assert "POST" in re.split(r",\s*", answer.headers["allow"])


@row("A7")
@pytest.mark.parametrize("route", ["/api/", "/", "/api/v2/tasks", "/metrics/", *GETS])
def test_unknown_path_and_trailing_slash_are_404(
    route: str, shim: Shim, path_of: Callable[[str], str]
) -> None:
    path = f"{path_of(route)}/" if route in GETS else route
    assert shim.get(path).status_code == 404


@row("A8")
def test_id_in_a_path_is_percent_decoded(shim: Shim, images: Images) -> None:
    task = shim.submit(images.idle, id="a b+c%ü")
    answer = shim.get("/api/tasks/a%20b%2Bc%25%C3%BC")
    assert answer.status_code == 200
    assert answer.json()["id"] == task.id == "a b+c%ü"
    assert shim.post("/api/tasks/a%20b%2Bc%25%C3%BC/terminate", {}).status_code == 200
    assert shim.post("/api/tasks/a%20b%2Bc%25%C3%BC/remove").status_code == 200


@row("A9")
def test_slow_stop_holds_up_nobody_else(shim: Shim, images: Images, wire: Wire) -> None:
    slow, other = shim.run(images.idle), shim.run(images.idle, name="other")
    asked, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        asked.set()
        go_on.wait(20)

    with (
        wire.rule("POST", f"^/containers/({slow.info()['container_id']})/(stop|kill)", hold),
        ThreadPoolExecutor(1) as pool,
    ):
        ending = pool.submit(slow.terminate)
        assert asked.wait(5)
        for path in (
            "/api/healthcheck",
            "/api/tasks",
            "/api/components",
            f"/api/tasks/{other.id}",
        ):
            assert shim.get(path, timeout=3).status_code == 200
        assert other.terminate(timeout=0).status_code == 200
        assert not ending.done()
        go_on.set()
        assert ending.result().status_code == 200


@row("A10")
def test_terminate_finishes_without_its_client(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    with pytest.raises(httpx.ReadTimeout):
        task.shim.http.post(
            f"/api/tasks/{task.id}/terminate",
            json={"termination_reason": "max_duration_exceeded", "timeout": 2},
            timeout=0.5,
        )
    assert task.outcome()[0] == "max_duration_exceeded"


@row("A11")
def test_body_over_a_mebibyte_is_413(shim: Shim, images: Images) -> None:
    body = {**shim.task(images.idle).body, "padding": "x" * (1024 * 1024)}
    assert shim.post("/api/tasks", body).status_code == 413
    assert shim.task_list() == {}


@row("A11")
def test_body_of_just_a_mebibyte_is_read(shim: Shim, images: Images) -> None:
    task = shim.task(images.idle)
    bare = json.dumps({**task.body, "padding": ""}).encode()
    whole = bare[:-2] + b"x" * (1024 * 1024 - len(bare)) + bare[-2:]
    assert len(whole) == 1024 * 1024
    assert shim.post("/api/tasks", content=whole).status_code == 200


@row("A12")
@pytest.mark.parametrize(
    "given", ["text/plain", "application/jsonp", "application/x-www-form-urlencoded"]
)
def test_other_content_type_is_415(given: str, shim: Shim, images: Images) -> None:
    task = shim.task(images.idle)
    content = json.dumps(task.body)
    answer = shim.post("/api/tasks", content=content, headers={"content-type": given})
    assert answer.status_code == 415
    assert task.get().status_code == 404


@row("A12")
@pytest.mark.parametrize(
    "given", ["application/json; charset=utf-8", "Application/JSON", 'application/json;a="b c"']
)
def test_form_of_the_content_type_does_not_matter(given: str, shim: Shim, images: Images) -> None:
    content = json.dumps(shim.task(images.idle).body)
    answer = shim.post("/api/tasks", content=content, headers={"content-type": given})
    assert answer.status_code == 200


@row("A12")
def test_content_type_may_be_missing(shim: Shim, images: Images) -> None:
    task = shim.task(images.idle)
    request = shim.http.build_request("POST", "/api/tasks", content=json.dumps(task.body))
    request.headers.pop("content-type", None)
    assert shim.http.send(request).status_code == 200


@row("A13", "A14", "A15")
@pytest.mark.parametrize(
    "route",
    ["/api/tasks", "/api/shutdown", "/api/components/install", "/api/tasks/some/terminate"],
)
@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param('{"id": ', id="cut"),
        pytest.param("{'id': 1}", id="not-json"),
        pytest.param("{} {}", id="two-documents"),
        pytest.param("{}x", id="trailing"),
    ],
)
def test_body_that_is_not_one_document_is_400(route: str, content: str, shim: Shim) -> None:
    assert shim.post(route, content=content).status_code == 400
    assert shim.alive


@row("A15")
def test_white_space_around_the_document_is_fine(shim: Shim, images: Images) -> None:
    content = f"\n\t {json.dumps(shim.task(images.idle).body)} \r\n\n"
    assert shim.post("/api/tasks", content=content).status_code == 200


@row("A17")
def test_unknown_fields_are_ignored(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle, tomorrow={"deep": [1]}, ids=7)
    ended = shim.post(f"/api/tasks/{task.id}/terminate", {"termination_reason": "r", "new": None})
    assert ended.json()["termination_reason"] == "r"


@row("A18")
@pytest.mark.parametrize("absent", [True, False], ids=("missing", "null"))
def test_submit_needs_three_fields_only(absent: bool, shim: Shim, images: Images) -> None:
    task = shim.task(images.idle)
    rest = [
        "registry_username",
        "registry_password",
        "container_user",
        "privileged",
        "gpu",
        "cpu",
        "memory",
        "shm_size",
        "network_mode",
        "volumes",
        "volume_mounts",
        "instance_mounts",
        "gpu_devices",
        "host_ssh_user",
        "host_ssh_keys",
        "container_ssh_keys",
    ]
    three = {key: task.body[key] for key in ("id", "name", "image_name")}
    body = three if absent else {**three, **dict.fromkeys(rest)}
    assert shim.post("/api/tasks", body).status_code == 200
    task.reach("running")


@row("A18")
@pytest.mark.parametrize(
    "body", [{}, {"termination_reason": None, "termination_message": None, "timeout": None}]
)
def test_terminate_needs_no_field(body: dict[str, Any], shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    answer = shim.post(f"/api/tasks/{task.id}/terminate", body)
    assert answer.status_code == 200
    assert answer.json()["status"] == "terminated"


@row("A20")
def test_negative_timeout_is_400(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    answer = task.terminate(timeout=-1)
    assert answer.status_code == 400
    assert "timeout" in answer.text
    assert task.status == "running"


@row("A21")
@pytest.mark.parametrize("content", ["", "not json", "x" * 10])
def test_remove_reads_no_body(content: str, shim: Shim, images: Images) -> None:
    task = shim.submit(images.exits(0))
    task.end()
    answer = shim.http.post(
        f"/api/tasks/{task.id}/remove", content=content, headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 200


@row("A22", "L18")
def test_healthcheck_names_service_and_version(shim: Shim, setting: Setting) -> None:
    printed = run_to_end(setting, shim.home, ["--version"]).stdout.split()
    health = shim.get("/api/healthcheck").json()
    assert health["service"] == "dstack-shim"
    assert health["version"] == printed[2]


@row("A23")
def test_healthcheck_lists_features(shim: Shim) -> None:
    features = shim.get("/api/healthcheck").json()["features"]
    assert all(isinstance(feature, str) for feature in features)
    assert "persisted-state" in features


@row("A24")
def test_healthcheck_describes_the_implementation(shim: Shim) -> None:
    found = shim.get("/api/healthcheck").json()["implementation"]
    assert found["name"]
    assert isinstance(found["name"], str)
    assert found["version"]
    assert isinstance(found["version"], str)
    assert type(found["generation"]) is int
    assert found["generation"] >= 0
    started = datetime.fromisoformat(found["started_at"].replace("Z", "+00:00"))
    assert started.tzinfo is not None


@row("A61", "A24")
def test_uptime_and_the_last_upgrade_are_what_they_should_be(shim: Shim) -> None:
    found = shim.get("/api/healthcheck").json()["implementation"]
    assert type(found.get("uptime", 0)) is int
    assert found.get("uptime", 0) >= 0
    keys = {"from_version", "to_version", "outcome", "reason", "at"}
    last = found.get("last_upgrade", dict.fromkeys(keys, ""))
    assert keys <= set(last)
    assert all(isinstance(last[key], str) for key in keys)


@row("A25", "A3", "R1")
@pytest.mark.parametrize("force", [False, True])
def test_shutdown_ends_the_shim_and_nothing_else(
    force: bool, new_shim: MakeShim, images: Images, container_of: Any
) -> None:
    shim = new_shim()
    task = shim.run(images.idle)
    answer = shim.post("/api/shutdown", {"force": force})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text.strip() == ""
    eventually(lambda: not shim.alive, within=8, saying="the process has ended")
    with pytest.raises(httpx.ConnectError):
        shim.get("/api/healthcheck")
    assert container_of(task).status == "running"
    shim.start()


@row("A26")
def test_repeated_shutdown_is_harmless(new_shim: MakeShim) -> None:
    shim = new_shim()

    def shut(force: bool) -> int:
        try:
            return shim.post("/api/shutdown", {"force": force}).status_code
        except httpx.TransportError:  # it is gone already
            return 200

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(shut, [False] * 5 + [True])) == {200}
    eventually(lambda: not shim.alive, within=8, saying="the process has ended")


@row("A26")
def test_force_ends_a_shutdown_that_waits(new_shim: MakeShim, images: Images, wire: Wire) -> None:
    shim = new_shim()
    task = shim.run(images.idle)
    asked, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        asked.set()
        go_on.wait(20)

    second = httpx.Client(base_url=f"http://localhost:{shim.port}", trust_env=False)
    with wire.rule("POST", STOPS, hold), ThreadPoolExecutor(1) as pool, second:
        pool.submit(_quietly, task.terminate)
        assert asked.wait(5)
        assert second.get("/api/healthcheck").status_code == 200  # a connection that stays open
        assert shim.post("/api/shutdown", {"force": False}).status_code == 200
        _quietly(lambda: second.post("/api/shutdown", json={"force": True}))
        eventually(lambda: not shim.alive, within=7, saying="the process has ended")
        go_on.set()
    shim.start()


@row("A27", "A28")
def test_instance_health_is_null_or_made_of_known_numbers(shim: Shim) -> None:
    health = shim.get("/api/instance/health").json()
    assert set(health) == {"dcgm"}
    if health["dcgm"] is None:
        return
    incidents = health["dcgm"]["incidents"]
    assert isinstance(incidents, list)
    assert {health["dcgm"]["overall_health"], *(one["health"] for one in incidents)} <= {0, 10, 20}


@row("A29")
def test_instance_info_is_empty_without_gpus(shim: Shim) -> None:
    assert shim.get("/api/instance/info").json() == {}


@row("A30")
def test_task_list_is_empty_at_first(new_shim: MakeShim) -> None:
    assert new_shim().get("/api/tasks").json() == {"tasks": []}


@row("A30", "A31")
def test_task_list_has_every_task_until_removed(shim: Shim, images: Images) -> None:
    runs, ended = shim.run(images.idle, name="runs"), shim.submit(images.exits(0), name="ended")
    ended.end()
    listed = shim.get("/api/tasks").json()["tasks"]
    assert {frozenset(task) for task in listed} == {frozenset({"id", "status"})}
    assert shim.task_list() == {runs.id: "running", ended.id: "terminated"}
    ended.remove()
    assert shim.task_list() == {runs.id: "running"}


@row("A32")
def test_same_id_is_409_whatever_the_status(shim: Shim, images: Images) -> None:
    task = shim.submit(images.idle)
    assert shim.post("/api/tasks", task.body).status_code == 409
    task.reach("running")
    assert shim.post("/api/tasks", {**task.body, "name": "other"}).status_code == 409
    task.terminate()
    assert shim.post("/api/tasks", task.body).status_code == 409


@row("A32", "R37")
def test_two_submits_at_once_make_one_task(
    shim: Shim, images: Images, engine: docker.DockerClient
) -> None:
    task = shim.task(images.idle)
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda _: shim.post("/api/tasks", task.body).status_code, range(8))
        )
    assert sorted(answers) == [200] + [409] * 7
    task.reach("running")
    label = f"ai.dstack.shim.task-id={task.id}"
    assert len(engine.containers.list(all=True, filters={"label": label})) == 1


@row("A31")
def test_a_hundred_submits_at_once_are_all_accepted(
    new_shim: MakeShim, images: Images, wire: Wire
) -> None:
    shim = new_shim()
    # Their containers are refused: this is about the API under load, not about the machine.
    with wire.rule("POST", "^/containers/create", lambda _: refusal(500, "not today")):
        tasks = [shim.task(images.idle, name=f"t{number}") for number in range(100)]
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda task: shim.post("/api/tasks", task.body), tasks))
        assert {answer.status_code for answer in answers} == {200}
        assert set(shim.task_list()) == {task.id for task in tasks}
        eventually(
            lambda: set(shim.task_list().values()) == {"terminated"}, within=30, saying="all ended"
        )
    assert {task.info()["termination_reason"] for task in tasks} == {"creating_container_error"}


@row("A34")
@pytest.mark.parametrize("action", ["", "/terminate", "/remove"])
def test_unknown_task_is_404(action: str, shim: Shim) -> None:
    path = f"/api/tasks/nobody{action}"
    answer = shim.post(path, {}) if action else shim.get(path)
    assert answer.status_code == 404


@row("A35", "A36", "A37")
def test_task_info_has_the_keys_and_types_servers_parse(shim: Shim, images: Images) -> None:
    task = shim.submit(images.idle)
    for info in (task.info(), task.reach("running").info(), task.terminate().json()):
        assert set(INFO_KEYS) <= set(info)
        for key in ("termination_reason", "termination_message", "container_name", "container_id"):
            assert isinstance(info[key], str), key
        assert info["ports"] is None or isinstance(info["ports"], list)
        assert info["image_pull_progress"] is None
        assert not info["gpus_ids"]


@row("A38")
def test_terminate_answers_with_the_task_info(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    answer = task.terminate("terminated_by_user", "stopped by a user")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    info = answer.json()
    assert set(INFO_KEYS) <= set(info)
    assert info["status"] == "terminated"
    assert info["termination_reason"] == "terminated_by_user"
    assert info["termination_message"] == "stopped by a user"
    assert info == task.info()


@row("A39")
def test_terminate_is_500_if_the_engine_cannot_stop(
    shim: Shim, images: Images, wire: Wire
) -> None:
    task = shim.run(images.idle)
    with wire.rule("POST", STOPS, lambda _: refusal(500, "cannot stop it")):
        assert task.terminate().status_code == 500
        assert task.status == "running"
    assert task.terminate().status_code == 200


@row("A40", "R19")
def test_removed_task_is_unknown_and_its_id_free(
    shim: Shim, images: Images, engine: docker.DockerClient
) -> None:
    task = shim.run(images.idle)
    task.terminate()
    assert task.remove().status_code == 200
    assert task.get().status_code == 404
    assert task.remove().status_code == 404
    with pytest.raises(docker.errors.NotFound):
        engine.containers.get(task.container_name)
    task.submit().reach("running")


@row("A41")
def test_remove_before_terminate_is_409(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    assert task.remove().status_code == 409
    assert task.status == "running"


@row("A42")
def test_remove_without_container_is_fine(shim: Shim, images: Images, container_of: Any) -> None:
    task = shim.run(images.idle)
    task.terminate()
    container_of(task).remove(force=True)
    assert task.remove().status_code == 200
    assert task.get().status_code == 404


@row("A42")
def test_remove_is_500_if_the_engine_refuses(shim: Shim, images: Images, wire: Wire) -> None:
    task = shim.run(images.idle)
    task.terminate()
    with wire.rule("DELETE", "^/containers/", lambda _: refusal(500, "cannot remove it")):
        assert task.remove().status_code == 500
        assert task.status == "terminated"
    assert task.remove().status_code == 200


@row("A43")
def test_terminate_answers_when_the_container_has_ended(
    shim: Shim, images: Images, container_of: Any
) -> None:
    task = shim.run(images.idle)
    task.terminate()
    assert container_of(task).status == "exited"


@row("A45")
def test_requests_on_one_task_take_turns(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(lambda _: task.terminate().status_code, range(8)))
        removed = list(pool.map(lambda _: task.remove().status_code, range(4)))
    assert set(ended) == {200}
    assert sorted(removed) == [200, 404, 404, 404]
    assert shim.alive


@row("A45", "A41")
def test_remove_while_terminating_waits_or_refuses(shim: Shim, images: Images, wire: Wire) -> None:
    task = shim.run(images.idle)
    asked, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> Reply | None:
        asked.set()
        go_on.wait(20)
        return None

    with wire.rule("POST", STOPS, hold), ThreadPoolExecutor(2) as pool:
        ending = pool.submit(task.terminate)
        assert asked.wait(5)
        removing = pool.submit(task.remove)
        go_on.set()
        assert ending.result().status_code == 200
        assert removing.result().status_code in {200, 409}
    assert shim.alive


@row("A56")
def test_metrics_are_404_without_exporter(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    assert shim.get(f"/metrics/tasks/{task.id}").status_code == 404
    assert shim.get("/metrics/tasks/nobody").status_code == 404


def _quietly(call: Callable[[], Any]) -> None:
    try:
        call()
    except httpx.TransportError:
        return
