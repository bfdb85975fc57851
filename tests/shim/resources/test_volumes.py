from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import pytest
from dstack_shim_contracts.api import VolumeInfo, VolumeMount
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dstack_shim.errors import CommandMissing, CommandTimedOut, ResourceError
from dstack_shim.host.commands import Finished
from dstack_shim.resources.devices import Device
from dstack_shim.resources.mounts import Mount
from dstack_shim.resources.protocol import Others
from dstack_shim.resources.volume_names import is_volume_name, volumes_from_mounts
from dstack_shim.resources.volumes import (
    Volumes,
    is_same_device,
    make_mount_point,
)
from tests.shim.resources.disks import Disks, volume
from tests.shim.resources.stage import Wish, others, wish


@pytest.fixture
def host(tmp_path: Path) -> Disks:
    return Disks(tmp_path, sda="ext4", sdb="blank", sdc="table", sdd="ambivalent")


async def test_a_volume_is_mounted_and_unmounted_with_its_task(host: Disks) -> None:
    adapter, task = host.adapter(), wish("t1", volumes=[volume("data")])
    await adapter.acquire(task, others())
    assert host.at("data") == ["sda"]
    assert await adapter.census() == {"data": str(host.dev / "sda")}
    await adapter.release(task, others())
    assert await adapter.census() == {}
    await adapter.release(task, others())
    assert host.programs() == ["blkid", "mount", "umount"]
    assert host.asked[-1] == ("umount", "-qf", str(host.root / "data"))


async def test_release_of_a_volume_never_mounted_runs_nothing(host: Disks) -> None:
    await host.adapter().release(wish("t1", volumes=[volume("data")]), others())
    assert host.asked == []


async def test_a_mount_of_a_volume_that_is_not_the_tasks_own_is_refused(host: Disks) -> None:
    task = wish("t1", volumes=[volume("data")])
    foreign = attrs.evolve(task.config, volume_mounts=(VolumeMount("someone-elses", "/x"),))
    with pytest.raises(ResourceError, match="volume_mounts: 'someone-elses' is no volume of"):
        await host.adapter().acquire(attrs.evolve(task, config=foreign), others())
    assert host.asked == []


async def test_a_mount_of_the_tasks_own_volume_is_fine(host: Disks) -> None:
    task = wish("t1", volumes=[volume("data")])
    own = attrs.evolve(task.config, volume_mounts=(VolumeMount("data", "/x"),) * 2)
    await host.adapter().acquire(attrs.evolve(task, config=own), others())
    assert host.at("data") == ["sda"]


async def test_a_disk_that_looks_blank_and_cannot_be_read_is_an_error_naming_the_volume(
    host: Disks,
) -> None:
    host.unreadable = "is in use"
    task = wish("t1", volumes=[volume("data", "sdb")])
    with pytest.raises(ResourceError, match=r"^volume data: .*sdb looks blank but is in use"):
        await host.adapter().acquire(task, others())
    assert "mkfs.ext4" not in host.programs()


async def test_a_blank_disk_is_formatted_once_confirmed(host: Disks) -> None:
    adapter, task = host.adapter(), wish("t1", volumes=[volume("data", "sdb")])
    await adapter.acquire(task, others())
    assert host.programs() == ["blkid"] * 4 + ["mkfs.ext4", "mount"]
    assert host.clock.time == 3.0
    await adapter.release(task, others())
    await adapter.acquire(task, others())
    assert host.disks[str(host.dev / "sdb")].formatted == 1


@pytest.mark.parametrize(
    ("disk", "init_fs", "words"),
    [
        ("sdb", False, "sdb is blank, and init_fs does not allow to format it"),
        ("sdc", True, r"sdc has no file system but is not blank \(a partition table\?\)"),
        ("sdd", True, r"sdd, which could not be examined \(blkid exited with 8: ambivalent"),
    ],
)
async def test_what_can_be_neither_mounted_nor_formatted_is_an_error_and_untouched(
    host: Disks, disk: str, init_fs: bool, words: str
) -> None:
    task = wish("t1", volumes=[volume("data", disk, init_fs=init_fs)])
    with pytest.raises(ResourceError, match=rf"volume data: .*{words}"):
        await host.adapter().acquire(task, others())
    assert "mkfs.ext4" not in host.programs()
    assert host.at("data") == []


@pytest.mark.parametrize(
    "fault",
    [CommandMissing("blkid cannot be run"), CommandTimedOut("blkid took longer"), Finished(1)],
    ids=["missing", "timeout", "failing"],
)
async def test_without_a_working_blkid_a_disk_is_mounted_if_it_can_be_and_never_formatted(
    host: Disks, fault: Finished | BaseException
) -> None:
    host.faults["blkid"] = fault
    await host.adapter().acquire(wish("t1", volumes=[volume("data", "sda")]), others())
    assert host.at("data") == ["sda"]
    with pytest.raises(ResourceError, match=r"could not be examined .* wrong fs type\. dmesg"):
        await host.adapter().acquire(wish("t2", volumes=[volume("new", "sdb")]), others())
    assert "mkfs.ext4" not in host.programs()


async def test_a_failure_of_mkfs_names_volume_device_and_words(host: Disks) -> None:
    host.faults["mkfs.ext4"] = Finished(1, "", "mkfs.ext4: No space left")
    with pytest.raises(ResourceError, match=r"volume data: .*sdb cannot be formatted: .*No space"):
        await host.adapter().acquire(wish("t1", volumes=[volume("data", "sdb")]), others())


async def test_a_mount_that_takes_too_long_is_an_error(host: Disks) -> None:
    host.faults["mount"] = CommandTimedOut("mount took longer than 120 s")
    with pytest.raises(
        ResourceError, match=r"volume data: .*cannot be mounted: mount took longer"
    ):
        await host.adapter().acquire(wish("t1", volumes=[volume("data")]), others())


async def test_a_volume_used_by_two_tasks_is_mounted_until_the_second_ends(host: Disks) -> None:
    adapter = host.adapter()
    first, second = (wish(owner, volumes=[volume("data")]) for owner in ("t1", "t2"))
    await adapter.acquire(first, others())
    await adapter.acquire(second, others(first))
    assert host.at("data") == ["sda"]
    await adapter.release(first, others(second))
    assert host.at("data") == ["sda"]
    await adapter.release(second, others())
    assert host.at("data") == []


async def test_two_tasks_released_at_once_leave_nothing_to_each_other(host: Disks) -> None:
    adapter = host.adapter()
    first, second = (wish(owner, volumes=[volume("data")]) for owner in ("t1", "t2"))
    await adapter.acquire(first, others())
    await adapter.acquire(second, others(first))
    await asyncio.gather(
        adapter.release(first, others(second)), adapter.release(second, others(first))
    )
    assert host.at("data") == []
    assert host.programs().count("umount") == 1


async def test_two_tasks_that_start_at_once_format_and_mount_once(host: Disks) -> None:
    adapter = host.adapter()
    first, second = (wish(owner, volumes=[volume("data", "sdb")]) for owner in ("t1", "t2"))
    await asyncio.gather(
        adapter.acquire(first, others(second)), adapter.acquire(second, others(first))
    )
    assert host.at("data") == ["sdb"]
    assert host.disks[str(host.dev / "sdb")].formatted == 1


async def test_one_disk_under_two_names_is_formatted_once(host: Disks) -> None:
    adapter = host.adapter()
    first, second = (wish(name, volumes=[volume(name, "sdb")]) for name in ("a", "b"))
    await asyncio.gather(
        adapter.acquire(first, others(second)), adapter.acquire(second, others(first))
    )
    assert (host.at("a"), host.at("b")) == (["sdb"], ["sdb"])
    assert host.disks[str(host.dev / "sdb")].formatted == 1


async def test_release_does_not_wait_for_one_who_is_taking_the_same_volume(host: Disks) -> None:
    """A device may take 40 s to appear, a release is given 9."""
    adapter, hold, at_it = host.adapter(), asyncio.Event(), asyncio.Event()
    coming, leaving = (wish(owner, volumes=[volume("data", "sdb")]) for owner in ("t1", "t2"))

    async def wait() -> None:
        at_it.set()
        await hold.wait()

    host.before["mkfs.ext4"] = wait
    taking = asyncio.create_task(adapter.acquire(coming, others(leaving)))
    await at_it.wait()
    await asyncio.wait_for(adapter.release(leaving, others(coming)), 5)
    assert not taking.done()
    hold.set()
    await taking
    assert host.at("data") == ["sdb"]


async def test_need_is_asked_again_under_the_lock(host: Disks) -> None:
    """A task submitted while a release waits for the lock must keep its volume."""
    adapter, hold, at_it = host.adapter(), asyncio.Event(), asyncio.Event()
    first, late = (wish(owner, volumes=[volume("data", "sdb")]) for owner in ("t1", "t2"))
    needing: list[Wish] = []

    async def wait() -> None:
        at_it.set()
        await hold.wait()

    host.before["mkfs.ext4"] = wait
    taking = asyncio.create_task(adapter.acquire(first, others()))
    await at_it.wait()
    giving = asyncio.create_task(adapter.release(first, lambda: needing))
    for _ in range(20):
        await asyncio.sleep(0)  # until it waits for the lock
    needing.append(late)
    hold.set()
    await asyncio.gather(taking, giving)
    assert host.at("data") == ["sdb"]


async def test_release_after_a_crash_needs_only_the_record(host: Disks) -> None:
    task = wish("t1", volumes=[volume("data")])
    await host.adapter().acquire(task, others())
    await host.adapter().release(task, others())
    assert host.at("data") == []


async def test_a_record_less_task_releases_what_its_container_had_mounted(host: Disks) -> None:
    await host.adapter().acquire(wish("t1", volumes=[volume("data")]), others())
    sources = ["/var/lib/x", f"{host.root}/data", f"{host.root}/data"]
    found = volumes_from_mounts(sources, str(host.root))
    assert found == (VolumeInfo(name="data"),)
    await host.adapter().release(wish("t1", volumes=found), others())
    assert host.at("data") == []


async def test_a_mount_from_before_a_crash_is_taken_over_if_it_is_of_the_same_device(
    host: Disks,
) -> None:
    host.mount("sda", "data")
    adapter, task = host.adapter(), wish("t1", volumes=[volume("data")])
    await adapter.acquire(task, others())
    assert host.programs() == []
    await adapter.release(task, others())
    assert host.at("data") == []


async def test_another_device_in_its_place_is_an_error_naming_both_and_stays(host: Disks) -> None:
    host.mount("sda", "data")
    adapter, task = host.adapter(), wish("t1", volumes=[volume("data", "sdb")])
    with pytest.raises(ResourceError, match=r"data has .*sda mounted, but the volume is .*sdb"):
        await adapter.acquire(task, others())
    for _ in range(2):
        await adapter.release(task, others())
    assert host.at("data") == ["sda"]


async def test_who_found_another_device_in_its_place_does_not_keep_it_there(host: Disks) -> None:
    adapter = host.adapter()
    first, second = (wish(f"t{disk}", volumes=[volume("data", disk)]) for disk in ("sda", "sdb"))
    await adapter.acquire(first, others())
    with pytest.raises(ResourceError):
        await adapter.acquire(second, others(first))
    await adapter.release(first, others(second))
    assert host.at("data") == []


async def test_an_id_submitted_anew_may_have_its_volume(host: Disks) -> None:
    host.mount("sda", "data")
    adapter = host.adapter()
    with pytest.raises(ResourceError):
        await adapter.acquire(wish("t1", volumes=[volume("data", "sdb")]), others())
    task = wish("t1", volumes=[volume("data", "sda")])
    await adapter.acquire(task, others())
    await adapter.release(task, others())
    assert host.at("data") == []


@pytest.mark.parametrize(
    "fault", [Finished(32, "", "umount: target is busy."), CommandTimedOut("umount took longer")]
)
async def test_what_cannot_be_unmounted_is_an_error_and_tried_again(
    host: Disks, fault: Finished | BaseException
) -> None:
    adapter, task = host.adapter(), wish("t1", volumes=[volume("data"), volume("b", "sdb")])
    await adapter.acquire(task, others())
    host.faults["umount"] = fault
    with pytest.raises(ResourceError, match=r"volume data: .*is still mounted: .*; volume b: "):
        await adapter.release(task, others())
    host.faults.clear()
    await adapter.release(task, others())
    assert host.mounted == []


async def test_one_busy_volume_does_not_keep_the_others(host: Disks) -> None:
    adapter, task = host.adapter(), wish("t1", volumes=[volume("data"), volume("b", "sdb")])
    await adapter.acquire(task, others())

    def busy_once() -> None:
        host.faults["umount"] = Finished(32, "", "target is busy")
        host.before["umount"] = host.faults.clear

    host.before["umount"] = busy_once
    with pytest.raises(ResourceError, match=r"volume data"):
        await adapter.release(task, others())
    assert host.at("b") == []


async def test_an_unmount_that_complains_but_worked_is_fine(host: Disks) -> None:
    adapter, task = host.adapter(), wish("t1", volumes=[volume("data")])
    await adapter.acquire(task, others())
    host.faults["umount"] = Finished(32, "", "not mounted")

    def by_somebody_else() -> None:
        host.mounted.clear()
        host._write()

    host.before["umount"] = by_somebody_else
    await adapter.release(task, others())


async def test_mounts_stacked_on_one_point_all_go(host: Disks) -> None:
    for _ in range(3):
        host.mount("sda", "data")
    await host.adapter().release(wish("t1", volumes=[volume("data")]), others())
    assert host.at("data") == []


async def test_an_unmount_without_end_is_an_error(host: Disks) -> None:
    host.mount("sda", "data")
    host.faults["umount"] = Finished(0)
    with pytest.raises(ResourceError, match=r"after 16 unmounts"):
        await host.adapter().release(wish("t1", volumes=[volume("data")]), others())


async def test_mounts_that_cannot_be_read_are_an_error(host: Disks) -> None:
    (host.proc / "self" / "mountinfo").unlink()
    with pytest.raises(ResourceError, match=r"mounts cannot be read"):
        await host.adapter().release(wish("t1", volumes=[volume("data")]), others())


def left_behind(host: Disks, number: int = 4711) -> Path:
    process = host.proc / str(number)
    process.mkdir()
    (process / "cmdline").write_bytes(f"mount\0/dev/sda\0{host.root}/data\0".encode())
    return process / "cmdline"


async def test_a_mount_that_a_killed_shim_left_running_is_waited_for(host: Disks) -> None:
    host.root.mkdir()
    command, task = left_behind(host), wish("t1", volumes=[volume("data")])

    def lands() -> None:
        command.unlink()
        host.mount("sda", "data")

    host.clock.at[2.0] = lands
    await host.adapter().release(task, others())
    assert host.programs() == ["umount"]
    assert host.at("data") == []


async def test_a_mount_that_never_lands_is_an_error_in_time_for_the_server(host: Disks) -> None:
    host.root.mkdir()
    left_behind(host)
    task = wish("t1", volumes=[volume("data")])
    adapter = host.adapter()
    with pytest.raises(ResourceError, match=r"process 4711 is still mounting"):
        await adapter.release(task, others())
    assert 5 <= host.clock.time < 6
    with pytest.raises(ResourceError, match=r"process 4711 is still mounting"):
        await adapter.acquire(task, others())


async def test_after_a_command_was_killed_others_are_looked_for_again(host: Disks) -> None:
    adapter, task = host.adapter(), wish("t1", volumes=[volume("data")])
    host.faults["mount"] = CommandTimedOut("mount took longer")
    with pytest.raises(ResourceError):
        await adapter.acquire(task, others())
    command = left_behind(host)

    def lands() -> None:
        command.unlink()
        host.mount("sda", "data")

    host.clock.at[1.0] = lands
    await adapter.release(task, others())
    assert host.at("data") == []


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../../etc", "/etc", ".hidden", "a\0b", "a\nb", "x" * 201, "\ud800"],
)
async def test_hostile_names_are_refused_and_give_nothing_back(host: Disks, name: str) -> None:
    assert not is_volume_name(name)
    task = wish("t1", volumes=[volume(name)])
    with pytest.raises(ResourceError, match=r"volume name .*; expected one plain name"):
        await host.adapter().acquire(task, others())
    host.mounted.append((str(host.dev / "sda"), str(host.root.parent)))
    await host.adapter().release(task, others())
    assert host.asked == []
    assert volumes_from_mounts([f"{host.root}/{name}"], str(host.root)) == ()


@pytest.mark.parametrize(
    "name", ["data", "my-volume", "a.b_c", "Ünïcode", "with space", "x" * 200]
)
def test_plain_names_are_taken(name: str) -> None:
    assert is_volume_name(name)


async def test_a_symlink_in_place_of_the_mount_point_is_refused(host: Disks) -> None:
    host.root.mkdir()
    (host.root / "data").symlink_to(host.dev)
    with pytest.raises(ResourceError, match=r"data is a symbolic link"):
        await host.adapter().acquire(wish("t1", volumes=[volume("data")]), others())
    assert host.mounted == []


@pytest.mark.parametrize("what", ["file", "dangling symlink"])
def test_what_is_no_directory_in_place_of_the_mount_point_is_refused(
    tmp_path: Path, what: str
) -> None:
    if what == "file":
        (tmp_path / "data").touch()
    else:
        (tmp_path / "data").symlink_to("gone")
    with pytest.raises(ResourceError, match=r"volume data: .*data cannot be made: File exists"):
        make_mount_point(str(tmp_path), "data")


async def test_a_root_behind_a_symlink_is_seen_as_the_kernel_sees_it(host: Disks) -> None:
    (host.root.parent / "big disk").mkdir()
    host.root.symlink_to("big disk")
    adapter, task = host.adapter(), wish("t1", volumes=[volume("data")])
    await adapter.acquire(task, others())
    assert await adapter.census() == {"data": str(host.dev / "sda")}
    await adapter.release(task, others())
    assert host.mounted == []


def test_a_device_is_known_by_number_or_by_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("sdb")
    device = Device(str(tmp_path / "link"), (8, 16))
    assert is_same_device(Mount("/m", "/dev/other-name", (8, 16)), device)
    assert is_same_device(Mount("/m", str(tmp_path / "sdb"), (0, 44)), device)
    assert not is_same_device(Mount("/m", str(tmp_path / "sdc"), (8, 32)), device)


async def test_nothing_is_formatted_before_that_can_be_noted(host: Disks) -> None:
    host.root.mkdir()
    (host.root / ".data.formatting").mkdir()
    with pytest.raises(
        ResourceError, match=r"volume data: .*\.data\.formatting cannot be written"
    ):
        await host.adapter().acquire(wish("t1", volumes=[volume("data", "sdb")]), others())
    assert "mkfs.ext4" not in host.programs()


VOLUMES = [volume("a", "sda"), volume("b", "sdb"), volume("c", "sdb", id="2")]
TASKS = st.lists(st.lists(st.sampled_from(VOLUMES), max_size=3), min_size=1, max_size=4)


@given(tasks=TASKS, data=st.data())
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
def test_mounts_are_always_the_union_of_the_standing_tasks(
    tmp_path_factory: pytest.TempPathFactory, tasks: list[list[VolumeInfo]], data: st.DataObject
) -> None:
    """Whatever starts and ends at the same time, and however often the shim is restarted."""
    host = Disks(tmp_path_factory.mktemp("host"), sda="ext4", sdb="blank")
    claims = [wish(f"t{number}", volumes=volumes) for number, volumes in enumerate(tasks)]
    rounds = data.draw(st.lists(st.sets(st.sampled_from(claims)), max_size=4))
    standing: list[Wish] = []

    def but(claim: Wish) -> Others:
        return lambda: [other for other in standing if other is not claim]

    async def leave(adapter: Volumes, claim: Wish) -> None:
        await adapter.release(claim, but(claim))
        standing.remove(claim)

    async def live() -> None:
        for toggled in [*rounds, set(standing)]:
            adapter = host.adapter()
            leaving = [claim for claim in standing if claim in toggled]
            coming = [claim for claim in claims if claim in toggled and claim not in standing]
            standing.extend(coming)
            await asyncio.gather(
                *(leave(adapter, claim) for claim in leaving),
                *(adapter.acquire(claim, but(claim)) for claim in coming),
            )
            assert set(await adapter.census()) == {
                volume.name for claim in standing for volume in claim.config.volumes
            }
            assert len(host.mounted) == len(set(host.mounted))

    asyncio.run(live())
    assert host.disks[str(host.dev / "sdb")].formatted <= 1
