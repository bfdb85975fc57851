"""A: what a submit body may hold, and that a refused one leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import docker
import pytest

from tests.conformance.images import Images
from tests.conformance.rows import row
from tests.conformance.shim import Shim

Refuses = Callable[..., None]


@pytest.fixture
def refuses(shim: Shim, images: Images, engine: docker.DockerClient) -> Refuses:
    """Submit a task with these fields: 400 (or another 4xx) naming the field, and nothing left."""

    def check(field: str = "", status: int = 400, /, **fields: Any) -> None:
        task = shim.task(images.idle, **fields)
        before = _left(shim, engine)
        answer = shim.post("/api/tasks", task.body)
        assert answer.status_code == status
        assert field in answer.text
        assert _left(shim, engine) == before

    return check


def _left(shim: Shim, engine: docker.DockerClient) -> tuple[Any, ...]:
    runners = shim.home / "runners"
    return (
        shim.task_list(),
        sorted(place.name for place in runners.iterdir()) if runners.exists() else [],
        sorted(container.id for container in engine.containers.list(all=True)),
    )


@row("A16", "A55")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 5),
        ("name", ["a"]),
        ("image_name", {"a": 1}),
        ("registry_username", 1),
        ("registry_password", True),
        ("container_user", 0),
        ("privileged", "true"),
        ("privileged", 1),
        ("cpu", "2"),
        ("network_mode", 1),
        ("volumes", {"backend": "aws"}),
        ("volume_mounts", "x"),
        ("instance_mounts", [["/a", "/b"]]),
        ("gpu_devices", [1]),
        ("host_ssh_user", ["root"]),
        ("host_ssh_keys", "ssh-ed25519 AAAA"),
        ("container_ssh_keys", [1]),
    ],
)
def test_wrong_type_is_400_naming_the_field(field: str, value: Any, refuses: Refuses) -> None:
    refuses(field, **{field: value})


@row("A16", "A48")
@pytest.mark.parametrize(
    ("field", "inner", "value"),
    [
        ("volumes", "init_fs", {"backend": "aws", "init_fs": "yes"}),
        ("volumes", "device_name", {"backend": "aws", "device_name": 1}),
        ("volume_mounts", "path", {"name": "v", "path": 1}),
        ("instance_mounts", "instance_path", {"instance_path": [], "path": "/p"}),
        ("gpu_devices", "path_on_host", {"path_on_host": 3, "path_in_container": "/dev/x"}),
    ],
)
def test_wrong_type_inside_a_list_is_400(
    field: str, inner: str, value: Any, refuses: Refuses
) -> None:
    refuses(inner, **{field: [value]})


@row("A19", "A47")
@pytest.mark.parametrize("field", ["gpu", "memory", "shm_size"])
@pytest.mark.parametrize("value", [1.0, 1.5, "1", True, [1]])
def test_integers_refuse_everything_else(field: str, value: Any, refuses: Refuses) -> None:
    refuses(field, **{field: value})


@row("A19")
@pytest.mark.parametrize("value", [1.0, "0", True])
def test_timeout_refuses_everything_but_integers(value: Any, shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    answer = task.terminate(timeout=value)
    assert answer.status_code == 400
    assert "timeout" in answer.text
    assert task.status == "running"


@row("A16")
@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        ("/api/shutdown", "force", "true"),
        ("/api/components/install", "url", 5),
        ("/api/tasks/some/terminate", "termination_reason", 5),
    ],
)
def test_wrong_type_in_other_bodies_is_400(route: str, field: str, value: Any, shim: Shim) -> None:
    answer = shim.post(route, {field: value})
    assert answer.status_code == 400
    assert field in answer.text
    assert shim.alive


@row("A33", "A55")
@pytest.mark.parametrize("field", ["id", "name", "image_name"])
@pytest.mark.parametrize("how", ["empty", "null", "missing"])
def test_three_fields_must_not_be_empty(
    field: str, how: str, shim: Shim, images: Images, engine: docker.DockerClient
) -> None:
    body = {**shim.task(images.idle).body, field: {"empty": "", "null": None}.get(how)}
    if how == "missing":
        del body[field]
    before = _left(shim, engine)
    answer = shim.post("/api/tasks", body)
    assert answer.status_code == 400
    assert field in answer.text
    assert _left(shim, engine) == before


@row("A46")
def test_empty_user_and_network_mean_root_and_host(
    shim: Shim, images: Images, container_of: Any
) -> None:
    task = shim.run(images.idle, container_user="", network_mode="")
    made = container_of(task).attrs
    assert made["Config"]["User"] == "root"
    assert made["HostConfig"]["NetworkMode"] == "host"


@row("A47")
def test_cpu_may_be_an_integer_or_a_fraction(
    shim: Shim, images: Images, container_of: Any
) -> None:
    for cpu in (1, 0.5):
        task = shim.run(images.idle, cpu=cpu)
        assert container_of(task).attrs["HostConfig"]["NanoCpus"] == int(cpu * 1e9)


@row("A48")
def test_device_name_may_be_null(shim: Shim, images: Images) -> None:
    volume = {"backend": "none-such", "name": "v", "volume_id": "1", "init_fs": False}
    task = shim.submit(images.idle, volumes=[{**volume, "device_name": None}])
    assert task.outcome()[0] == "executor_error"


@row("A49", "A55")
@pytest.mark.parametrize(
    "value", ["a/b", "../../x", "/etc", "..", ".", "a\nb", "a\0b", "\x1b[31m", "x" * 257]
)
def test_id_that_could_be_a_path_or_a_trick_is_refused(value: str, refuses: Refuses) -> None:
    refuses("id", id=value)


@row("A50", "A55")
@pytest.mark.parametrize(
    "value", ["../../x", "a/b", ".hidden", "-x", "a b", "a$(id)", "a\nb", "a\0", "ü", "x" * 201]
)
def test_name_the_engine_would_not_take_is_refused(value: str, refuses: Refuses) -> None:
    refuses("name", name=value)


@row("A51")
@pytest.mark.parametrize("value", ["none", "HOST", "container:other", "my-net"])
def test_other_networks_are_refused(value: str, refuses: Refuses) -> None:
    refuses("network_mode", network_mode=value)


@row("A52")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu", -0.5),
        ("cpu", 1e300),
        ("memory", -1),
        ("shm_size", -64),
        ("memory", -(2**70)),
    ],
)
def test_impossible_limits_are_refused(field: str, value: float, refuses: Refuses) -> None:
    refuses(field, **{field: value})


@row("A53", "A55")
@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", ".", "a\0"])
def test_volume_name_that_is_a_path_is_refused(name: str, refuses: Refuses) -> None:
    volume = {"backend": "gcp", "volume_id": "1", "init_fs": True, "device_name": "d"}
    refuses("volumes", volumes=[{**volume, "name": name}])
    refuses("volume_mounts", volume_mounts=[{"name": name, "path": "/v"}])


@row("A54", "A55")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("volume_mounts", {"name": "v", "path": "relative"}),
        ("volume_mounts", {"name": "v", "path": "/a/../../etc"}),
        ("instance_mounts", {"instance_path": "relative", "path": "/p"}),
        ("instance_mounts", {"instance_path": "/tmp/../etc", "path": "/p"}),
        ("instance_mounts", {"instance_path": "/tmp/x", "path": "p"}),
        ("instance_mounts", {"instance_path": "/tmp/x\0", "path": "/p"}),
    ],
)
def test_mount_path_that_leads_elsewhere_is_refused(
    field: str, value: Any, refuses: Refuses
) -> None:
    refuses(field, **{field: [value]})


@row("A14", "A16")
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"[]", id="a-list"),
        pytest.param(b'"text"', id="a-string"),
        pytest.param(b"5", id="a-number"),
        pytest.param(b'{"id": "\xff\xfe"', id="cut-and-not-utf-8"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"memory": ' + b"9" * 5000 + b"}", id="huge-number"),
        pytest.param(b'{"cpu": NaN}', id="not-a-number"),
    ],
)
def test_strange_document_is_refused_and_survived(content: bytes, shim: Shim) -> None:
    assert shim.post("/api/tasks", content=content).status_code == 400
    assert shim.get("/api/healthcheck").status_code == 200
