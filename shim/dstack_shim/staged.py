"""A program file that is written beside the path it may take, and is gone unless it takes it."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from types import TracebackType

MODE = 0o755  # containers of any user execute the runner

_SUFFIX = ".new"
_BLOCK = 1 << 20


class StagedFile:
    """A new file in the directory of ``destination``; a context that leaves nothing behind.

    While it exists it is locked, which is how :func:`sweep` tells one that is being written
    from one a crash has left.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.path = destination.with_name(f".{destination.name}.{secrets.token_hex(8)}{_SUFFIX}")
        self._lock = -1

    def __enter__(self) -> StagedFile:  # noqa: PYI034 - typing.Self came with Python 3.11
        """Create the file, empty.

        Raises:
            OSError: the directory is missing or cannot be written to.
        """
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        # Locked through a descriptor that cannot write: one that can would keep the file from
        # being executed.
        self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks: then sweep cannot lock either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the file unless it was placed."""
        with suppress(OSError):
            self.path.unlink()
        os.close(self._lock)

    def fill(self, content: bytes, *, flush: bool = True) -> None:
        """Write the whole content.

        Raises:
            OSError: not all of it was taken, or is on disk.
        """
        with self.path.open("r+b") as file:
            file.write(content)
            file.flush()
            if flush:
                os.fsync(file.fileno())

    def place(self, *, flush: bool = True) -> None:
        """Give the file its name, durably; what had the name is replaced at once.

        Whoever has the old file open (a running task its runner) keeps it. Without ``flush`` a
        power cut may bring back what had the name.

        Raises:
            OSError: the name cannot be taken; the old file is in place.
        """
        self.path.rename(self.destination)
        if flush:
            flush_directory(self.destination.parent)


def sweep(destination: Path) -> list[Path]:
    """Remove what crashes have left beside ``destination``; return what was removed."""
    swept: list[Path] = []
    with suppress(OSError):
        for path in destination.parent.glob(f".{glob.escape(destination.name)}.*{_SUFFIX}"):
            if _is_abandoned(path):
                with suppress(OSError):
                    path.unlink()
                    swept.append(path)
    return swept


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in lower-case hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def flush_directory(directory: Path) -> None:
    """Make a rename in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
