"""V: volumes on loop devices. Nothing that is not certainly blank is ever formatted."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.conformance.conftest import MakeShim
from tests.conformance.containers import ContainerOf, mount_of
from tests.conformance.disks import (
    PARTITION_TABLE,
    content_of,
    disk,
    file_system_of,
    google_name,
    lsblk_script,
    other_name,
    partitioned_disk,
)
from tests.conformance.images import Images, tell
from tests.conformance.instance import VOLUMES, Instance, command, mounts_below
from tests.conformance.rows import row
from tests.conformance.shim import Shim, Task
from tests.eventually import eventually


def volume(name: str, device: str, *, backend: str = "aws", init_fs: bool = False) -> Any:
    return {
        "backend": backend,
        "name": name,
        "volume_id": f"vol-{name}",
        "init_fs": init_fs,
        "device_name": device,
    }


def with_volumes(*volumes: Any) -> dict[str, Any]:
    """The fields of a task that mounts each of these under its name."""
    mounts = [{"name": one["name"], "path": f"/{one['name']}"} for one in volumes]
    return {"volumes": list(volumes), "volume_mounts": mounts}


@pytest.fixture
def formatted(instance: Instance) -> Iterator[Path]:
    """A disk with a file system, a file in it, and a root that is not for everybody."""
    with disk(instance.root, file_system=True) as device:
        place = instance.root / "look"
        place.mkdir(exist_ok=True)
        command("mount", device, place)
        (place / "precious").write_text("keep me")
        place.chmod(0o750)
        command("umount", place)
        yield device


# -- verdicts on disks, all at once, for each waits seconds -----------------------------------


@dataclass
class Tried:
    """A disk a task was given, and how that went."""

    task: Task
    device: Path
    before: bytes
    status: str
    mounted_mode: int | None

    @classmethod
    def of(cls, task: Task, device: Path, before: bytes) -> Tried:
        point = VOLUMES / task.body["name"]
        mode = stat.S_IMODE(point.stat().st_mode) if point.is_mount() else None
        return cls(task, device, before, task.status, mode)


@pytest.fixture(scope="module")
def tried(
    module_shims: MakeShim, instance: Instance, images: Images
) -> Iterator[dict[str, Tried]]:
    """Tasks with disks of every kind; odd answers of blkid come from a stand-in."""
    with ExitStack() as stack:
        make = stack.enter_context
        found = {name: make(disk(instance.root)) for name in (*_ODD_ANSWERS, "blank", "new")}
        found["table"] = make(disk(instance.root, content=PARTITION_TABLE))
        answers = "\n".join(f"{found[name]}) {do} ;;" for name, do in _ODD_ANSWERS.items())
        log = instance.root / "blkid.log"
        script = (
            f'for last in "$@"; do :; done\ndate +"%s.%N $*" >>{log}\n'
            f'case $last in\n{answers}\nesac\nexec /usr/sbin/blkid "$@"'
        )
        make(instance.tools_for_a_while(blkid=script))
        shim = module_shims()
        before = {name: content_of(device) for name, device in found.items()}
        tasks = {
            name: shim.submit(
                images.idle,
                name=name,
                **with_volumes(volume(name, str(device), init_fs=name != "blank")),
            )
            for name, device in found.items()
        }
        for task in tasks.values():
            task.reach("running", "terminated", within=25)
        went = {name: Tried.of(tasks[name], found[name], before[name]) for name in found}
        tasks["new"].terminate()  # the other cases look at all mounts
        yield went


_ODD_ANSWERS = {
    "code-1": "exit 1",
    "code-4": "exit 4",
    "ambivalent": "exit 8",
    "nothing": "exit 0",
    "late": 'echo x >>/tmp/late; [ "$(wc -l </tmp/late)" -lt 3 ] && exit 2; echo ext4; exit 0',
    "killed": "kill -9 $$",
}


@row("V10", "V9")
@pytest.mark.parametrize("name", list(_ODD_ANSWERS))
def test_disk_that_may_not_be_blank_is_never_formatted(name: str, tried: dict[str, Tried]) -> None:
    one = tried[name]
    assert one.task.outcome()[0] == "executor_error"
    assert one.task.outcome()[1]
    assert content_of(one.device) == one.before
    assert one.mounted_mode is None


@row("V11")
def test_partition_table_is_never_formatted_away(tried: dict[str, Tried]) -> None:
    one = tried["table"]
    assert one.task.outcome()[0] == "executor_error"
    assert content_of(one.device) == one.before


@row("V12")
def test_blank_disk_is_an_error_unless_it_may_be_formatted(tried: dict[str, Tried]) -> None:
    one = tried["blank"]
    reason, message = one.task.outcome()
    assert reason == "executor_error"
    assert message
    assert content_of(one.device) == one.before


@row("V13", "V8")
def test_blank_disk_is_formatted_for_everybody(tried: dict[str, Tried]) -> None:
    one = tried["new"]
    assert one.status == "running"
    assert file_system_of(one.device) == "ext4"
    assert one.mounted_mode == 0o777


@row("V8", "V9")
def test_blank_verdict_takes_four_probes_a_second_apart(
    tried: dict[str, Tried], instance: Instance
) -> None:
    device = tried["new"].device
    lines = (instance.root / "blkid.log").read_text().splitlines()
    asked = [line.split(" ", 1) for line in lines if line.endswith(f" {device}")]
    wanted = f"-p -o value -s TYPE {device}"
    moments = [float(moment) for moment, words in asked if words == wanted]
    assert len(moments) >= 4
    assert all(later - earlier > 0.9 for earlier, later in pairwise(moments[:4]))


# -- mount and unmount ------------------------------------------------------------------------


@row("V14", "V15", "C15", "R35")
def test_volume_is_mounted_as_it_is(
    shim: Shim, images: Images, formatted: Path, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle, **with_volumes(volume("data", str(formatted))))
    assert mounts_below(VOLUMES) == [f"{VOLUMES}/data"]
    assert stat.S_IMODE((VOLUMES / "data").stat().st_mode) == 0o750
    container = container_of(task)
    assert mount_of(container, "/data")["Source"] == f"{VOLUMES}/data"
    assert container.exec_run(["cat", "/data/precious"]).output == b"keep me"


@row("V16", "R35", "A44")
@pytest.mark.parametrize("end", ["terminate", "exit"])
def test_volume_is_unmounted_when_the_task_has_ended(
    end: str, shim: Shim, images: Images, formatted: Path, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle, **with_volumes(volume("data", str(formatted))))
    container_of(task).exec_run(["sh", "-c", "echo more >/data/written"])
    if end == "terminate":
        task.terminate()
        assert mounts_below(VOLUMES) == []
    else:
        tell(container_of(task), 0)
        task.end()
        task.remove()
    assert mounts_below(VOLUMES) == []
    command("mount", "-r", formatted, VOLUMES / "data")
    assert (VOLUMES / "data" / "written").read_text() == "more\n"
    assert (VOLUMES / "data" / "precious").read_text() == "keep me"
    command("umount", VOLUMES / "data")


@row("V16", "S9")
def test_volume_of_a_failed_start_is_unmounted(
    shim: Shim, images: Images, formatted: Path
) -> None:
    fields = with_volumes(volume("data", str(formatted)))
    task = shim.submit("127.0.0.1:1/none:1", **fields)
    assert task.outcome()[0] == "creating_container_error"
    task.terminate()
    assert mounts_below(VOLUMES) == []


@row("V19", "S11")
def test_one_bad_volume_unmounts_the_good_ones(
    shim: Shim, images: Images, formatted: Path
) -> None:
    fields = with_volumes(volume("good", str(formatted)), volume("bad", "x", backend="azure"))
    task = shim.submit(images.idle, **fields)
    assert task.outcome()[0] == "executor_error"
    task.terminate()
    assert mounts_below(VOLUMES) == []


@row("V17")
def test_what_is_no_mount_point_is_not_unmounted(
    shim: Shim, images: Images, instance: Instance
) -> None:
    log = instance.root / "umount.log"
    log.write_text("")
    place = VOLUMES / "plain"
    place.mkdir(parents=True, exist_ok=True)
    (place / "file").write_text("x")
    script = f'echo "$*" >>{log}; exec /usr/bin/umount "$@"'
    with instance.tools_for_a_while(umount=script):
        task = shim.submit(images.idle, **with_volumes(volume("plain", "x", backend="azure")))
        task.end()
        task.terminate()
        task.remove()
    assert log.read_text() == ""
    assert (place / "file").read_text() == "x"


@row("V18", "R35")
def test_volume_of_two_tasks_stays_until_the_last_has_ended(
    shim: Shim, images: Images, formatted: Path, container_of: ContainerOf
) -> None:
    fields = with_volumes(volume("data", str(formatted)))
    first = shim.run(images.idle, name="first", **fields)
    second = shim.run(images.idle, name="second", **fields)
    assert mounts_below(VOLUMES) == [f"{VOLUMES}/data"]
    first.terminate()
    first.remove()
    assert mounts_below(VOLUMES) == [f"{VOLUMES}/data"]
    assert container_of(second).exec_run(["cat", "/data/precious"]).output == b"keep me"
    second.terminate()
    assert mounts_below(VOLUMES) == []


# -- which device -----------------------------------------------------------------------------


@row("V1")
@pytest.mark.parametrize("backend", ["azure", "", "AWS"])
def test_other_backends_are_errors(backend: str, shim: Shim, images: Images) -> None:
    task = shim.task(images.idle, **with_volumes(volume("data", "x", backend=backend)))
    answer = shim.post("/api/tasks", task.body)
    if answer.status_code == 200:
        reason, message = task.outcome()
        assert reason == "executor_error"
        assert backend in message
    assert mounts_below(VOLUMES) == []


@row("V2")
@pytest.mark.parametrize("partition", [True, False])
def test_gcp_device_is_found_by_its_link(
    partition: bool, shim: Shim, images: Images, instance: Instance, formatted: Path
) -> None:
    name = "disk-1-part1" if partition else "disk-1"
    with ExitStack() as stack:
        stack.enter_context(google_name(name, formatted))
        if partition:  # the whole disk is there too, and is not the one
            stack.enter_context(google_name("disk-1", stack.enter_context(disk(instance.root))))
        task = shim.run(images.idle, **with_volumes(volume("data", "disk-1", backend="gcp")))
        assert (VOLUMES / "data" / "precious").exists()
        task.terminate()


@row("V4")
def test_aws_device_is_found_by_its_serial(
    shim: Shim, images: Images, instance: Instance, formatted: Path
) -> None:
    with (
        disk(instance.root, file_system=True) as other,
        instance.tools_for_a_while(
            lsblk=lsblk_script({other: "vol0other", formatted: "vol0123abc"})
        ),
    ):
        wanted = volume("data", str(other)) | {"volume_id": "vol-0123abc"}
        task = shim.run(images.idle, **with_volumes(wanted))
        assert (VOLUMES / "data" / "precious").exists()
        task.terminate()


@row("V4")
@pytest.mark.parametrize("asked", ["/dev/sdq", "/dev/xvdq"])
def test_aws_device_is_found_by_its_name(
    asked: str, shim: Shim, images: Images, formatted: Path
) -> None:
    with other_name(formatted, Path("/dev/xvdq")):
        task = shim.run(images.idle, **with_volumes(volume("data", asked)))
        assert (VOLUMES / "data" / "precious").exists()
        task.terminate()


@row("V6")
def test_first_partition_of_an_aws_disk_is_used(
    shim: Shim, images: Images, instance: Instance
) -> None:
    with partitioned_disk(instance.root) as (device, partition):
        task = shim.run(images.idle, **with_volumes(volume("data", str(device))))
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        assert [line.split()[0] for line in mounts if f" {VOLUMES}/data " in line] == [
            str(partition)
        ]
        task.terminate()
        eventually(lambda: mounts_below(VOLUMES) == [], within=5)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("aws", marks=row("V5", "V4")), pytest.param("gcp", marks=row("V3", "V2"))],
)
def test_device_that_appears_later_is_waited_for(
    backend: str, shim: Shim, images: Images, formatted: Path
) -> None:
    asked = "/dev/xvdr" if backend == "aws" else "disk-2"
    task = shim.submit(images.idle, **with_volumes(volume("data", asked, backend=backend)))
    threading.Event().wait(2)  # the time a cloud takes to attach a disk
    with (
        other_name(formatted, Path("/dev/xvdr")),
        google_name("disk-2", formatted),
    ):
        task.reach("running")
        assert (VOLUMES / "data" / "precious").exists()
        task.terminate()


@row("V7", "V10")
def test_what_is_no_ready_block_device_is_given_up(
    shim: Shim, images: Images, instance: Instance
) -> None:
    plain = instance.root / "plain-file"
    plain.write_bytes(b"\0" * 4096)
    tasks = {
        name: shim.submit(
            images.idle, name=name, **with_volumes(volume(name, device, init_fs=True))
        )
        for name, device in {
            "character": "/dev/null",
            "file": str(plain),
            "empty": "/dev/loop63",
        }.items()
    }
    for task in tasks.values():
        assert task.outcome(within=25)[0] == "executor_error"
    assert plain.read_bytes() == b"\0" * 4096
    assert mounts_below(VOLUMES) == []


# -- restart ----------------------------------------------------------------------------------


@row("R13", "R35", "V16")
def test_volumes_of_a_container_without_record_are_released_at_its_end(
    new_shim: MakeShim, images: Images, old_task: Any, formatted: Path
) -> None:
    place = VOLUMES / "old-data"
    place.mkdir(parents=True, exist_ok=True)
    command("mount", formatted, place)
    bind = docker.types.Mount("/data", str(place), type="bind")
    shim = new_shim(start=False)
    old = old_task(shim, images.idle, mounts=[bind])
    shim.start()
    assert place.is_mount()
    tell(old.container, 0)
    old.task.end()
    old.task.terminate()
    assert mounts_below(VOLUMES) == []


@row("R15", "R35", "V16")
def test_volume_of_a_task_that_ended_meanwhile_is_unmounted(
    new_shim: MakeShim, images: Images, formatted: Path, container_of: ContainerOf
) -> None:
    shim = new_shim()
    fields = with_volumes(volume("data", str(formatted)))
    ended = shim.run(images.idle, name="ended", **fields)
    shim.kill()
    container_of(ended).remove(force=True)
    assert mounts_below(VOLUMES) == [f"{VOLUMES}/data"]
    shim.start()
    ended.end()
    assert mounts_below(VOLUMES) == []


@row("R1", "R35")
def test_volume_of_a_running_task_stays_across_a_restart(
    new_shim: MakeShim, images: Images, formatted: Path
) -> None:
    shim = new_shim()
    task = shim.run(images.idle, **with_volumes(volume("data", str(formatted))))
    shim.restart()
    assert mounts_below(VOLUMES) == [f"{VOLUMES}/data"]
    task.terminate()
    assert mounts_below(VOLUMES) == []
