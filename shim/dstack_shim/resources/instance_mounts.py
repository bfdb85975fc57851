"""Directories of the host that tasks mount: made if missing, then left alone for ever.

They are the user's data. Nothing is ever removed, so there is nothing to give back or count.
"""

from __future__ import annotations

import os
from pathlib import Path

from dstack_shim.errors import ResourceError
from dstack_shim.resources.protocol import Blocking, Claim, Others


class InstanceMounts:
    """Sources of the tasks' instance mounts."""

    name = "instance_mounts"

    def __init__(self, blocking: Blocking) -> None:
        self._blocking = blocking

    async def acquire(self, record: Claim, others: Others) -> None:
        """See to it that each source exists: what is missing becomes a directory, 0777.

        Raises ``ResourceError`` naming the path.
        """
        del others
        for mount in record.config.instance_mounts:
            await self._blocking(make_source, mount.instance_path)

    async def release(self, record: Claim, others: Others) -> None:
        """Nothing: the directories stay."""


def make_source(path: str) -> None:
    """Make the directory ``path`` with mode 0777, its missing parents 0755. Blocking.

    Whatever exists is left as it is, a file too. Symlinks are followed where they lead
    somewhere, as the engine does when it mounts the path.

    Raises ``ResourceError`` naming the path.
    """
    if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ResourceError(f"instance_path: {path!r}; expected an absolute path without ..")
    parts = [part for part in path.split("/") if part not in {"", "."}]
    try:
        if not Path(path).exists():
            _make(parts)
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path of this host"
        raise ResourceError(f"instance_path: {path!r} cannot be made: {reason}") from error


def _make(parts: list[str]) -> None:
    """Walk down through open directories, making what is missing."""
    directory = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, part in enumerate(parts, start=1):
            mode = 0o777 if number == len(parts) else 0o755
            below = _enter(directory, part, mode)
            os.close(directory)
            directory = below
    finally:
        os.close(directory)


def _enter(directory: int, name: str, mode: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        pass
    try:
        os.mkdir(name, mode, dir_fd=directory)
    except FileExistsError:
        # Made by another task this instant; or a symlink to nowhere, which stays an error.
        return os.open(name, flags, dir_fd=directory)
    made = os.open(name, flags | os.O_NOFOLLOW, dir_fd=directory)
    # The umask has cut the mode. A crash just here leaves a directory that only root writes;
    # changing the umask instead would change it under every thread of the process.
    os.fchmod(made, mode)
    return made
