"""C: a container's network, limits, environment, and its removal."""

from __future__ import annotations

from typing import Any

import docker
import httpx
import pytest

from tests.conformance.conftest import MakeShim
from tests.conformance.containers import ContainerOf, environment_of
from tests.conformance.images import Images
from tests.conformance.instance import Instance
from tests.conformance.rows import row
from tests.conformance.shim import Shim
from tests.eventually import eventually

IS_TASK = {"ai.dstack.shim.is-task": "true"}

# -- network ----------------------------------------------------------------------------------


@row("C19", "C20", "C21", "C23")
def test_bridge_reports_both_ports_and_nothing_else(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    image = images.built("conformance/exposes:1", images.idle, "EXPOSE 8080/tcp 53/udp")
    task = shim.run(image, network_mode="bridge")
    container = container_of(task)
    assert container.attrs["HostConfig"]["NetworkMode"] == "bridge"
    ports = task.info()["ports"]
    assert sorted(port["container"] for port in ports) == sorted(shim.runner_ports)
    bound = container.attrs["NetworkSettings"]["Ports"]
    for port in ports:
        (binding,) = bound[f"{port['container']}/tcp"]
        assert binding == {"HostIp": "127.0.0.1", "HostPort": str(port["host"])}
        assert port["host"] not in shim.runner_ports


@row("C21")
def test_two_tasks_on_the_bridge_get_ports_of_their_own(shim: Shim, images: Images) -> None:
    tasks = [shim.run(images.idle, name=name, network_mode="bridge") for name in ("one", "two")]
    ports = [port["host"] for task in tasks for port in task.info()["ports"]]
    assert len(set(ports)) == 4


@row("C21")
def test_reported_port_leads_to_the_runner(shim: Shim, images: Images) -> None:
    task = shim.run(images.job("serve; sleep 1000"), network_mode="bridge")
    (port,) = [
        port["host"] for port in task.info()["ports"] if port["container"] == shim.runner_ports[0]
    ]
    found = eventually(lambda: _fetch(f"http://127.0.0.1:{port}/api/healthcheck"), within=10)
    assert found is not None
    assert found["service"] == "dstack-runner"


@row("C19", "C20", "C22")
def test_host_network_reports_no_ports(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle, network_mode="host")
    made = container_of(task).attrs
    wanted = {f"{port}/tcp" for port in shim.runner_ports}
    assert made["HostConfig"]["NetworkMode"] == "host"
    assert set(made["Config"]["ExposedPorts"]) >= wanted
    assert set(made["HostConfig"]["PortBindings"]) == wanted
    assert task.info()["ports"] == []


@row("C24", "C23")
@pytest.mark.parametrize("network", ["bridge", "host"])
def test_running_task_always_has_its_ports(network: str, shim: Shim, images: Images) -> None:
    expected = 2 if network == "bridge" else 0
    for number in range(5):
        task = shim.submit(images.idle, name=f"t{number}", network_mode=network)
        while (info := task.info())["status"] != "running":
            assert info["status"] != "terminated"
        assert info["ports"] is not None
        assert len(info["ports"]) == expected


# -- limits, user, environment ----------------------------------------------------------------


@row("C25")
def test_shm_size_makes_an_executable_tmpfs(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    size = 3 * 1024 * 1024
    container = container_of(shim.run(images.idle, shm_size=size))
    made = container.attrs["HostConfig"]
    assert made["ShmSize"] == size
    assert made["Tmpfs"] == {"/dev/shm": f"exec,size={size}"}
    script = "cp /bin/busybox /dev/shm/echo && /dev/shm/echo works"
    assert container.exec_run(["sh", "-c", script]).output == b"works\n"


@row("C25", "C26")
def test_no_limits_unless_asked_for(shim: Shim, images: Images, container_of: ContainerOf) -> None:
    made = container_of(shim.run(images.idle)).attrs["HostConfig"]
    assert not made.get("Tmpfs")
    assert made["ShmSize"] == 64 * 1024 * 1024  # the engine's own
    assert (made["NanoCpus"], made["Memory"]) == (0, 0)


@row("C26")
def test_cpu_and_memory_are_limits(shim: Shim, images: Images, container_of: ContainerOf) -> None:
    task = shim.run(images.idle, cpu=0.25, memory=64 * 1024 * 1024)
    made = container_of(task).attrs["HostConfig"]
    assert (made["NanoCpus"], made["Memory"]) == (250_000_000, 64 * 1024 * 1024)


@row("C27")
@pytest.mark.parametrize("user", ["worker", "1000:1000", "0"])
def test_user_is_the_submitted_one(
    user: str, shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.submit(images.job("sleep 1000"), container_user=user).reach("running")
    assert container_of(task).attrs["Config"]["User"] == user


@row("C28")
@pytest.mark.parametrize("wanted", [False, True])
def test_privileged_is_the_tasks_choice(
    wanted: bool, shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle, privileged=wanted)
    assert container_of(task).attrs["HostConfig"]["Privileged"] is wanted


@row("C28", "L15")
@pytest.mark.parametrize("how", ["flag", "variable"])
def test_privileged_shim_makes_privileged_containers(
    how: str, new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    if how == "flag":
        shim = new_shim("--privileged")
    else:
        shim = new_shim(variables={"DSTACK_DOCKER_PRIVILEGED": "1"})
    task = shim.run(images.idle, privileged=False)
    assert container_of(task).attrs["HostConfig"]["Privileged"] is True


@row("C29", "L14")
def test_proxy_variables_are_passed_on(
    new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    given = {"http_proxy": "http://user:p%40ss@proxy:3128/?a=b", "NO_PROXY": "", "OTHER": "x"}
    found = environment_of(container_of(new_shim(variables=given).run(images.idle)))
    assert found["http_proxy"] == given["http_proxy"]
    assert found["NO_PROXY"] == ""
    assert not {"https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "OTHER"} & set(found)


@row("C29", "L14")
@pytest.mark.parametrize("how", ["flag", "variable"])
def test_passed_variables_can_be_named(
    how: str, new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    variables = {"ONE": "1", "TWO": "2 = two", "http_proxy": "http://proxy"}
    if how == "flag":
        shim = new_shim("--pass-env", "ONE, TWO,,THREE", variables=variables)
    else:
        shim = new_shim(variables=variables | {"DSTACK_DOCKER_PASS_ENV": "ONE, TWO,,THREE"})
    found = environment_of(container_of(shim.run(images.idle)))
    assert (found["ONE"], found["TWO"]) == ("1", "2 = two")
    assert not {"THREE", "http_proxy", ""} & set(found)


@row("C30", "L16")
@pytest.mark.parametrize("how", ["flag", "variable"])
def test_pjrt_device_is_passed(
    how: str, new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    if how == "flag":
        shim = new_shim("--pjrt-device=TPU")
    else:
        shim = new_shim(variables={"PJRT_DEVICE": "TPU"})
    assert environment_of(container_of(shim.run(images.idle)))["PJRT_DEVICE"] == "TPU"


@row("C30")
def test_no_pjrt_device_by_default(shim: Shim, images: Images, container_of: ContainerOf) -> None:
    assert "PJRT_DEVICE" not in environment_of(container_of(shim.run(images.idle)))


@row("C31")
def test_infiniband_is_passed_on(
    instance: Instance, new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    with instance.devices("/dev/infiniband/uverbs0"):
        container = container_of(new_shim().run(images.idle))
        made = container.attrs["HostConfig"]
        (device,) = made["Devices"]
        assert device["PathOnHost"] == device["PathInContainer"] == "/dev/infiniband"
        assert {"Name": "memlock", "Hard": -1, "Soft": -1} in made["Ulimits"]
        assert container.exec_run(["ls", "/dev/infiniband"]).output == b"uverbs0\n"


@row("C31", "C35")
def test_host_without_devices_passes_none(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    devices = [{"path_on_host": "/dev/null", "path_in_container": "/dev/gpu"}]
    for gpus in (0, -1):
        task = shim.run(images.idle, gpu=gpus, gpu_devices=devices)
        made = container_of(task).attrs["HostConfig"]
        assert not made["Devices"]
        assert not made["DeviceRequests"]
        assert not made["Ulimits"]
        assert not task.info()["gpus_ids"]


# -- removal and names taken ------------------------------------------------------------------


@row("C32")
def test_remove_takes_anonymous_volumes_along(
    shim: Shim, images: Images, engine: docker.DockerClient, container_of: ContainerOf
) -> None:
    task = shim.run(images.job("sleep 1000", volume="/data"))
    (name,) = [
        mount["Name"] for mount in container_of(task).attrs["Mounts"] if mount["Type"] == "volume"
    ]
    task.terminate()
    assert engine.volumes.get(name).name == name
    task.remove()
    with pytest.raises(docker.errors.NotFound):
        engine.volumes.get(name)


@row("C33", "R37")
@pytest.mark.parametrize("state", ["created", "exited"])
def test_own_leftover_with_the_name_is_no_obstacle(
    state: str, shim: Shim, images: Images, engine: docker.DockerClient
) -> None:
    task = shim.task(images.idle)
    labels = {**IS_TASK, "ai.dstack.shim.task-id": task.id}
    with shim.paused():  # or it may see it run, and take it for a task of its own
        leftover = engine.containers.create(
            images.idle, ["true"], entrypoint="", name=task.container_name, labels=labels
        )
        if state == "exited":
            leftover.start()
            leftover.wait(timeout=10)
    task.submit().reach("running")
    found = engine.containers.list(
        all=True, filters={"label": f"ai.dstack.shim.task-id={task.id}"}
    )
    assert [container.name for container in found] == [task.container_name]
    assert found[0].status == "running"


@row("C34")
def test_foreign_container_with_the_name_is_left_alone(
    shim: Shim, images: Images, engine: docker.DockerClient
) -> None:
    task = shim.task(images.idle)
    foreign = engine.containers.create(images.idle, ["true"], name=task.container_name)
    try:
        reason, message = task.submit().outcome()
        assert reason == "creating_container_error"
        assert task.container_name in message
        task.terminate()
        assert task.remove().status_code == 200
        assert engine.containers.get(task.container_name).id == foreign.id
    finally:
        foreign.remove(force=True)


def _fetch(url: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = httpx.get(url, trust_env=False).json()
    except httpx.TransportError:
        return None
    return found
