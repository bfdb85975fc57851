"""Volumes and the tools they need, failing as they do on real hosts, through a real shim."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from contextlib import closing
from pathlib import Path

import pytest
from dstack_shim_contracts.api import TerminateRequest, VolumeInfo, VolumeMount
from dstack_shim_contracts.client import REQUEST_TIMEOUT, ShimClient
from dstack_shim_contracts.errors import ShimResponseError
from dstack_shim_contracts.statuses import TaskStatus

from tests.eventually import eventually
from tests.lab.census import mounted_volumes
from tests.lab.host import BY_ID, Host, run, volume
from tests.lab.images import RUNS_ON, Images
from tests.lab.shim import ShimProcess

RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED
PARTITION = struct.pack("<8B2I", 0, 0, 2, 0, 0x83, 0, 0, 0, 2048, 20480)


def kind_of(disk: Path) -> str:
    """What the system's own tool finds on it."""
    return run("sh", "-c", f"/usr/sbin/blkid -p -o value -s TYPE {disk} || true")


def submit(shim: ShimProcess, image: str, name: str, *, init_fs: bool = False) -> None:
    shim.submit(name, image, volumes=(volume(name, init_fs=init_fs),))


def failures(shim: ShimProcess, *names: str) -> dict[str, str]:
    """Task id → message, once all of them failed as a preparation fails."""
    ended = {name: shim.wait_for(name, TERMINATED, within=60) for name in names}
    assert {info.termination_reason for info in ended.values()} == {"executor_error"}
    return {name: info.termination_message for name, info in ended.items()}


def test_a_volume_of_two_tasks_outlives_the_first_of_them(instance: Host, images: Images) -> None:
    instance.disk("data", file_system=True)
    shim = instance.start_shim()
    census = instance.census(shim)
    image = images.job(RUNS_ON)
    for task_id in ("t1", "t2"):
        mounts = (VolumeMount("data", "/data"),)
        shim.submit(task_id, image, volumes=(volume("data"),), volume_mounts=mounts)
        shim.wait_for(task_id, RUNNING)
    shim.client.terminate("t1")
    assert mounted_volumes() == ["data"]
    assert census.take() == []
    shim.kill()  # who needs it is known again after a crash
    shim.start()
    shim.client.remove("t1")
    assert mounted_volumes() == ["data"]
    shim.client.terminate("t2")
    assert mounted_volumes() == []
    shim.client.remove("t2")
    assert census.take() == []


def test_a_disk_that_is_not_proven_blank_is_never_formatted_and_the_task_says_why(
    instance: Host, images: Images
) -> None:
    """All at once on one shim: each answer of the tool is about one disk."""
    names = ("failing", "silent", "killed", "table", "refusing")
    disks = {name: instance.disk(name) for name in names}
    device = {name: os.path.realpath(BY_ID / f"google-{name}") for name in names}
    instance.tool(
        "blkid",
        f"""
        case $6 in
        {device["failing"]}) echo 'ambivalent result' >&2; exit 8 ;;
        {device["silent"]}) exit 0 ;;
        {device["killed"]}) kill -9 $$ ;;
        esac
        exec /usr/sbin/blkid "$@"
        """,
    )
    with disks["table"].open("r+b") as file:
        file.write(bytes(446) + PARTITION + bytes(48) + b"\x55\xaa")
    before = {name: disk.read_bytes() for name, disk in disks.items()}
    shim = instance.start_shim()
    image = images.job(RUNS_ON)
    for name in names:
        submit(shim, image, name, init_fs=name != "refusing")
    said = failures(shim, *names)
    assert "volume failing" in said["failing"]
    assert "exited with 8: ambivalent result" in said["failing"]
    assert "not blank" in said["silent"]
    assert "killed by SIGKILL" in said["killed"]
    assert "a partition table" in said["table"]
    assert "init_fs does not allow to format it" in said["refusing"]
    assert {name: disk.read_bytes() for name, disk in disks.items()} == before
    assert mounted_volumes() == []


def test_without_blkid_a_blank_disk_stays_blank(instance: Host, images: Images) -> None:
    disk = instance.disk("data")
    shim = instance.start_shim(environ={"PATH": path_without(instance, "blkid")})
    submit(shim, images.job(RUNS_ON), "data", init_fs=True)
    assert "blkid" in failures(shim, "data")["data"]
    assert kind_of(disk) == ""


def path_without(instance: Host, *missing: str) -> str:
    """A PATH with the tools a shim uses, but these."""
    place = instance.tools.with_name("few-tools")
    place.mkdir()
    # And what the single file itself looks for.
    (place / "python3").symlink_to(Path(sys.executable).resolve())
    for name in {"mount", "umount", "mkfs.ext4", "blkid", "lsblk"} - set(missing):
        found = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
        assert found is not None
        (place / name).symlink_to(found)
    return str(place)


@pytest.mark.parametrize(("backend", "device"), [("gcp", "missing"), ("aws", "/dev/sdq")])
def test_a_task_that_waits_for_its_device_ends_within_a_servers_patience(
    instance: Host, images: Images, backend: str, device: str
) -> None:
    shim = instance.start_shim()
    missing = VolumeInfo(backend, "missing", "vol-0123", init_fs=False, device_name=device)
    shim.submit("t1", images.job(RUNS_ON), volumes=(missing,))
    shim.wait_for("t1", TaskStatus.PREPARING)
    with ShimClient(shim.port, timeout=REQUEST_TIMEOUT) as server:
        info = server.terminate("t1", TerminateRequest("terminated_by_user"))
        assert (info.status, info.termination_reason) == (TERMINATED, "terminated_by_user")
        server.remove("t1")
    assert shim.statuses() == {}


@pytest.mark.parametrize(
    ("tool", "script", "words"),
    [
        ("mkfs.ext4", "echo 'No room for a journal' >&2; exit 1", "No room for a journal"),
        ("mkfs.ext4", "kill -9 $$", "killed by SIGKILL"),
        ("mount", "echo 'bad superblock' >&2; exit 32", "exited with 32: bad superblock"),
        ("mount", "echo not a program >$0; exec $0", "mount"),
    ],
)
def test_a_tool_that_fails_ends_the_task_with_its_words(
    instance: Host, images: Images, tool: str, script: str, words: str
) -> None:
    instance.disk("data", file_system=tool == "mount")
    instance.tool(tool, script)
    shim = instance.start_shim()
    submit(shim, images.job(RUNS_ON), "data", init_fs=True)
    message = failures(shim, "data")["data"]
    assert "volume data" in message
    assert words in message
    assert mounted_volumes() == []


def test_a_volume_that_cannot_be_unmounted_is_an_honest_error_and_tried_again(
    instance: Host, images: Images
) -> None:
    instance.disk("data", file_system=True)
    instance.tool("umount", "echo 'target is busy' >&2; exit 32")
    shim = instance.start_shim()
    submit(shim, images.job(RUNS_ON), "data")
    container = shim.wait_for("data", RUNNING).container_id
    for ask in (shim.client.terminate, shim.client.remove):
        with pytest.raises(ShimResponseError, match=r"volume data: .*target is busy") as refused:
            ask("data")
        assert refused.value.status == 500
    assert shim.statuses() == {"data": "terminated"}
    assert not is_running(instance, container)
    (instance.tools / "umount").unlink()
    eventually(lambda: not mounted_volumes(), saying="a later round unmounts it")
    shim.client.remove("data")


def is_running(instance: Host, container_id: str) -> bool:
    with closing(instance.engine.client()) as client:
        running: bool = client.inspect_container(container_id)["State"]["Running"]
        return running
