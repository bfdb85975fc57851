"""The whole container of a task, as pure data; the real engine takes it in tests/engine."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from dstack_shim_contracts.api import GpuDevice, InstanceMount, TaskConfig, VolumeMount
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.engine.container import (
    ContainerSettings,
    container_spec,
    gpus_from_details,
    gpus_from_labels,
    host_keys_from_labels,
    lacks_display,
    runner_port_from_labels,
    without_display,
)
from dstack_shim.engine.protocol import (
    Container,
    ContainerDetails,
    ContainerSpec,
    ContainerState,
    Device,
    Mount,
    PortBinding,
    Ulimit,
)
from dstack_shim.engine.runner_command import RunnerFlags
from dstack_shim.errors import ComponentError, ResourceError

CONFIG = TaskConfig(
    id="t1",
    name="job-0-0",
    image_name="host:5000/a:1",
    registry_username="alice",
    registry_password="s3cret",
)
SETTINGS = ContainerSettings(home="/root/.dstack", runner_path="/opt/runner")
UUIDS = ("GPU-1", "GPU-2")


def spec(
    config: TaskConfig = CONFIG,
    settings: ContainerSettings = SETTINGS,
    gpus: tuple[str, ...] = (),
) -> ContainerSpec:
    return container_spec(
        config,
        settings,
        runner_version="0.22.5",
        runner_dir="/root/.dstack/runners/x/runner",
        gpus=gpus,
    )


def task(**changes: Any) -> ContainerSpec:
    return spec(attrs.evolve(CONFIG, **changes))


def host(gpus: tuple[str, ...] = (), **changes: Any) -> ContainerSpec:
    return spec(settings=attrs.evolve(SETTINGS, **changes), gpus=gpus)


def test_a_plain_task_gets_a_plain_container() -> None:
    plain = spec()
    assert plain.name == "job-0-0-e7df4b70"
    assert plain.image == "host:5000/a:1"
    assert plain.entrypoint == ("/bin/sh", "-c")
    assert len(plain.command) == 1
    assert (plain.network_mode, plain.user, plain.privileged) == ("host", "root", False)
    assert (plain.shm_size, plain.tmpfs, plain.nano_cpus, plain.memory) == (0, {}, 0, 0)
    assert plain.mounts == (
        Mount("/root/.dstack/runners/x/runner", "/tmp/runner"),
        Mount("/opt/runner", "/usr/local/bin/dstack-runner"),
    )
    assert plain.ports == (PortBinding(10999), PortBinding(10022))
    assert plain.env == {}
    assert (plain.devices, plain.device_requests, plain.cap_add) == ((), (), ())
    assert (plain.security_opt, plain.ulimits, plain.ipc_mode, plain.runtime) == ((), (), "", "")


def test_labels_say_all_that_a_lost_record_would_have_said_of_the_host() -> None:
    config = attrs.evolve(CONFIG, host_ssh_user="ubuntu", host_ssh_keys=("ssh-ed25519 AAAA me",))
    settings = attrs.evolve(SETTINGS, gpu_vendor="nvidia", boot_id="b1")
    assert spec(config, settings, UUIDS).labels == {
        "ai.dstack.shim.is-task": "true",
        "ai.dstack.shim.task-id": "t1",
        "ai.dstack.shim.home": "/root/.dstack",
        "ai.dstack.shim.gpus": '["GPU-1", "GPU-2"]',
        "ai.dstack.shim.ports": "[10999, 10022]",
        "ai.dstack.shim.intent": "start",
        "ai.dstack.shim.boot-id": "b1",
        "ai.dstack.shim.host-ssh-keys": '{"user": "ubuntu", "keys": ["ssh-ed25519 AAAA me"]}',
    }
    assert host_keys_from_labels(spec(config).labels) == ("ubuntu", ("ssh-ed25519 AAAA me",))


def test_labels_say_nothing_where_there_is_nothing_to_say() -> None:
    labels = spec().labels
    assert {"ai.dstack.shim.boot-id", "ai.dstack.shim.host-ssh-keys"}.isdisjoint(labels)
    assert host_keys_from_labels(labels) == ("", ())
    assert gpus_from_labels(labels) == ()


def test_the_runners_port_is_read_back_from_the_labels() -> None:
    flags = RunnerFlags(http_port=1234, ssh_port=22)
    assert runner_port_from_labels(host(runner_flags=flags).labels) == 1234


@pytest.mark.parametrize("text", [None, "", "{", "[]", '["1"]', "[true]", "1", "[" * 100_000])
def test_a_port_that_labels_do_not_tell_is_left_open(text: str | None) -> None:
    labels = {} if text is None else {"ai.dstack.shim.ports": text}
    assert runner_port_from_labels(labels) is None


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"user": "u"}', '{"user": "u", "keys": [1]}', '{"keys": ["k"]}']
)
def test_keys_that_labels_do_not_tell_are_nobodys(text: str) -> None:
    assert host_keys_from_labels({"ai.dstack.shim.host-ssh-keys": text}) == ("", ())


def test_no_credential_is_anywhere_in_it() -> None:
    everything = repr(attrs.asdict(spec()))
    assert "s3cret" not in everything
    assert "alice" not in everything


def test_a_proxys_password_is_in_no_repr() -> None:
    settings = attrs.evolve(SETTINGS, pass_env={"http_proxy": "http://u:p4ss@proxy"})
    assert "p4ss" not in repr(settings)
    assert "p4ss" not in repr(spec(settings=settings))


def test_shared_memory_is_executable_and_of_the_size_asked_for() -> None:
    sized = task(shm_size=1 << 30)
    assert sized.shm_size == 1 << 30
    assert sized.tmpfs == {"/dev/shm": f"exec,size={1 << 30}"}


@pytest.mark.parametrize(
    ("cpu", "nano"), [(0, 0), (0.1, 10**8), (1.5, 1_500_000_000), (2, 2 * 10**9)]
)
def test_limits_are_the_engines_units(cpu: float, nano: int) -> None:
    limited = task(cpu=float(cpu), memory=512 << 20)
    assert (limited.nano_cpus, limited.memory) == (nano, 512 << 20)


@pytest.mark.parametrize(
    ("by_task", "by_shim", "result"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, True)],
)
def test_privileged_by_either(by_task: bool, by_shim: bool, result: bool) -> None:
    config = attrs.evolve(CONFIG, privileged=by_task)
    settings = attrs.evolve(SETTINGS, privileged=by_shim)
    assert spec(config, settings).privileged is result


def test_variables_are_handed_on_empty_ones_too() -> None:
    given_on = host(pass_env={"http_proxy": "http://p", "NO_PROXY": ""}, pjrt_device="TPU")
    assert given_on.env == {"http_proxy": "http://p", "NO_PROXY": "", "PJRT_DEVICE": "TPU"}


def test_mounts_of_the_task_follow_ours() -> None:
    mounted = task(
        volume_mounts=(VolumeMount("data", "/data"),),
        instance_mounts=(InstanceMount("/srv/x", "/x"),),
    )
    assert mounted.mounts[2:] == (
        Mount("/mnt/disks/dstack-volumes/data", "/data"),
        Mount("/srv/x", "/x"),
    )


def test_bridge_has_no_loopback_address_for_the_runner() -> None:
    bridged = task(network_mode="bridge")
    assert bridged.network_mode == "bridge"
    assert "--http-address" not in bridged.command[0]
    assert "--http-address localhost" in spec().command[0]


def test_ports_are_those_of_the_flags() -> None:
    moved = host(runner_flags=RunnerFlags(http_port=1111, ssh_port=2222))
    assert moved.ports == (PortBinding(1111), PortBinding(2222))
    assert "--http-port 1111 --ssh-port 2222" in moved.command[0]


def test_infiniband_comes_with_unlimited_locked_memory() -> None:
    fast = host(has_infiniband=True)
    assert fast.devices == (Device("/dev/infiniband", "/dev/infiniband"),)
    assert fast.ulimits == (Ulimit("memlock", -1, -1),)


def test_nvidia() -> None:
    (request,) = host(UUIDS, gpu_vendor="nvidia").device_requests
    assert request.device_ids == UUIDS
    assert request.capabilities == (
        *("gpu", "utility", "compute", "graphics", "video", "display", "compat32"),
    )


def test_nvidia_without_display_is_otherwise_the_same() -> None:
    whole = host(UUIDS, gpu_vendor="nvidia")
    less = without_display(whole)
    (request,) = less.device_requests
    assert request.device_ids == UUIDS
    assert request.capabilities == ("gpu", "utility", "compute", "graphics", "video", "compat32")
    assert attrs.evolve(less, device_requests=whole.device_requests) == whole


def test_only_a_missing_display_part_calls_for_going_without() -> None:
    whole = host(UUIDS, gpu_vendor="nvidia")
    error = "stat failed: /dev/nvidia-modeset: no such file or directory: unknown"
    assert lacks_display(whole, error)
    assert not lacks_display(whole, "stat failed: /dev/nvidia0")
    assert not lacks_display(without_display(whole), error)
    assert not lacks_display(spec(), error)


def test_amd() -> None:
    nodes = ("/dev/dri/renderD128", "/dev/dri/renderD129")
    amd = host(nodes, gpu_vendor="amd")
    assert amd.devices == tuple(Device(path, path) for path in ("/dev/kfd", *nodes))
    assert amd.ipc_mode == "host"
    assert amd.cap_add == ("SYS_PTRACE",)
    assert amd.security_opt == ("seccomp=unconfined",)


@pytest.mark.parametrize("has_hugepages", [True, False])
def test_tenstorrent(has_hugepages: bool) -> None:
    boards = host(("0", "3"), gpu_vendor="tenstorrent", has_hugepages=has_hugepages)
    paths = ("/dev/tenstorrent/0", "/dev/tenstorrent/3")
    assert boards.devices == tuple(Device(path, path) for path in paths)
    bound = Mount("/dev/hugepages-1G", "/dev/hugepages-1G") in boards.mounts
    assert bound is has_hugepages


def test_intel() -> None:
    gaudi = host(("0", "2"), gpu_vendor="intel", pass_env={"http_proxy": "p"})
    assert (gaudi.runtime, gaudi.ipc_mode, gaudi.cap_add) == ("habana", "host", ("SYS_NICE",))
    assert gaudi.env == {"http_proxy": "p", "HABANA_VISIBLE_DEVICES": "0,2"}


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "tenstorrent", "intel"])
def test_without_gpus_a_vendor_changes_nothing(vendor: str) -> None:
    assert host(gpu_vendor=vendor, has_hugepages=True) == spec()


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "tenstorrent", "intel"])
def test_devices_given_by_the_task_replace_the_vendors_way(vendor: str) -> None:
    config = attrs.evolve(CONFIG, gpu_devices=(GpuDevice("/dev/nvidia0", "/dev/gpu"),))
    given_ones = spec(config, attrs.evolve(SETTINGS, gpu_vendor=vendor), UUIDS)
    assert given_ones.devices == (Device("/dev/nvidia0", "/dev/gpu", "rwm"),)
    assert (given_ones.device_requests, given_ones.cap_add) == ((), ())
    assert (given_ones.ipc_mode, given_ones.runtime) == ("", "")
    assert gpus_from_labels(given_ones.labels) == UUIDS


def test_devices_given_by_a_task_without_gpus_are_not_passed() -> None:
    assert task(gpu_devices=(GpuDevice("/dev/nvidia0", "/dev/nvidia0"),)).devices == ()


def test_gpus_of_a_vendor_nobody_knows_are_refused() -> None:
    with pytest.raises(ResourceError, match="none"):
        host(UUIDS)


def test_a_runner_too_old_is_refused() -> None:
    with pytest.raises(ComponentError):
        container_spec(CONFIG, SETTINGS, runner_version="0.19.0", runner_dir="/x")


@given(st.lists(st.text(min_size=1), max_size=4))
def test_gpus_are_read_back_from_our_labels(gpus: list[str]) -> None:
    labels = host(tuple(gpus), gpu_vendor="amd").labels
    assert gpus_from_labels(labels) == tuple(gpus)


@pytest.mark.parametrize(
    "text", [None, "", "null", "7", "{}", "[7]", "[null]", '[""]', "[", "[" * 100_000]
)
def test_labels_that_do_not_tell_leave_it_open(text: str | None) -> None:
    labels = {} if text is None else {"ai.dstack.shim.gpus": text}
    assert gpus_from_labels(labels) is None


def details(**parts: Any) -> ContainerDetails:
    container = Container("c", "n", ContainerState.RUNNING, 0.0, "t1")
    return ContainerDetails(container, exit_code=0, **parts)


@pytest.mark.parametrize(
    ("parts", "gpus"),
    [
        ({}, ()),
        ({"gpu_device_ids": UUIDS}, UUIDS),
        (
            {"devices": ("/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD130")},
            ("/dev/dri/renderD128", "/dev/dri/renderD130"),
        ),
        ({"devices": ("/dev/tenstorrent/0", "/dev/tenstorrent/12")}, ("0", "12")),
        ({"devices": ("/dev/tenstorrent/x", "/dev/infiniband")}, ()),
        ({"env": {"HABANA_VISIBLE_DEVICES": "0,3"}}, ("0", "3")),
        ({"env": {"HABANA_VISIBLE_DEVICES": ""}}, ()),
        ({"env": {"HABANA_VISIBLE_DEVICES": "all"}}, ()),
    ],
)
def test_gpus_of_other_shims_containers_are_read_from_the_engine(
    parts: dict[str, Any], gpus: tuple[str, ...]
) -> None:
    assert gpus_from_details(details(**parts)) == gpus
