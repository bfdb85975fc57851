"""A file system on a volume's device: recognised, or made where there is proof of a blank disk.

Formatting destroys what a wrong verdict overlooks, so the verdict is distrusted: ``blkid``
answers with the same exit code 2 and the same silence for a blank disk, for a disk it cannot
read and for one that is not there (util-linux 2.38.1, tried). Blank means: that answer four
times in a row, and a device that can be read at both ends and is nobody else's.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable

from attrs import frozen

from dstack_shim.errors import CommandError, ResourceError
from dstack_shim.host.commands import Finished, Runner
from dstack_shim.resources.devices import Device
from dstack_shim.resources.protocol import Blocking

CONFIRMATIONS = 3
INTERVAL = 1.0  # s between them
PROBE_LIMIT = 30.0  # s
FORMAT_LIMIT = 600.0  # s: ext4 initialises lazily, terabytes take seconds; slow disks exist
HEAD, TAIL = 1 << 20, 1 << 16  # bytes read before a disk is believed to be blank

BLANK = "is blank"


@frozen
class Verdict:
    """What is on a device, in words that follow its name."""

    words: str
    mountable: bool = True
    """False where a mount is known to fail; where it is not, the mount itself tells."""

    @property
    def blank(self) -> bool:
        """Whether nothing was found on it."""
        return self.words == BLANK


def judge(finished: Finished) -> Verdict:
    """Read the answer of ``blkid -p -o value -s TYPE``. Pure."""
    kind = finished.out.strip()
    if finished.code == 2 and not finished.out and not finished.err:
        return Verdict(BLANK, mountable=False)
    if finished.code == 0 and kind:
        return Verdict(f"has a file system of type {kind!r}")
    if finished.code == 0 and not finished.out:
        # blkid found something, only no TYPE: a partition table answers so.
        words = "has no file system but is not blank (a partition table?), so is not formatted"
        return Verdict(words, mountable=False)
    return Verdict(f"could not be examined (blkid {finished.failure})")


class FileSystems:
    """Examines and formats devices."""

    def __init__(
        self,
        run: Runner,
        blocking: Blocking,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._run = run
        self._blocking = blocking
        self._sleep = sleep

    async def examine(self, device: Device) -> Verdict:
        """What is on the device; blank only after confirmation.

        Raises ``ResourceError``: it looks blank but cannot be read, or is in use.
        """
        verdict = await self._probe(device)
        for _ in range(CONFIRMATIONS):
            if not verdict.blank:
                return verdict
            await self._sleep(INTERVAL)
            verdict = await self._probe(device)
        if verdict.blank and (problem := await self._blocking(why_not_blank, device.path)):
            raise ResourceError(f"{device.path} looks blank but {problem}; it is not formatted")
        return verdict

    async def format(self, device: Device) -> None:
        """Put an ext4 file system on the device, whatever is there.

        Raises ``ResourceError`` with the tool's own words.
        """
        try:
            finished = await self._run(["mkfs.ext4", "-F", device.path], timeout=FORMAT_LIMIT)
        except CommandError as error:
            raise ResourceError(f"{device.path} cannot be formatted: {error}") from error
        if not finished.ok:
            raise ResourceError(f"{device.path} cannot be formatted: {complaint(finished)}")

    async def _probe(self, device: Device) -> Verdict:
        argv = ["blkid", "-p", "-o", "value", "-s", "TYPE", device.path]
        try:
            return judge(await self._run(argv, timeout=PROBE_LIMIT))
        except CommandError as error:
            return Verdict(f"could not be examined ({error})")


def why_not_blank(path: str) -> str:
    """What speaks against formatting a device that looks blank, "" if nothing. Blocking."""
    try:
        # O_EXCL on a block device: refused while it is mounted, part of a RAID or LVM, or
        # being formatted, here or by a command that a killed shim has left behind.
        file = os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
        try:
            size = os.lseek(file, 0, os.SEEK_END)
            ends = ((0, min(HEAD, size)), (max(0, size - TAIL), min(TAIL, size)))
            whole = all(_reads(file, offset, length) for offset, length in ends)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return "is in use"
        return f"cannot be read: {error.strerror}"
    return "" if whole and size else "cannot be read to its end"


def _reads(file: int, offset: int, length: int) -> bool:
    return len(os.pread(file, length, offset)) == length


def complaint(finished: Finished) -> str:
    """How a command failed, with all it said: ``mount`` says the cause first, not last."""
    words = " ".join((finished.err or finished.out).split())
    how = finished.failure.partition(":")[0]
    return f"{how}: {words}" if words else how
