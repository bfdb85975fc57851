"""The shim's home directory and the lock that keeps a second shim off it."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from dstack_shim.errors import HomeLocked, StartupError

LOCK = "dstack-shim.lock"


def check_home(home: Path) -> Path:
    """The home as an absolute path: it becomes a label, and part of mounts, as it was given.

    Raises ``StartupError`` if it is no directory; it is never created here.
    """
    if not home.is_dir():
        raise StartupError(f"--shim-home: {home} is not a directory")
    return home.absolute()


def lock_home(home: Path) -> int:
    """Lock the home for as long as the returned descriptor, or a copy of it, is open.

    The lock belongs to the open file, so it survives ``execve`` if the descriptor does.

    Raises ``HomeLocked`` naming who holds it, ``StartupError``.
    """
    path = home / LOCK
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise StartupError(f"cannot open {path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(fd, 32).decode("ascii", "replace").strip()
        os.close(fd)
        if error.errno == errno.EWOULDBLOCK:
            raise HomeLocked(f"another shim (pid {holder}) runs on {home}") from error
        raise StartupError(f"cannot lock {path}: {error.strerror}") from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def holder(home: Path) -> int | None:
    """The process id of the shim that holds the lock, None if nobody does; takes no lock.

    Asked of the kernel, since the number in the file outlives a shim that was killed.

    Raises ``StartupError`` if it cannot be told, for want of permission say.
    """
    path = home / LOCK
    try:
        text = path.read_bytes()[:32].decode("ascii", "replace").strip()
        if not text.isdecimal():
            return None
        return int(text) if _is_locked_by(int(text), path) else None
    except (FileNotFoundError, ProcessLookupError):
        return None  # there is no such file, or no such process any more
    except OSError as error:
        raise StartupError(f"cannot tell who holds {path}: {error.strerror}") from error


def _is_locked_by(pid: int, path: Path) -> bool:
    for opened in Path("/proc", str(pid), "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if opened.samefile(path):
                # A "lock:" line stands there for each lock of the open file, see proc(5).
                return "FLOCK" in (opened.parents[1] / "fdinfo" / opened.name).read_text()
    return False
