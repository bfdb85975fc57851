"""From a volume to its block device on this host.

AWS attaches a volume under a name that the kernel may change: NVMe instances number devices
as they please and tell the volume only by its serial number, Xen ones turn sd into xvd. GCP's
udev rules make a link by the name under which the disk was attached. Both may take a while.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from attrs import field, frozen
from dstack_shim_contracts.api import VolumeInfo

from dstack_shim.errors import CommandError, ResourceError
from dstack_shim.host.commands import Runner
from dstack_shim.resources.protocol import Blocking

AWS_PATIENCE = 30.0  # s: attaching is seen late, above all on NVMe instances
READY_PATIENCE = 10.0  # s: for a link by udev, and for a device to have a size
INTERVAL = 0.5  # s between looks
_LSBLK_LIMIT = 10.0  # s

_AWS_NAME = re.compile(r"/dev/[A-Za-z0-9][A-Za-z0-9._-]*")
_GCP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_AWS_SERIAL = re.compile(r"vol[0-9A-Za-z]+")


@frozen
class Device:
    """A block device that is there and has a size."""

    path: str
    number: tuple[int, int]


@frozen
class HostFiles:
    """Where the kernel shows its devices; a test gives directories of its own."""

    dev: str = "/dev"
    block: str = "/sys/class/block"


@frozen
class Timing:
    """How time passes; None: by the event loop."""

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    now: Callable[[], float] = field(default=lambda: asyncio.get_running_loop().time())


@frozen
class _Found:
    path: str = ""
    why_not: str = ""


class Devices:
    """Finds the devices of volumes."""

    def __init__(
        self,
        run: Runner,
        blocking: Blocking,
        *,
        files: HostFiles | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._run = run
        self._blocking = blocking
        self._files = files or HostFiles()
        self._timing = timing or Timing()

    async def find(self, volume: VolumeInfo) -> Device:
        """The device to mount for ``volume``: its first partition if it has any.

        Waits for it, up to 30 s on AWS, then up to 10 s until it has a size.

        Raises ``ResourceError`` naming the volume and what was looked for.
        """
        if volume.backend == "aws":
            self._check_aws(volume)
            path = await self._wait(volume, AWS_PATIENCE, lambda: self._look_aws(volume))
        elif volume.backend == "gcp":
            link = self._gcp_link(volume)
            path = await self._wait(volume, READY_PATIENCE, lambda: self._look_gcp(link))
        else:
            raise ResourceError(
                f"volume {volume.name}: backend {volume.backend!r}; expected aws or gcp"
            )
        path = await self._blocking(first_partition, path, self._files.block)
        return await self._ready(volume, path)

    async def _wait(
        self, volume: VolumeInfo, patience: float, look: Callable[[], Awaitable[_Found]]
    ) -> str:
        deadline = self._timing.now() + patience
        while True:
            found = await look()
            if found.path:
                return found.path
            if self._timing.now() >= deadline:
                raise ResourceError(
                    f"volume {volume.name}: no device after {patience:g} s: {found.why_not}"
                )
            await self._timing.sleep(INTERVAL)

    async def _ready(self, volume: VolumeInfo, path: str) -> Device:
        async def look() -> _Found:
            problem = await self._blocking(why_not_ready, path)
            return _Found(why_not=f"{path} {problem}") if problem else _Found(path)

        await self._wait(volume, READY_PATIENCE, look)
        number = await self._blocking(device_number, path)
        return Device(path, number)

    def _check_aws(self, volume: VolumeInfo) -> None:
        name = volume.device_name
        if name and not _AWS_NAME.fullmatch(name):
            raise ResourceError(
                f"volume {volume.name}: device_name {name!r}; expected a name in /dev"
            )
        if not name and not _AWS_SERIAL.fullmatch(_serial(volume)):
            raise ResourceError(
                f"volume {volume.name}: volume_id {volume.volume_id!r} and no device_name; "
                "expected a volume_id like vol-0123"
            )

    async def _look_aws(self, volume: VolumeInfo) -> _Found:
        serials, problem = await self._serials()
        wanted = _serial(volume)
        for path, serial in serials.items():
            if serial == wanted and _AWS_SERIAL.fullmatch(wanted):
                return _Found(path)
        tried = [f"serial {wanted!r}{problem}"]
        for path in self._aws_paths(volume.device_name or ""):
            real = await self._blocking(existing_path, path)
            if real and _AWS_SERIAL.fullmatch(serials.get(real, "")):
                tried.append(f"{path} is volume {serials[real]}")
            elif real:
                return _Found(real)
            else:
                tried.append(path)
        return _Found(why_not="tried " + ", ".join(tried))

    def _aws_paths(self, device_name: str) -> list[str]:
        if not device_name:
            return []
        names = [device_name.removeprefix("/dev/")]
        if names[0].startswith("sd"):
            names.append("xvd" + names[0].removeprefix("sd"))
        return [f"{self._files.dev}/{name}" for name in names]

    async def _serials(self) -> tuple[Mapping[str, str], str]:
        """Device path → serial number, and what to add to a complaint about a missing one."""
        argv = ["lsblk", "--json", "--nodeps", "--paths", "--output", "NAME,SERIAL"]
        try:
            finished = await self._run(argv, timeout=_LSBLK_LIMIT)
        except CommandError as error:
            return {}, f" ({error})"
        if not finished.ok:
            return {}, f" (lsblk {finished.failure})"
        return parse_serials(finished.out), ""

    def _gcp_link(self, volume: VolumeInfo) -> str:
        name = volume.device_name or ""
        if not _GCP_NAME.fullmatch(name):
            raise ResourceError(
                f"volume {volume.name}: device_name {name!r}; expected the name of an attached disk"
            )
        return f"{self._files.dev}/disk/by-id/google-{name}"

    async def _look_gcp(self, link: str) -> _Found:
        for path in (f"{link}-part1", link):
            if real := await self._blocking(existing_path, path):
                return _Found(real)
        return _Found(why_not=f"tried {link}-part1, {link}")


def parse_serials(text: str) -> Mapping[str, str]:
    """Device path → serial number, from ``lsblk --json``; anything unexpected is left out."""
    try:
        entries = json.loads(text)["blockdevices"]
        return {
            entry["name"]: entry["serial"].strip()
            for entry in entries
            if isinstance(entry.get("name"), str) and isinstance(entry.get("serial"), str)
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def existing_path(path: str) -> str:
    """Where ``path`` leads, "" if nowhere. Blocking."""
    return os.path.realpath(path) if Path(path).exists() else ""


def first_partition(path: str, block: str) -> str:
    """The partition of the lowest number on ``path``, ``path`` itself without any. Blocking.

    The kernel reads the partition table before it shows the disk; its own list is complete
    when udev's links may not be yet.
    """
    disk = Path(path)
    try:
        numbers = {
            _partition_number(entry): entry.name for entry in Path(block, disk.name).iterdir()
        }
    except OSError:
        return path
    found = sorted(number for number in numbers if number)
    return str(disk.with_name(numbers[found[0]])) if found else path


def _partition_number(directory: Path) -> int:
    try:
        return int((directory / "partition").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def why_not_ready(path: str) -> str:
    """What keeps ``path`` from being mounted, "" if nothing. Blocking."""
    try:
        if not stat.S_ISBLK(Path(path).stat().st_mode):
            return "is not a block device"
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return "" if os.lseek(file, 0, os.SEEK_END) else "has no size"
        finally:
            os.close(file)
    except OSError as error:
        return f"cannot be opened: {error.strerror}"


def device_number(path: str) -> tuple[int, int]:
    """Major and minor number of a device. Blocking.

    Raises ``ResourceError``: it has gone.
    """
    try:
        number = Path(path).stat().st_rdev
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}") from error
    return os.major(number), os.minor(number)


def _serial(volume: VolumeInfo) -> str:
    return volume.volume_id.replace("-", "")
