"""The rules of a submitted task: what becomes a name, a path or an amount on the host."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
from dstack_shim_contracts.api import (
    GpuDevice,
    InstanceMount,
    TaskConfig,
    VolumeInfo,
    VolumeMount,
)
from dstack_shim_contracts.codec import validate_submit
from dstack_shim_contracts.errors import BodyError
from dstack_shim_contracts.submit import MAX_CPU, MAX_ITEMS
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.strategies import SAMPLE

LEAST = TaskConfig(id="t1", name="train", image_name="alpine")

PATH_LIKE = ["../../x", "a/b", "/", "/etc", ".", ".."]
BAD_PATHS = ["", "a", "./a", "../a", "~/a", "/..", "/a/..", "/../a", "/a/../b", "/a\0", "/a\nb"]
GOOD_PATHS = ["/", "/a", "/a/", "//a", "/a/./b", "/a/...", "/..a", "/a b", "/ä:ö"]


def error_of(config: TaskConfig) -> BodyError:
    with pytest.raises(BodyError) as caught:
        validate_submit(config)
    return caught.value


def changed(**changes: Any) -> TaskConfig:
    return attrs.evolve(LEAST, **changes)


def test_the_least_task_is_fine() -> None:
    validate_submit(LEAST)


@pytest.mark.parametrize("field", ["id", "name", "image_name"])
def test_what_names_the_task_must_not_be_empty(field: str) -> None:
    assert str(error_of(changed(**{field: ""}))) == f"{field}: expected a non-empty string"


@pytest.mark.parametrize(
    "task_id", [*PATH_LIKE, "a\0", "a\n", "\x1b[31m", "\x7f", "\x85", "i" * 257]
)
def test_an_id_that_could_leave_its_place_is_refused(task_id: str) -> None:
    assert error_of(changed(id=task_id)).field == "id"


@pytest.mark.parametrize("task_id", ["...", "a..b", "a b", "tâche-🚀", "-", "i" * 256])
def test_any_other_id_is_fine(task_id: str) -> None:
    validate_submit(changed(id=task_id))


@pytest.mark.parametrize(
    "name", [*PATH_LIKE, "-a", "_a", ".a", "a b", "a\n", "a\0", "naïve", "a:b", "a$b", "n" * 201]
)
def test_a_name_no_engine_takes_is_refused(name: str) -> None:
    assert error_of(changed(name=name)).field == "name"


@pytest.mark.parametrize("name", ["a", "7", "a..b", "A-b_c.9", "n" * 200])
def test_a_name_engines_take_is_fine(name: str) -> None:
    validate_submit(changed(name=name))


@pytest.mark.parametrize("field", ["cpu", "memory", "shm_size"])
def test_amounts_are_not_negative(field: str) -> None:
    validate_submit(changed(**{field: 0}))
    assert str(error_of(changed(**{field: -1}))) == f"{field}: expected a number not below 0"


@pytest.mark.parametrize("cpu", [MAX_CPU + 1, 1e19, 1e308])
def test_cores_fit_the_engines_64_bits(cpu: float) -> None:
    validate_submit(changed(cpu=MAX_CPU))
    assert str(error_of(changed(cpu=cpu))) == "cpu: expected a number not above 9223372036"


@pytest.mark.parametrize("gpu", [-2, -(2**63)])
def test_gpus_below_all_are_refused(gpu: int) -> None:
    assert error_of(changed(gpu=gpu)).field == "gpu"


@pytest.mark.parametrize("gpu", [-1, 0, 1, 8])
def test_gpus_are_all_none_or_a_number(gpu: int) -> None:
    validate_submit(changed(gpu=gpu))


@pytest.mark.parametrize("mode", ["none", "Host", "container:x", " host", "default"])
def test_other_networks_are_refused(mode: str) -> None:
    assert str(error_of(changed(network_mode=mode))) == "network_mode: expected host or bridge"


@pytest.mark.parametrize("mode", ["", "host", "bridge"])
def test_the_two_networks_and_the_default_are_fine(mode: str) -> None:
    validate_submit(changed(network_mode=mode))


@pytest.mark.parametrize(
    ("field", "item"),
    [
        ("volumes", VolumeInfo(name="v")),
        ("volume_mounts", VolumeMount("v", "/a")),
        ("instance_mounts", InstanceMount("/a", "/b")),
        ("gpu_devices", GpuDevice("/a", "/b")),
        ("host_ssh_keys", ""),
        ("container_ssh_keys", ""),
    ],
)
def test_a_list_has_a_bound(field: str, item: object) -> None:
    validate_submit(changed(**{field: (item,) * MAX_ITEMS}))
    error = error_of(changed(**{field: (item,) * (MAX_ITEMS + 1)}))
    assert str(error) == f"{field}: expected at most {MAX_ITEMS} items"


@pytest.mark.parametrize("name", ["", *PATH_LIKE, "a\0", "a\nb", "v" * 256, "ä" * 128])
def test_a_volume_name_that_is_no_mount_point_is_refused(name: str) -> None:
    volumes = (VolumeInfo(name="fine"), VolumeInfo(name=name))
    assert error_of(changed(volumes=volumes)).field == "volumes[1].name"
    mounts = (VolumeMount(name, "/data"),)
    assert error_of(changed(volume_mounts=mounts)).field == "volume_mounts[0].name"


@pytest.mark.parametrize("name", ["data", "a b", "...", "v" * 255, "ä" * 127])
def test_any_other_volume_name_is_fine(name: str) -> None:
    volumes, mounts = (VolumeInfo(name=name),), (VolumeMount(name, "/data"),)
    validate_submit(changed(volumes=volumes, volume_mounts=mounts))


@pytest.mark.parametrize("device", ["..", "../sda", "/dev/../etc", "a/..", "a\n/.."])
def test_a_device_name_that_climbs_is_refused(device: str) -> None:
    volumes = (VolumeInfo(name="v", device_name=device),)
    assert error_of(changed(volumes=volumes)).field == "volumes[0].device_name"


@pytest.mark.parametrize("device", [None, "", "/dev/sdf", "persistent-disk-1", "a..b"])
def test_any_other_device_name_is_fine(device: str | None) -> None:
    validate_submit(changed(volumes=(VolumeInfo(name="v", device_name=device),)))


@pytest.mark.parametrize("path", BAD_PATHS)
@pytest.mark.parametrize(
    ("field", "at"),
    [
        ("volume_mounts", "path"),
        ("instance_mounts", "instance_path"),
        ("instance_mounts", "path"),
        ("gpu_devices", "path_on_host"),
        ("gpu_devices", "path_in_container"),
    ],
)
def test_a_path_that_is_relative_climbs_or_cannot_be_is_refused(
    field: str, at: str, path: str
) -> None:
    fine: Any = {
        "volume_mounts": VolumeMount("v", "/a"),
        "instance_mounts": InstanceMount("/a", "/b"),
        "gpu_devices": GpuDevice("/dev/a", "/dev/b"),
    }[field]
    items = (fine, attrs.evolve(fine, **{at: path}))
    assert error_of(changed(**{field: items})).field == f"{field}[1].{at}"


@pytest.mark.parametrize("path", GOOD_PATHS)
def test_any_absolute_path_is_fine(path: str) -> None:
    validate_submit(
        changed(
            volume_mounts=(VolumeMount("v", path),),
            instance_mounts=(InstanceMount(path, path),),
            gpu_devices=(GpuDevice(path, path),),
        )
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image_name": "a\0"}, "image_name"),
        ({"container_user": "\0"}, "container_user"),
        ({"registry_username": "a\0b"}, "registry_username"),
        ({"registry_password": "a\0b"}, "registry_password"),
        ({"host_ssh_user": "a\0"}, "host_ssh_user"),
        ({"host_ssh_keys": ("a", "b\0")}, "host_ssh_keys[1]"),
        ({"container_ssh_keys": ("\0",)}, "container_ssh_keys[0]"),
        ({"volumes": (VolumeInfo(name="v", backend="\0"),)}, "volumes[0].backend"),
        ({"volumes": (VolumeInfo(name="v", volume_id="\0"),)}, "volumes[0].volume_id"),
        ({"volumes": (VolumeInfo(name="v", device_name="\0"),)}, "volumes[0].device_name"),
    ],
)
def test_nul_is_refused_wherever_it_stands(changes: dict[str, object], field: str) -> None:
    assert str(error_of(changed(**changes))) == f"{field}: expected no NUL character"


def test_keys_may_hold_quotes_dollars_newlines_and_emoji() -> None:
    validate_submit(changed(container_ssh_keys=('ssh-ed25519 AAAA it\'s "$HOME"\n🚀',)))


def test_an_error_does_not_repeat_what_was_sent() -> None:
    assert "hunter2" not in str(error_of(changed(registry_password="hunter2\0")))


@SAMPLE
@given(st.text(), st.text())
def test_what_is_accepted_stays_below_the_directory_it_is_joined_to(
    task_id: str, name: str
) -> None:
    config = changed(id=task_id, volumes=(VolumeInfo(name=name),))
    try:
        validate_submit(config)
    except BodyError:
        return
    for text in (task_id, name):
        assert not re.search(r"[/\x00-\x1f]", text)
        assert text not in {"", ".", ".."}
