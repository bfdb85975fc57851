"""The instance a shim is judged on: devices, users and tools that exist only in here.

The run is inside the sandbox (``tests/lab/sandbox``): a device node, a user or a mount of a case
is seen by the shim and its engine, and by nobody else.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_USERS = ("alice", "bob", "carol")

VOLUMES = Path("/mnt/disks/dstack-volumes")


def command(*argv: str | Path, stdin: str | None = None) -> str:
    """Run a tool of the host and return what it printed; a failure is the case's own."""
    done = subprocess.run(
        [str(word) for word in argv],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{argv}: {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class Instance:
    """Users, device nodes, and a folder of stand-in tools first on the shim's PATH."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tools = root / "tools"
        self.homes = Path("/run/lab/users")
        for folder in (self.tools, self.homes):
            folder.mkdir(parents=True, exist_ok=True)
        VOLUMES.parent.mkdir(parents=True, exist_ok=True)
        self._add_users()

    @property
    def path(self) -> str:
        """The PATH of the shim: stand-ins first, then the host's own."""
        return f"{self.tools}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def tool(self, name: str, script: str) -> Path:
        """Put a shell script on the shim's PATH, replacing one of that name."""
        file = self.tools / name
        partial = file.with_name(f".{name}")
        partial.write_text(f"#!/bin/sh\n{script}\n")
        partial.chmod(0o755)
        partial.rename(file)
        return file

    @contextmanager
    def tools_for_a_while(self, **scripts: str) -> Iterator[None]:
        """Stand-ins (underscores in names become dashes) that go again."""
        names = {name.replace("_", "-"): script for name, script in scripts.items()}
        for name, script in names.items():
            self.tool(name, script)
        try:
            yield
        finally:
            for name in names:
                (self.tools / name).unlink()

    @contextmanager
    def devices(self, *paths: str) -> Iterator[None]:
        """Character nodes that behave as /dev/null; a path that ends in / is a folder."""
        made: list[Path] = []
        try:
            for path in paths:
                made += _missing_folders(path)
                if path.endswith("/"):
                    continue
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
                made.append(Path(path))
            yield
        finally:
            for place in reversed(made):
                place.rmdir() if place.is_dir() else place.unlink()

    @contextmanager
    def without(self, *paths: str) -> Iterator[None]:
        """For a while, these devices or folders have other names."""
        for path in paths:
            Path(path).rename(f"{path}.away")
        try:
            yield
        finally:
            for path in paths:
                Path(f"{path}.away").rename(path)

    def user(self, name: str) -> Path:
        """The home directory of one of the instance's users (``alice``, ``bob``, ``carol``)."""
        return self.homes / name

    def forget_user_files(self, name: str) -> None:
        """The user's home as it was at first: empty, the user's own."""
        home = self.user(name)
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        home.chmod(0o755)
        os.chown(home, *self.ids(name))

    def ids(self, name: str) -> tuple[int, int]:
        number = 2001 + _USERS.index(name)
        return number, number

    def _add_users(self) -> None:
        if (self.homes / _USERS[0]).exists():  # by the run this one is inside of
            return
        with Path("/etc/passwd").open("a", encoding="utf-8") as file:
            for name in _USERS:
                uid, gid = self.ids(name)
                file.write(f"{name}:x:{uid}:{gid}::{self.user(name)}:/bin/sh\n")
                self.forget_user_files(name)

    @contextmanager
    def covered(self, folder: str) -> Iterator[None]:
        """For a while, an empty folder lies over this one of the host."""
        command("mount", "-t", "tmpfs", "tmpfs", folder)
        try:
            yield
        finally:
            command("umount", "--lazy", folder)

    @contextmanager
    def copy_on_write(self, folder: str) -> Iterator[None]:
        """For a while, what is written below this folder of the host goes nowhere."""
        layer = Path(tempfile.mkdtemp(dir="/run/lab"))
        for name in ("upper", "work"):
            (layer / name).mkdir()
        options = f"lowerdir={folder},upperdir={layer}/upper,workdir={layer}/work"
        command("mount", "-t", "overlay", "-o", options, "overlay", folder)
        try:
            yield
        finally:
            command("umount", "--lazy", folder)


def mounts_below(folder: Path) -> list[str]:
    """Mount points below a folder, as the kernel has them."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    points = [line.split()[4] for line in lines]
    return [point for point in points if point.startswith(f"{folder}/")]


def _missing_folders(path: str) -> list[Path]:
    """Make the folders on the way to a node, or up to a path that ends in /."""
    wanted = Path(path) if path.endswith("/") else Path(path).parent
    made: list[Path] = []
    for folder in [*reversed(wanted.parents), wanted]:
        if not folder.exists():
            folder.mkdir()
            made.append(folder)
    return made
