"""Root writes a file in the home of a user who may be hostile. Blocking.

The user may log in while this runs, and can rename, link and replace whatever lies below the
home. So every step goes from one open directory to the next and follows no symlink; a name is
only ever given to a file that was written through its own descriptor; and nothing that the
user put in the way is written to, it is refused by name. The home itself is where the
account's entry says, symlinks on the way included: that entry is the administrator's.

A crash leaves either the old file or the new one, and at most a temporary file, which the next
call removes.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import frozen

from dstack_shim.errors import ResourceError
from dstack_shim.resources.ssh_keys import Merged

MAX_BYTES = 4 << 20
"""A file longer than this is refused: it is read into memory as a whole, by root."""

_FILE = "authorized_keys"
_TEMPORARY = f".{_FILE}.dstack-shim-"  # + process id - random
_TRIES = 5
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY

# Tied to the old file's own bytes or meant for programs: never carried over.
_BOUND_XATTRS = frozenset({"security.capability", "security.evm", "security.ima"})

Change = Callable[[bytes], Merged]


@frozen
class Account:
    """A user of this host: name, ids and home directory."""

    name: str
    uid: int
    gid: int
    home: str


@frozen
class _Existing:
    content: bytes
    status: os.stat_result
    xattrs: dict[str, bytes]


def update(account: Account, change: Change) -> Merged:
    """Replace the account's ``authorized_keys`` by what ``change`` makes of it, durably.

    Owner, mode and extended attributes of an existing file are kept; a missing file or
    ``.ssh`` is made, 0600 in 0700, the user's own. ``change`` gets empty bytes for a missing
    file and may be called again when somebody else writes meanwhile. What is unchanged is not
    written.

    Raises ``ResourceError`` naming the path.
    """
    with _as_resource_error(account):
        return _update(account, change)


def read(account: Account) -> bytes:
    """The account's ``authorized_keys``, empty if there is none.

    Raises ``ResourceError`` naming the path.
    """
    with _as_resource_error(account), _home(account) as home, _ssh(account, home) as directory:
        existing = None if directory is None else _existing(account, directory)
        return b"" if existing is None else existing.content


def _update(account: Account, change: Change) -> Merged:
    with _home(account) as home:
        with _ssh(account, home) as directory:
            if directory is not None:
                return _update_in(account, directory, change)
        merged = change(b"")
        if not merged.content:
            return merged
        if home is None:
            raise ResourceError(f"{account.home}: the home of {account.name} does not exist")
        _make_ssh(home)
        with _ssh(account, home) as directory:
            if directory is None:
                raise ResourceError(f"{_path(account)}: removed while it was being made")
            return _update_in(account, directory, change)


def _update_in(account: Account, directory: int, change: Change) -> Merged:
    _remove_leftovers(directory)
    for _ in range(_TRIES):
        existing = _existing(account, directory)
        merged = change(b"" if existing is None else existing.content)
        if merged.content == (b"" if existing is None else existing.content):
            # Perhaps renamed by a process that was killed before it flushed the directory.
            os.fsync(directory)
            return merged
        if len(merged.content) > MAX_BYTES:
            raise ResourceError(f"{_path(account)}: would be longer than {MAX_BYTES} bytes")
        if _replace(account, directory, existing, merged.content):
            return merged
    raise ResourceError(f"{_path(account)}: somebody else keeps writing it")


def _replace(account: Account, directory: int, existing: _Existing | None, content: bytes) -> bool:
    """Put a new file in place, unless the old one has changed since it was read."""
    temporary = f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(16)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        try:
            _fill(account, file, existing, content)
        finally:
            os.close(file)
        # A server appends its own key with >>; a line of theirs is not ours to lose.
        unchanged = _status(directory) == (None if existing is None else _key(existing.status))
        if unchanged:
            os.rename(temporary, _FILE, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)
    except BaseException:
        _unlink(directory, temporary)
        raise
    if not unchanged:
        _unlink(directory, temporary)
    return unchanged


def _fill(account: Account, file: int, existing: _Existing | None, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    if existing is None:
        os.fchown(file, account.uid, account.gid)
    else:
        os.fchown(file, existing.status.st_uid, existing.status.st_gid)
        # Without set-uid and set-gid: the user may have linked a program here.
        os.fchmod(file, existing.status.st_mode & 0o777)
        for name, value in existing.xattrs.items():
            os.setxattr(file, name, value)
    os.fsync(file)


def _existing(account: Account, directory: int) -> _Existing | None:
    path = f"{_path(account)}/{_FILE}"
    with _opened(path, _OPEN, directory) as file:
        if file is None:
            return None
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ResourceError(f"{path}: is not a regular file")
        content = _read(file, MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ResourceError(f"{path}: longer than {MAX_BYTES} bytes")
        return _Existing(content, status, _xattrs(file))


def _read(file: int, limit: int) -> bytes:
    content = bytearray()
    while chunk := os.read(file, min(limit - len(content), 1 << 16)):
        content += chunk
    return bytes(content)


def _xattrs(file: int) -> dict[str, bytes]:
    try:
        names = os.listxattr(file)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise
    return {name: os.getxattr(file, name) for name in names if name not in _BOUND_XATTRS}


@contextmanager
def _home(account: Account) -> Iterator[int | None]:
    """The open home directory; None if it does not exist."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with _opened(account.home, flags) as home:
        if home is not None:
            _check_owner(account, home, account.home)
        yield home


@contextmanager
def _ssh(account: Account, home: int | None) -> Iterator[int | None]:
    """The open ``.ssh``; None if it, or the home, does not exist."""
    if home is None:
        yield None
        return
    with _opened(_path(account), _OPEN | os.O_DIRECTORY, home) as directory:
        if directory is not None:
            status = _check_owner(account, directory, _path(account))
            if status.st_uid != account.uid and not _names(directory):
                # Ours, from a crash between its making and this: sshd would not enter it.
                os.fchown(directory, account.uid, account.gid)
        yield directory


@contextmanager
def _opened(path: str, flags: int, directory: int | None = None) -> Iterator[int | None]:
    """The open file; None if there is none. Below ``directory`` only the last name counts."""
    name = path if directory is None else path.rpartition("/")[2]
    try:
        file = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        file = None
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            message = f"{path}: a symbolic link, or something of another kind, is in its place"
            raise ResourceError(message) from error
        raise
    try:
        yield file
    finally:
        if file is not None:
            os.close(file)


def _make_ssh(home: int) -> None:
    # Under its final name at once: SELinux policies give .ssh its context by that name. Opened
    # again by the caller, like any that was there before, and only then given to the user.
    with suppress(FileExistsError):
        os.mkdir(".ssh", 0o700, dir_fd=home)
    os.fsync(home)


def _check_owner(account: Account, directory: int, path: str) -> os.stat_result:
    status = os.fstat(directory)
    if status.st_uid not in {0, account.uid}:
        raise ResourceError(f"{path}: belongs neither to {account.name} nor to root")
    return status


def _remove_leftovers(directory: int) -> None:
    for name in _names(directory):
        if name.startswith(_TEMPORARY) and _is_leftover(name):
            _unlink(directory, name)


def _names(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries]


def _is_leftover(name: str) -> bool:
    # Our own from before an exec, or of a process that is gone; not of another shim at work.
    process = name.removeprefix(_TEMPORARY).partition("-")[0]
    return process == str(os.getpid()) or not Path("/proc", process).exists()


def _unlink(directory: int, name: str) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=directory)


def _status(directory: int) -> tuple[int, ...] | None:
    try:
        return _key(os.stat(_FILE, dir_fd=directory, follow_symlinks=False))
    except FileNotFoundError:
        return None


def _key(status: os.stat_result) -> tuple[int, ...]:
    # ctime changes with every write, chmod and chown, and nobody can set it back.
    return (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


def _path(account: Account) -> str:
    return f"{account.home}/.ssh"


@contextmanager
def _as_resource_error(account: Account) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{_path(account)}/{_FILE}: {error.strerror}") from error
