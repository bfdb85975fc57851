"""Disks, file systems and mounts that exist only in memory, behind the commands of the host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define
from dstack_shim_contracts.api import VolumeInfo

from dstack_shim.errors import CommandMissing
from dstack_shim.host.commands import MAX_OUTPUT, Finished
from dstack_shim.resources import devices, filesystem
from dstack_shim.resources.devices import HostFiles, Timing
from dstack_shim.resources.volumes import Volumes
from tests.shim.resources.stage import Clock, Log

ANSWERS = {
    "blank": Finished(2),
    "table": Finished(0),
    "ambivalent": Finished(8, "", "ambivalent result"),
}


@define
class Disk:
    content: str = "blank"
    root_mode: int = 0o755
    formatted: int = 0


class Disks:
    """A host with disks ``sda``, ``sdb`` … attached as GCP does it, and a tree to mount in."""

    def __init__(self, root: Path, **disks: str) -> None:
        self.root = root / "volumes"
        self.proc = root / "proc"
        (root / "dev" / "disk" / "by-id").mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        self.dev = root / "dev"
        self.disks: dict[str, Disk] = {}
        self.mounted: list[tuple[str, str]] = []  # device, point
        self.faults: dict[str, Finished | BaseException] = {}
        self.before: dict[str, Callable[[], Any]] = {}
        self.unreadable = ""  # what speaks against formatting any of them
        self.asked: list[tuple[str, ...]] = []
        self.clock = Clock()
        self.log = Log()
        for name, content in disks.items():
            self.attach(name, content)
        self._write()

    def attach(self, name: str, content: str) -> None:
        path = self.dev / name
        path.touch()
        (self.dev / "disk" / "by-id" / f"google-{name}").symlink_to(path)
        self.disks[str(path)] = Disk(content)

    def adapter(self) -> Volumes:
        """A new one, as after a restart."""
        return Volumes(
            self.run,
            self.blocking,
            self.log.events,
            root=str(self.root),
            files=HostFiles(str(self.dev), str(self.dev / "none")),
            timing=Timing(self.clock.sleep, self.clock.now),
            proc=str(self.proc),
        )

    def at(self, name: str) -> list[str]:
        """Devices mounted for the volume ``name``, by their names."""
        point = str(self.root / name)
        return [Path(device).name for device, where in self.mounted if where == point]

    def mount(self, disk: str, name: str) -> None:
        """As an administrator would."""
        self.mounted.append((str(self.dev / disk), str(self.root / name)))
        self._write()

    def programs(self) -> list[str]:
        return [argv[0] for argv in self.asked]

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> Finished:
        self.asked.append(tuple(argv))
        await asyncio.sleep(0)  # where another task may get in between
        program = argv[0]
        if before := self.before.pop(program, None):
            result = before()
            if result is not None:
                await result
        fault = self.faults.get(program)
        if isinstance(fault, BaseException):
            raise fault
        answers: dict[str, Callable[..., Finished]] = {
            "blkid": self._blkid,
            "mkfs.ext4": self._mkfs,
            "mount": self._mount,
            "umount": self._umount,
        }
        if program not in answers:
            raise CommandMissing(f"{program} cannot be run")
        return fault or answers[program](*argv[1:])

    async def blocking(self, call: Callable[..., Any], /, *args: object) -> Any:
        await asyncio.sleep(0)
        if call is filesystem.why_not_blank:
            return self.unreadable
        if call is devices.why_not_ready:
            return ""
        if call is devices.device_number:
            return (8, sorted(self.disks).index(str(args[0])))
        return call(*args)

    def _blkid(self, *arguments: str) -> Finished:
        content = self.disks[arguments[-1]].content
        return ANSWERS.get(content, Finished(0, content + "\n"))

    def _mkfs(self, force: str, device: str) -> Finished:
        disk = self.disks[device]
        if any(device == mounted for mounted, _ in self.mounted):
            return Finished(1, "", f"{device} is mounted; will not make a filesystem here!")
        disk.content, disk.root_mode = "ext4", 0o755
        disk.formatted += 1
        return Finished(0)

    def _mount(self, device: str, point: str) -> Finished:
        if self.disks[device].content in ANSWERS:
            return Finished(32, "", f"mount: {point}: wrong fs type.\n  dmesg(1) may know.\n")
        self.mounted.append((device, point))
        self._write()
        return Finished(0)

    def _umount(self, options: str, point: str) -> Finished:
        for number, (_, where) in reversed(list(enumerate(self.mounted))):
            if where == point:
                del self.mounted[number]
                self._write()
                return Finished(0)
        return Finished(32)

    def _write(self) -> None:
        numbers = {device: number for number, device in enumerate(sorted(self.disks))}
        lines = [
            f"60 1 8:{numbers.get(device, 99)} / {_escaped(point)} rw - ext4 {device} rw\n"
            for device, point in self.mounted
        ]
        (self.proc / "self" / "mountinfo").write_text("".join(lines), encoding="utf-8")


def _escaped(path: str) -> str:
    return path.replace("\\", "\\134").replace(" ", "\\040")


def volume(name: str, disk: str = "sda", *, init_fs: bool = True, id: str = "1") -> VolumeInfo:
    return VolumeInfo("gcp", name, id, init_fs=init_fs, device_name=disk)
