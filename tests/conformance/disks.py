"""Disks of the instance: files behind loop devices, and the names a cloud gives them."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conformance.instance import command

MIB = 1024 * 1024
BY_ID = Path("/dev/disk/by-id")
FOLDER = "disks"

# A master boot record with one Linux partition.
_START, _SECTORS = 2048, 16384
_ENTRY = struct.pack("<B3sB3sII", 0, b"\0\0\0", 0x83, b"\0\0\0", _START, _SECTORS)
PARTITION_TABLE = b"\0" * 446 + _ENTRY + b"\0" * 48 + b"\x55\xaa"


@contextmanager
def disk(
    folder: Path, *, size: int = 16 * MIB, file_system: bool = False, content: bytes = b""
) -> Iterator[Path]:
    """A block device of its own that vanishes at the end, even if this process is killed."""
    image = folder / FOLDER / uuid.uuid4().hex[:8]
    image.parent.mkdir(exist_ok=True)
    with image.open("wb") as file:
        file.write(content)
        file.truncate(size)
    if file_system:
        command("mkfs.ext4", "-q", "-F", image)
    device = Path(command("losetup", "--find", "--show", image).strip())
    for left in Path("/sys/class/block", device.name).glob("*/partition"):
        # Of a run that was killed: the kernel keeps it for whoever gets the device next.
        command("delpart", device, left.read_text(encoding="ascii").strip())
    held = os.open(device, os.O_RDONLY)
    # Detaching an open loop device only marks it: the kernel lets go of it with the last user.
    command("losetup", "--detach", device)
    try:
        yield device
    finally:
        os.close(held)
        image.unlink()


@contextmanager
def partitioned_disk(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A disk with one partition that holds a file system: both devices."""
    with disk(folder, content=PARTITION_TABLE) as device:
        # Told, not found: not every kernel reads partition tables.
        command("addpart", device, "1", str(_START), str(_SECTORS))
        number = Path(f"/sys/class/block/{device.name}/{device.name}p1/dev")
        partition = Path(f"{device}p1")
        major, minor = number.read_text().strip().split(":")
        os.mknod(partition, stat.S_IFBLK | 0o600, os.makedev(int(major), int(minor)))
        try:
            command("mkfs.ext4", "-q", "-F", partition)
            yield device, partition
        finally:
            partition.unlink()
            command("delpart", device, "1")


@contextmanager
def other_name(device: Path, name: Path) -> Iterator[Path]:
    """The same device under a second name, as kernels of other clouds name it."""
    os.mknod(name, stat.S_IFBLK | 0o600, device.stat().st_rdev)
    try:
        yield name
    finally:
        name.unlink()


@contextmanager
def google_name(device_name: str, device: Path) -> Iterator[None]:
    """The link by which GCP hosts know an attached disk."""
    BY_ID.mkdir(parents=True, exist_ok=True)
    link = BY_ID / f"google-{device_name}"
    link.symlink_to(os.path.relpath(device, BY_ID))
    try:
        yield
    finally:
        link.unlink()


def file_system_of(device: Path) -> str:
    """What ``blkid`` makes of it; empty for none."""
    argv = ["blkid", "-p", "-o", "value", "-s", "TYPE", str(device)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip()


def content_of(device: Path) -> bytes:
    """The start of a disk, past the kernel's cache of it."""
    command("blockdev", "--flushbufs", device)
    with device.open("rb") as file:
        return file.read(4 * MIB)


def lsblk_script(serials: dict[Path, str]) -> str:
    """A stand-in for lsblk that knows these serial numbers, in its text and its JSON form."""
    text = "\n".join(f"{device.name} {serial}" for device, serial in serials.items())
    entries = ", ".join(
        f'{{"name": "${{prefix}}{device.name}", "serial": "{serial}"}}'
        for device, serial in serials.items()
    )
    return f"""
case "$*" in
*SERIAL*) ;;
*) exec /usr/bin/lsblk "$@" ;;
esac
prefix=
case "$*" in
*paths*|*-p*) prefix=/dev/ ;;
esac
case "$*" in
*json*|*-J*) cat <<END
{{"blockdevices": [{entries}]}}
END
;;
*) echo "NAME SERIAL"; echo "{text}" ;;
esac
"""
