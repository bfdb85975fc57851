"""Volumes: disks of the cloud, formatted once, mounted on the host while a task needs them.

What is mounted is what the kernel says, not what we remember: a mount from before a crash is
taken over if it is of the right device. A volume is unmounted by the last owner that needs it.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from dstack_shim_contracts.api import VolumeInfo

from dstack_shim.cancelling import to_its_end
from dstack_shim.errors import CommandError, ResourceError
from dstack_shim.host.commands import Finished, Runner
from dstack_shim.log import EventLog
from dstack_shim.resources.devices import Device, Devices, HostFiles, Timing
from dstack_shim.resources.filesystem import FileSystems, Verdict, complaint
from dstack_shim.resources.mounts import Mount, parse_mountinfo, unfinished
from dstack_shim.resources.protocol import Blocking, Claim, Ending, Others
from dstack_shim.resources.volume_names import ROOT, is_volume_name

MOUNT_LIMIT = 120.0  # s: a journal may have to be replayed
UNMOUNT_LIMIT = 60.0  # s: what is in memory may have to be written
SETTLE_FOR_ACQUIRE, SETTLE_FOR_RELEASE = 60.0, 5.0  # s; a server waits 9 s for a release
_STACKED = 16  # mounts on one point: more than anything real

_FORMATTING = ".formatting"


class Volumes:
    """Mounts below ``root``, one per volume name."""

    name = "volumes"

    def __init__(
        self,
        run: Runner,
        blocking: Blocking,
        log: EventLog,
        *,
        root: str = ROOT,
        files: HostFiles | None = None,
        timing: Timing | None = None,
        proc: str = "/proc",
    ) -> None:
        self._run = run
        self._blocking = blocking
        self._log = log
        self._root = root
        self._proc = proc
        self._timing = timing or Timing()
        self._devices = Devices(run, blocking, files=files, timing=self._timing)
        self._file_systems = FileSystems(run, blocking, sleep=self._timing.sleep)
        self._ending = Ending()
        self._locks: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()
        self._foreign: set[tuple[str, str]] = set()
        self._settled = False

    async def acquire(self, record: Claim, others: Others) -> None:
        """Mount the record's volumes; those that are mounted already are shared.

        A disk is formatted only if it is proven blank and the volume asks for it.

        Raises ``ResourceError`` naming volume, device and the tool's own words.
        """
        self._ending.revoke(record.id)
        alive = {claim.id for claim in others() if claim.id != record.id}
        self._foreign = {pair for pair in self._foreign if pair[0] in alive}
        _check_mounts(record)
        for volume in record.config.volumes:
            if not is_volume_name(volume.name):
                raise ResourceError(f"volume name {volume.name!r}; expected one plain name")
            await self._settle(SETTLE_FOR_ACQUIRE)
            async with self._lock(volume.name):
                await self._acquire(record.id, volume)

    async def release(self, record: Claim, others: Others) -> None:
        """Unmount the record's volumes, except those that another claim needs.

        Raises ``ResourceError``: one could not be unmounted (the others were).
        """
        self._ending.begin(record.id)
        problems = []
        for name in dict.fromkeys(volume.name for volume in record.config.volumes):
            # A forged name, or another's mount in our place: never taken, so not given back.
            if not is_volume_name(name) or (record.id, name) in self._foreign:
                continue
            try:
                await self._release(record, name, others)
            except ResourceError as error:
                problems.append(str(error))
        if problems:
            raise ResourceError("; ".join(problems))

    async def census(self) -> Mapping[str, str]:
        """What is mounted below the root: volume name → device."""
        prefix = await self._blocking(os.path.realpath, self._root) + "/"
        return {
            mount.point.removeprefix(prefix): mount.source
            for mount in await self._mounts()
            if mount.point.startswith(prefix)
        }

    async def _acquire(self, owner: str, volume: VolumeInfo) -> None:
        device = await self._devices.find(volume)
        # Two names for one disk: the second must not find it blank while the first formats it.
        async with self._lock(device.number):
            point = await self._blocking(make_mount_point, self._root, volume.name)
            mounts = await self._mounted(point)
            if not mounts:
                verdict = await self._examine(volume, device)
                # From here on nothing is cut short: half a file system is neither blank nor
                # mountable, and a mount that lands later belongs to nobody.
                await to_its_end(self._take(volume, device, point, verdict))
            elif not await self._blocking(is_same_device, mounts[-1], device):
                self._foreign.add((owner, volume.name))
                raise ResourceError(
                    f"volume {volume.name}: {point} has {mounts[-1].source} mounted, "
                    f"but the volume is {device.path}"
                )
            await self._blocking(open_new_root, self._root, volume.name, _identity(volume))
        self._log.info("volume.acquired", task=owner, volume=volume.name, device=device.path)

    async def _examine(self, volume: VolumeInfo, device: Device) -> Verdict:
        """What is on the device, if it can be mounted or may be formatted."""
        try:
            verdict = await self._file_systems.examine(device)
        except ResourceError as error:
            raise ResourceError(f"volume {volume.name}: {error}") from error
        if verdict.blank and not volume.init_fs:
            words = f"{verdict.words}, and init_fs does not allow to format it"
            raise ResourceError(f"volume {volume.name}: {device.path} {words}")
        if not verdict.blank and not verdict.mountable:
            raise ResourceError(f"volume {volume.name}: {device.path} {verdict.words}")
        return verdict

    async def _take(
        self, volume: VolumeInfo, device: Device, point: str, verdict: Verdict
    ) -> None:
        """Mount the device, formatted first if it is blank."""
        words = verdict.words
        if verdict.blank:
            await self._format(volume, device)
            words = "was formatted just now"
        await self._mount(volume, device, point, words)

    async def _format(self, volume: VolumeInfo, device: Device) -> None:
        try:
            await self._blocking(note_formatting, self._root, volume.name, _identity(volume))
            self._log.info("volume.formatting", volume=volume.name, device=device.path)
            await self._file_systems.format(device)
        except ResourceError as error:
            raise ResourceError(f"volume {volume.name}: {error}") from error

    async def _mount(self, volume: VolumeInfo, device: Device, point: str, verdict: str) -> None:
        failed = f"volume {volume.name}: {device.path}, which {verdict}, cannot be mounted"
        try:
            finished = await self._command(["mount", device.path, point], MOUNT_LIMIT)
        except CommandError as error:
            raise ResourceError(f"{failed}: {error}") from error
        if not finished.ok:
            raise ResourceError(f"{failed}: {complaint(finished)}")

    async def _release(self, record: Claim, name: str, others: Others) -> None:
        # Asked before the lock as well: whoever takes the volume may hold it for a minute.
        if self._is_needed(record, name, others):
            return
        await self._settle(SETTLE_FOR_RELEASE)
        async with self._lock(name):
            if not self._is_needed(record, name, others):
                await self._unmount(record.id, name)

    async def _unmount(self, owner: str, name: str) -> None:
        point = f"{await self._blocking(os.path.realpath, self._root)}/{name}"
        failed = f"volume {name}: {point} is still mounted"
        for _ in range(_STACKED):
            if not await self._mounted(point):
                return
            try:
                finished = await self._command(["umount", "-qf", point], UNMOUNT_LIMIT)
            except CommandError as error:
                raise ResourceError(f"{failed}: {error}") from error
            if not finished.ok and await self._mounted(point):
                raise ResourceError(f"{failed}: {complaint(finished)}")
            self._log.info("volume.unmounted", task=owner, volume=name)
        raise ResourceError(f"{failed} after {_STACKED} unmounts")

    async def _command(self, argv: Sequence[str], limit: float) -> Finished:
        try:
            return await self._run(argv, timeout=limit)
        except BaseException:
            # It was killed, which a process inside a system call obeys only at its end.
            self._settled = False
            raise

    def _is_needed(self, record: Claim, name: str, others: Others) -> bool:
        return any(
            volume.name == name and (claim.id, name) not in self._foreign
            for claim in self._ending.standing(record.id, others)
            for volume in claim.config.volumes
        )

    async def _settle(self, patience: float) -> None:
        """Once in a process: wait for mounts that a killed predecessor has left running."""
        deadline = self._timing.now() + patience
        while not self._settled:
            processes = await self._blocking(unfinished, self._root, self._proc)
            if not processes:
                self._settled = True
            elif self._timing.now() >= deadline:
                raise ResourceError(f"process {processes[0]} is still mounting in {self._root}")
            else:
                await self._timing.sleep(0.2)

    async def _mounted(self, point: str) -> list[Mount]:
        return [mount for mount in await self._mounts() if mount.point == point]

    async def _mounts(self) -> tuple[Mount, ...]:
        try:
            content = await self._blocking(Path(self._proc, "self/mountinfo").read_bytes)
        except OSError as error:
            raise ResourceError(f"mounts cannot be read: {error}") from error
        return parse_mountinfo(content)

    def _lock(self, of: object) -> asyncio.Lock:
        return self._locks.setdefault(of, asyncio.Lock())


def _check_mounts(record: Claim) -> None:
    own = {volume.name for volume in record.config.volumes}
    for mount in record.config.volume_mounts:
        if mount.name not in own:
            # It would bind whatever has this name on the host: another task's volume.
            raise ResourceError(f"volume_mounts: {mount.name!r} is no volume of the task")


def is_same_device(mount: Mount, device: Device) -> bool:
    """Whether the device is what is mounted. Blocking.

    By number; by path for a file system that hides the number (btrfs).
    """
    return mount.number == device.number or (
        os.path.realpath(mount.source) == os.path.realpath(device.path)
    )


def make_mount_point(root: str, name: str) -> str:
    """Make the directory to mount on; the path as the kernel will show it. Blocking.

    Raises ``ResourceError``: something else, a symlink perhaps, is in its place.
    """
    point = Path(os.path.realpath(root), name)
    try:
        point.mkdir(mode=0o755, parents=True, exist_ok=True)
        if point.is_symlink():
            raise ResourceError(f"volume {name}: {point} is a symbolic link")
    except OSError as error:
        raise ResourceError(f"volume {name}: {point} cannot be made: {error.strerror}") from error
    return str(point)


def note_formatting(root: str, name: str, identity: str) -> None:
    """Write down, durably, that the volume's file system will be of our making. Blocking.

    Raises ``ResourceError``: the note cannot be written.
    """
    path = _note(root, name)
    try:
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        try:
            os.write(file, identity.encode())
            os.fsync(file)
        finally:
            os.close(file)
        _flush(path.parent)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}") from error


def open_new_root(root: str, name: str, identity: str) -> None:
    """Let every user write in the mounted volume, if its file system is of our making. Blocking.

    A crash after the formatting is made good here, by the note; once somebody has used the
    volume its root is theirs.

    Raises ``ResourceError``: its mode cannot be changed.
    """
    note, point = _note(root, name), Path(root, name)
    try:
        noted = note.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return
    try:
        if noted == identity and _is_pristine(point):
            point.chmod(0o777)
            _flush(point)
        note.unlink()
    except OSError as error:
        raise ResourceError(
            f"volume {name}: the root of the new file system: {error.strerror}"
        ) from error


def _is_pristine(point: Path) -> bool:
    status = point.stat()
    untouched = stat.S_IMODE(status.st_mode) == 0o755 and status.st_uid == 0
    return untouched and {entry.name for entry in point.iterdir()} <= {"lost+found"}


def _note(root: str, name: str) -> Path:
    return Path(root, f".{name}{_FORMATTING}")


def _identity(volume: VolumeInfo) -> str:
    return f"{volume.backend} {volume.volume_id}\n"


def _flush(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
