"""H and C: which task has which GPU, and how the container gets it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker
import pytest

from tests.conformance import gpus
from tests.conformance.conftest import MakeShim
from tests.conformance.containers import ContainerOf, environment_of
from tests.conformance.engine import Request, Wire, refusal
from tests.conformance.gpus import UUIDS
from tests.conformance.images import Images
from tests.conformance.instance import Instance
from tests.conformance.rows import row
from tests.conformance.shim import Shim
from tests.lab.engine import PrivateEngine

CAPABILITIES = ["gpu", "utility", "compute", "graphics", "video", "display", "compat32"]


@pytest.fixture
def host(instance: Instance, new_shim: MakeShim) -> Iterator[Shim]:
    """A shim on a host with three NVIDIA cards."""
    with gpus.nvidia(instance, count=3):
        yield new_shim()


def held(shim: Shim) -> list[str]:
    """GPUs of all tasks that are not terminated."""
    return [
        gpu
        for id_, status in shim.task_list().items()
        if status != "terminated"
        for gpu in shim.get(f"/api/tasks/{id_}").json()["gpus_ids"]
    ]


# -- who has which ----------------------------------------------------------------------------


@row("H15", "A37", "H17", "R34")
def test_each_task_gets_gpus_of_its_own(host: Shim, images: Images) -> None:
    one = host.run(images.idle, name="one", gpu=1)
    two = host.run(images.idle, name="two", gpu=2)
    assert len(one.info()["gpus_ids"]) == 1
    assert sorted(one.info()["gpus_ids"] + two.info()["gpus_ids"]) == sorted(UUIDS[:3])


@row("H15", "S11")
def test_too_few_idle_gpus_fail_the_task_and_take_none(host: Shim, images: Images) -> None:
    host.run(images.idle, name="two", gpu=2)
    reason, message = host.submit(images.idle, name="greedy", gpu=2).outcome()
    assert reason == "executor_error"
    assert message
    assert len(host.run(images.idle, name="modest", gpu=1).info()["gpus_ids"]) == 1


@row("H15")
def test_minus_1_takes_all_that_are_idle(host: Shim, images: Images) -> None:
    host.run(images.idle, name="one", gpu=1)
    assert len(host.run(images.idle, name="rest", gpu=-1).info()["gpus_ids"]) == 2
    assert not host.run(images.idle, name="none", gpu=-1).info()["gpus_ids"]


@row("H15", "C35")
def test_gpu_0_takes_none(host: Shim, images: Images, container_of: ContainerOf) -> None:
    task = host.run(images.idle, gpu=0)
    assert not task.info()["gpus_ids"]
    assert not container_of(task).attrs["HostConfig"]["DeviceRequests"]


@row("H16")
@pytest.mark.parametrize("number", [-2, -(2**31)])
def test_other_negative_numbers_never_run(number: int, host: Shim, images: Images) -> None:
    task = host.task(images.idle, gpu=number)
    answer = host.post("/api/tasks", task.body)
    if answer.status_code == 200:
        assert task.outcome()[0] == "executor_error"
    else:
        assert answer.status_code == 400
    assert held(host) == []


@row("H17")
@pytest.mark.parametrize("end", ["terminate", "exit", "vanish"])
def test_gpu_is_idle_again_when_its_task_has_ended(
    end: str, host: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = host.run(images.idle, gpu=3)
    if end == "terminate":
        task.terminate()
    elif end == "exit":
        container_of(task).kill()
    else:
        container_of(task).remove(force=True)
    task.end()
    assert len(host.run(images.idle, name="next", gpu=3).info()["gpus_ids"]) == 3


@row("H17")
def test_gpu_of_a_failed_start_is_idle_again(host: Shim, images: Images) -> None:
    assert host.submit(images.idle, gpu=3, memory=1).outcome()[0] == "creating_container_error"
    assert len(host.run(images.idle, name="next", gpu=3).info()["gpus_ids"]) == 3


@row("H17", "R34")
def test_ending_a_task_twice_frees_nobody_elses_gpu(host: Shim, images: Images) -> None:
    first = host.run(images.idle, name="first", gpu=3)
    first.terminate()
    second = host.run(images.idle, name="second", gpu=3)
    first.terminate()
    first.remove()
    assert len(second.info()["gpus_ids"]) == 3
    assert host.submit(images.idle, name="third", gpu=1).outcome()[0] == "executor_error"


@row("H17", "R34")
def test_many_at_once_never_share(host: Shim, images: Images) -> None:
    tasks = [host.task(images.idle, name=f"t{number}", gpu=1) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda task: task.submit(), tasks))
    for task in tasks:
        task.reach("running", "terminated")
    assert sorted(held(host)) == sorted(UUIDS[:3])


# -- how the container gets them --------------------------------------------------------------


@row("C37", "H18")
def test_nvidia_gpus_are_one_device_request(
    host: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = host.run(images.idle, gpu=2)
    (request,) = container_of(task).attrs["HostConfig"]["DeviceRequests"]
    assert sorted(request["DeviceIDs"]) == sorted(task.info()["gpus_ids"])
    assert set(request["DeviceIDs"]) <= set(UUIDS)
    (capabilities,) = request["Capabilities"]
    assert sorted(capabilities) == sorted(CAPABILITIES)


@row("C38")
def test_host_without_modeset_gets_no_display(
    host: Shim,
    images: Images,
    engine: docker.DockerClient,
    container_of: ContainerOf,
    private_engine: PrivateEngine,
) -> None:
    private_engine.say_no_modeset()
    try:
        task = host.run(images.idle, gpu=1)
    finally:
        private_engine.say_no_modeset(is_missing=False)
    (request,) = container_of(task).attrs["HostConfig"]["DeviceRequests"]
    assert sorted(request["Capabilities"][0]) == sorted(set(CAPABILITIES) - {"display"})
    assert request["DeviceIDs"] == task.info()["gpus_ids"]
    assert task.info()["container_id"] == container_of(task).id
    label = f"ai.dstack.shim.task-id={task.id}"
    assert len(engine.containers.list(all=True, filters={"label": label})) == 1


@row("C38", "S8")
def test_other_start_failures_are_not_repeated(host: Shim, images: Images, wire: Wire) -> None:
    starts: list[Request] = []
    with wire.rule("POST", r"^/containers/[^/]+/start", starts.append):
        task = host.submit(images.idle, gpu=1, container_user="nobody-of-that-name")
        assert task.outcome()[0] == "container_exited_with_error"
    assert len(starts) == 1


@row("C36")
def test_gpu_devices_replace_the_vendors_way(
    host: Shim, images: Images, container_of: ContainerOf
) -> None:
    devices = [
        {"path_on_host": "/dev/null", "path_in_container": "/dev/nvidia0"},
        {"path_on_host": "/dev/nvidiactl", "path_in_container": "/dev/nvidiactl"},
    ]
    task = host.run(images.idle, gpu=1, gpu_devices=devices)
    made = container_of(task).attrs["HostConfig"]
    assert not made["DeviceRequests"]
    assert made["Devices"] == [
        {
            "PathOnHost": device["path_on_host"],
            "PathInContainer": device["path_in_container"],
            "CgroupPermissions": "rwm",
        }
        for device in devices
    ]
    assert len(task.info()["gpus_ids"]) == 1


@row("C42", "R11", "R12")
def test_gpus_given_as_devices_are_known_after_a_restart(host: Shim, images: Images) -> None:
    device = {"path_on_host": "/dev/null", "path_in_container": "/dev/nvidia0"}
    task = host.run(images.idle, gpu=2, gpu_devices=[device])
    before = task.info()["gpus_ids"]
    host.restart()
    assert task.info()["gpus_ids"] == before
    assert len(host.run(images.idle, name="next", gpu=-1).info()["gpus_ids"]) == 1


@row("C39", "H6", "H18")
def test_amd_gpus_are_render_nodes(
    instance: Instance, new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    buses = {"0000:03:00.0": 128, "0000:83:00.0": 129}
    with gpus.amd(instance, images, [gpus.amd_gpu(bus) for bus in buses], buses):
        shim = new_shim()
        task = shim.run(images.idle, gpu=2)
        nodes = ["/dev/dri/renderD128", "/dev/dri/renderD129"]
        assert sorted(task.info()["gpus_ids"]) == nodes
        made = container_of(task).attrs["HostConfig"]
        given = {device["PathOnHost"]: device for device in made["Devices"]}
        assert sorted(given) == sorted(["/dev/kfd", *nodes])
        assert all(one["PathInContainer"] == path for path, one in given.items())
        assert {one["CgroupPermissions"] for one in given.values()} == {"rwm"}
        assert made["IpcMode"] == "host"
        assert made["CapAdd"] == ["SYS_PTRACE"]
        assert "seccomp=unconfined" in made["SecurityOpt"]  # the engine adds one of its own


@row("C40", "H18")
@pytest.mark.parametrize("huge_pages", [False, True])
def test_tenstorrent_gpus_are_numbered_devices(
    huge_pages: bool,
    instance: Instance,
    new_shim: MakeShim,
    images: Images,
    container_of: ContainerOf,
) -> None:
    boards = [("n150", "b1", "0000:01:00.0"), ("n150", "b2", "0000:02:00.0")]
    extra = ["/dev/hugepages-1G/"] if huge_pages else []
    with gpus.tenstorrent(instance, images, boards), instance.devices(*extra):
        task = new_shim().run(images.idle, gpu=2)
        assert sorted(task.info()["gpus_ids"]) == ["0", "1"]
        made = container_of(task).attrs
        given = sorted(device["PathOnHost"] for device in made["HostConfig"]["Devices"])
        assert given == ["/dev/tenstorrent/0", "/dev/tenstorrent/1"]
        targets = {mount["Destination"]: mount["Source"] for mount in made["Mounts"]}
        assert ("/dev/hugepages-1G" in targets) is huge_pages
        if huge_pages:
            assert targets["/dev/hugepages-1G"] == "/dev/hugepages-1G"


@row("C41", "H7", "H18")
def test_gaudi_gpus_are_a_runtime_and_a_variable(
    instance: Instance, new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    with gpus.gaudi(instance, "HL-225, 98304, 0\nHL-225, 98304, 1\nHL-225, 98304, 2\n"):
        task = new_shim().run(images.idle, gpu=2)
        container = container_of(task)
        made = container.attrs["HostConfig"]
        assert made["Runtime"] == "habana"
        assert made["IpcMode"] == "host"
        assert made["CapAdd"] == ["SYS_NICE"]
        visible = environment_of(container)["HABANA_VISIBLE_DEVICES"]
        assert visible.split(",") == task.info()["gpus_ids"]
        assert set(task.info()["gpus_ids"]) <= {"0", "1", "2"}


@row("C35")
@pytest.mark.parametrize("gpu", [0, -1])
def test_no_gpu_left_means_no_vendor_settings(
    gpu: int, instance: Instance, new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    with gpus.gaudi(instance, "HL-225, 98304, 0\n"):
        shim = new_shim()
        shim.run(images.idle, name="all", gpu=1)
        container = container_of(shim.run(images.idle, name="none", gpu=gpu))
        made: dict[str, Any] = container.attrs["HostConfig"]
        assert made["Runtime"] != "habana"
        assert not made["CapAdd"]
        assert "HABANA_VISIBLE_DEVICES" not in environment_of(container)


# -- restart ----------------------------------------------------------------------------------


@row("R11", "R34")
def test_gpus_of_running_tasks_are_held_after_a_restart(host: Shim, images: Images) -> None:
    runs, ended = host.run(images.idle, gpu=1), host.run(images.idle, name="ended", gpu=2)
    ended.terminate()
    before = runs.info()["gpus_ids"]
    host.restart()
    assert runs.info()["gpus_ids"] == before
    assert runs.status == "running"
    rest = host.run(images.idle, name="rest", gpu=-1).info()["gpus_ids"]
    assert sorted(before + rest) == sorted(UUIDS[:3])


@row("R12")
def test_gpus_stay_held_if_the_container_cannot_be_inspected(
    host: Shim, images: Images, wire: Wire
) -> None:
    task = host.run(images.idle, gpu=2)
    host.kill()
    path = rf"^/containers/({task.container_name}|[0-9a-f]{{64}})/json"
    with wire.rule("GET", path, lambda _: refusal(500, "not now")):
        host.start()
        held_now = host.submit(images.idle, name="greedy", gpu=2)
        assert held_now.outcome()[0] == "executor_error"


@row("R14", "R34")
def test_two_containers_with_one_id_are_one_task(
    host: Shim, images: Images, engine: docker.DockerClient
) -> None:
    task = host.run(images.idle, gpu=1)
    host.kill()
    mine = engine.containers.get(task.container_name)
    (request,) = mine.attrs["HostConfig"]["DeviceRequests"]
    spare = next(uuid for uuid in UUIDS if uuid not in request["DeviceIDs"])
    engine.containers.run(
        images.idle,
        ["sleep", "1000"],
        entrypoint="",
        detach=True,
        labels=mine.labels,
        device_requests=[
            docker.types.DeviceRequest(device_ids=[spare], capabilities=[CAPABILITIES])
        ],
    )
    host.start()
    assert list(host.task_list()) == [task.id]
    assert len(host.run(images.idle, name="next", gpu=2).info()["gpus_ids"]) == 2
