"""Volumes on loop devices, with the host's own tools: what the tests on imagined disks assume."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from dstack_shim_contracts.api import VolumeInfo

from dstack_shim.errors import ResourceError
from dstack_shim.host.commands import run
from dstack_shim.resources.devices import HostFiles, Timing, device_number, why_not_ready
from dstack_shim.resources.filesystem import why_not_blank
from dstack_shim.resources.volumes import Volumes
from tests.shim.resources.stage import Log, others, wish

pytestmark = pytest.mark.sandbox

MIB = 1 << 20
T = TypeVar("T")


def blocking(call: Callable[..., T], /, *args: object) -> Awaitable[T]:
    return asyncio.to_thread(call, *args)


def tool(*argv: str) -> str:
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


class Host:
    """Loop devices on files, linked as GCP's udev rules do; a tree of its own to mount in."""

    def __init__(self, root: Path) -> None:
        self.root = root / "volumes"
        self.images = root
        self.dev = root / "dev"
        self.links = self.dev / "disk" / "by-id"
        self.links.mkdir(parents=True)
        self.loops: list[str] = []
        self.log = Log()

    def attach(self, name: str, size: int = 16 * MIB, *, partition: bool = False) -> Path:
        """A new empty disk; returns its image."""
        image = self.images / f"{name}.img"
        with image.open("wb") as file:
            file.truncate(size)
        self.link(name, self.loop(image), partition=partition)
        return image

    def loop(self, image: Path, *options: str) -> str:
        device = tool("losetup", "--find", "--show", *options, str(image))
        self.loops.append(device)
        return device

    def link(self, name: str, device: str, *, partition: bool = False) -> None:
        link = self.links / f"google-{name}{'-part1' if partition else ''}"
        link.symlink_to(device)

    def device(self, name: str) -> str:
        return os.path.realpath(self.links / f"google-{name}")

    def adapter(self) -> Volumes:
        return Volumes(
            run,
            blocking,
            self.log.events,
            root=str(self.root),
            files=HostFiles(dev=str(self.dev)),
            timing=Timing(sleep=lambda seconds: asyncio.sleep(seconds / 50)),
        )

    def close(self) -> None:
        for point in tool("findmnt", "-rno", "TARGET").splitlines():
            if point.startswith(f"{self.root}/"):
                subprocess.run(["umount", "--", point], check=False, timeout=60)
        for device in self.loops:
            subprocess.run(["losetup", "--detach", device], check=False, timeout=60)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def volume(name: str, disk: str = "", *, init_fs: bool = True) -> VolumeInfo:
    return VolumeInfo("gcp", name, f"id-{name}", init_fs=init_fs, device_name=disk or name)


async def test_a_blank_disk_is_formatted_opened_to_everybody_and_keeps_its_data(
    host: Host,
) -> None:
    host.attach("data")
    task = wish("t1", volumes=[volume("data")])
    await host.adapter().acquire(task, others())
    point = host.root / "data"
    assert point.is_mount()
    assert stat.S_IMODE(point.stat().st_mode) == 0o777
    assert [entry.name for entry in host.root.iterdir()] == ["data"]
    (point / "file").write_bytes(b"precious")
    await host.adapter().release(task, others())
    assert not point.is_mount()
    point.chmod(0o755)
    await host.adapter().acquire(task, others())
    assert (point / "file").read_bytes() == b"precious"
    assert await host.adapter().census() == {"data": host.device("data")}


async def test_the_root_of_a_volume_formatted_elsewhere_keeps_its_mode(host: Host) -> None:
    host.attach("data")
    tool("mkfs.ext4", "-q", "-F", host.device("data"))
    await host.adapter().acquire(wish("t1", volumes=[volume("data")]), others())
    assert stat.S_IMODE((host.root / "data").stat().st_mode) == 0o755


async def test_a_crash_between_formatting_and_opening_is_made_good(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.attach("data")
    task = wish("t1", volumes=[volume("data")])

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("dstack_shim.resources.volumes.open_new_root", die)
        with pytest.raises(Killed):
            await host.adapter().acquire(task, others())
    assert stat.S_IMODE((host.root / "data").stat().st_mode) == 0o755
    await host.adapter().release(task, others())
    again = wish("t2", volumes=[volume("data")])
    await host.adapter().acquire(again, others())
    assert stat.S_IMODE((host.root / "data").stat().st_mode) == 0o777


def partition_table(image: Path) -> None:
    with image.open("r+b") as file:
        file.seek(446)
        file.write(struct.pack("<8B2I", 0, 0, 2, 0, 0x83, 0, 0, 0, 2048, 20480))
        file.seek(510)
        file.write(b"\x55\xaa")


def two_signatures(image: Path) -> None:
    tool("mkfs.ext4", "-q", "-F", str(image))
    with image.open("r+b") as file:
        file.seek(65536 + 64)
        file.write(b"_BHRfS_M")


def swap(image: Path) -> None:
    tool("mkswap", "-q", str(image))


def unreadable(image: Path) -> None:
    os.truncate(image, 0)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (partition_table, r"not blank \(a partition table\?\)"),
        (two_signatures, "ambivalent result"),
        (swap, "type 'swap', cannot be mounted"),
        (unreadable, "looks blank but cannot be read: Input/output error"),
    ],
)
async def test_what_is_not_proven_blank_is_never_formatted(
    host: Host, spoil: Callable[[Path], None], words: str
) -> None:
    image = host.attach("data")
    spoil(image)
    before = image.read_bytes()
    with pytest.raises(ResourceError, match=rf"volume data: .*{host.device('data')}.*{words}"):
        await host.adapter().acquire(wish("t1", volumes=[volume("data")]), others())
    assert image.read_bytes() == before


async def test_blkid_itself_tells_an_unreadable_disk_from_a_blank_one_in_no_way(
    host: Host,
) -> None:
    """Why its word alone is not enough. Should this ever fail: good news."""
    argv = ["blkid", "-p", "-o", "value", "-s", "TYPE"]
    host.attach("blank")
    unreadable(host.attach("broken"))
    answers = [
        await run([*argv, device], timeout=30)
        for device in (host.device("blank"), host.device("broken"), "/dev/there-is-none")
    ]
    assert {(answer.code, answer.out, answer.err) for answer in answers} == {(2, "", "")}


async def test_a_blank_disk_in_use_is_never_formatted(host: Host) -> None:
    host.attach("data")
    device = host.device("data")
    held = os.open(device, os.O_RDONLY | os.O_EXCL)
    try:
        assert why_not_blank(device) == "is in use"
    finally:
        os.close(held)
    assert why_not_blank(device) == ""


async def test_the_first_partition_is_mounted_where_there_is_one(host: Host) -> None:
    """The link to the partition is one to a loop device with an offset."""
    image = host.attach("data")
    partition_table(image)
    host.link("data", host.loop(image, "--offset", str(MIB)), partition=True)
    await host.adapter().acquire(wish("t1", volumes=[volume("data")]), others())
    assert await host.adapter().census() == {"data": host.loops[1]}


async def test_a_volume_is_shared_by_tasks_and_taken_over_after_a_crash(host: Host) -> None:
    host.attach("data")
    first, second = (wish(owner, volumes=[volume("data")]) for owner in ("t1", "t2"))
    adapter = host.adapter()
    await asyncio.gather(
        adapter.acquire(first, others(second)), adapter.acquire(second, others(first))
    )
    assert list(await adapter.census()) == ["data"]
    adapter = host.adapter()
    third = wish("t3", volumes=[volume("data")])
    await adapter.acquire(third, others(first, second))
    await adapter.release(first, others(second, third))
    assert (host.root / "data").is_mount()
    await asyncio.gather(
        adapter.release(second, others(third)), adapter.release(third, others(second))
    )
    assert await adapter.census() == {}


async def test_another_device_on_the_mount_point_is_an_error_naming_both(host: Host) -> None:
    host.attach("one")
    host.attach("two")
    adapter = host.adapter()
    await adapter.acquire(wish("t1", volumes=[volume("data", "one")]), others())
    words = f"{host.device('one')} mounted, but the volume is {host.device('two')}"
    with pytest.raises(ResourceError, match=words):
        await adapter.acquire(wish("t2", volumes=[volume("data", "two")]), others())


async def test_a_busy_volume_stays_mounted_and_says_so(host: Host) -> None:
    host.attach("data")
    adapter, task = host.adapter(), wish("t1", volumes=[volume("data")])
    await adapter.acquire(task, others())
    busy = pytest.raises(ResourceError, match=r"volume data: .* still mounted: .* busy")
    with (host.root / "data" / "open").open("wb"), busy:
        await adapter.release(task, others())
    await adapter.release(task, others())
    assert await adapter.census() == {}


async def test_a_name_with_spaces_is_mounted_and_counted(host: Host) -> None:
    host.attach("disk")
    adapter, task = host.adapter(), wish("t1", volumes=[volume("my own\\data 🚀", "disk")])
    await adapter.acquire(task, others())
    assert list(await adapter.census()) == ["my own\\data 🚀"]
    await adapter.release(task, others())
    assert await adapter.census() == {}


async def test_a_disk_without_size_is_not_ready(host: Host) -> None:
    host.attach("data", size=0)
    assert why_not_ready(host.device("data")) == "has no size"
    host.attach("more")
    assert why_not_ready(host.device("more")) == ""
    assert device_number(host.device("more"))[0] == 7
