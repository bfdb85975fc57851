"""The durable records: the only code that writes below ``<home>/runners``.

A record is replaced by writing a new file, flushing it, renaming it over the old one and
flushing the directory; a directory appears under its name only with its record inside. So a
power cut at any instant leaves the old record or the new one, and an acknowledged task is
never lost. A flush that failed is never tried again on the same file: the kernel may have
dropped the pages and would answer "done".

Task directories can be the job's own (layouts before 0.21.4 mount the whole directory into the
container), so nothing here follows a symlink or opens what is not a plain file.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dstack_shim_contracts.errors import DamagedRecord, RecordError, RecordTooLarge
from dstack_shim_contracts.record import (
    MAX_RECORD_BYTES,
    TaskRecord,
    read_record,
    write_record,
)

from dstack_shim.errors import StoreError
from dstack_shim.log import EventLog
from dstack_shim.records import FoundDir, RecordKind

RECORD = "task.json"
_TEMPORARY = "task.json.tmp"
_DAMAGED = ".task.json.damaged-"
_NEW = ".new-"
_TRASH = ".trash-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: a FIFO in a file's place must not hang the start.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Store:
    """The records below one home. Every method blocks; every error is a ``StoreError``."""

    def __init__(self, home: Path, log: EventLog) -> None:
        self._runners = home / "runners"
        self._log = log

    def path(self, dir: str) -> Path:
        """Where the task directory ``dir`` is."""
        return self._runners / dir

    def runner_dir(self, dir: str) -> Path:
        """What is mounted into the task's container as /tmp/runner."""
        return self._runners / dir / "runner"

    def open(self) -> None:
        """Make ``runners/`` if it is missing and sweep what crashes left half made or half gone."""
        with _as_store_error("open", self._runners):
            self._runners.mkdir(mode=0o755, exist_ok=True)
            _flush_directory(self._runners.parent)
            for entry in sorted(self._runners.iterdir()):
                if entry.name.startswith((_NEW, _TRASH)):
                    self._delete(entry)

    def scan(self) -> tuple[FoundDir, ...]:
        """Every task directory, in directory order; one broken directory never hides another.

        What is read is certain to survive a power cut: a crash may have come between a rename
        and its flush, and what a restarted shim answers rests on what it reads here.
        """
        found = []
        for name in self._names():
            found.append(self._found(name))
            if found[-1].kind is RecordKind.GOOD:
                self._make_certain(self._runners / name)
        if os.path.lexists(self._runners):
            self._make_certain(self._runners)
        return tuple(found)

    def glance(self) -> tuple[FoundDir, ...]:
        """The same for who only looks, beside a running shim too: nothing is flushed for it."""
        return tuple(self._found(name) for name in self._names())

    def set_aside_before(self) -> tuple[str, ...]:
        """The damaged records that were set aside and nobody has looked at: directory/name."""
        with _as_store_error("list", self._runners):
            return tuple(
                f"{path.parent.name}/{path.name}"
                for path in sorted(self._runners.glob(f"*/{_DAMAGED}*"))
            )

    def create(self, dir: str, record: TaskRecord) -> None:
        """Make the task directory with its record and ``runner/``, flushed; nothing on an error.

        A directory that is there already (an attempt before records existed, or one whose
        record was set aside) keeps what it has. A record that is there is an error: nobody made
        a task of it, so it is of a newer shim or could not be set aside.
        """
        with _as_store_error("create", self._runners / dir):
            if os.path.lexists(self._runners / dir):
                return self._create_in_place(dir, record)
            fresh = self._runners / f"{_NEW}{dir}-{time.time_ns() // 1000}"
            try:
                fresh.mkdir(mode=0o700)
                _make_runner_dir(fresh)
                _replace(fresh, RECORD, write_record(record))
                fresh.rename(self._runners / dir)
                _flush_directory(self._runners)
            except BaseException:
                # Whoever gets an error is told that nothing is left, under either name.
                self._delete(fresh)
                self._delete(self._runners / dir)
                raise
        return None

    def write(self, dir: str, record: TaskRecord) -> None:
        """Replace the record, flushed."""
        with _as_store_error("write", self._runners / dir / RECORD):
            _replace(self._runners / dir, RECORD, write_record(record))

    def forget(self, dir: str) -> None:
        """Take the task directory away, flushed; not there is fine.

        It leaves its name in one step. What cannot be deleted stays as ``.trash-…`` and is
        tried again at the next start.
        """
        with _as_store_error("remove", self._runners / dir):
            trash = self._runners / f"{_TRASH}{dir}-{time.time_ns() // 1000}"
            with suppress(FileNotFoundError):
                (self._runners / dir).rename(trash)
            _flush_directory(self._runners)
            self._delete(trash)

    def discard_output(self, dir: str) -> None:
        """Take away what the task left in its directory; records, damaged ones too, stay."""
        with _as_store_error("empty", self._runners / dir):
            for entry in (self._runners / dir).iterdir():
                if entry.name != RECORD and not entry.name.startswith(_DAMAGED):
                    self._delete(entry)

    def set_aside(self, dir: str) -> str:
        """Rename a damaged record inside its own directory; return its new name.

        The directory itself may be mounted into a running container and must not move.
        """
        with (
            _as_store_error("set aside", self._runners / dir / RECORD),
            _opened(self._runners / dir) as fd,
        ):
            for number in range(1, 10_000):
                name = f"{_DAMAGED}{number}"
                with suppress(FileNotFoundError):
                    os.stat(name, dir_fd=fd, follow_symlinks=False)
                    continue
                os.rename(RECORD, name, src_dir_fd=fd, dst_dir_fd=fd)
                os.fsync(fd)
                return name
            raise OSError(errno.EEXIST, "10,000 damaged records are set aside here already")

    def open_pull_log(self, dir: str) -> BinaryIO:
        """The file that takes the raw stream of the task's pull, emptied."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        path = self._runners / dir
        with _as_store_error("open", path / "pull.log"), _opened(path) as fd:
            return os.fdopen(os.open("pull.log", flags, 0o600, dir_fd=fd), "wb")

    def _names(self) -> list[str]:
        if not os.path.lexists(self._runners):
            return []  # no shim has run on this home yet
        with _as_store_error("list", self._runners), os.scandir(self._runners) as entries:
            return sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            )

    def _found(self, name: str) -> FoundDir:
        try:
            raw = _read(self._runners / name, RECORD)
            if raw is None:
                return FoundDir(name, RecordKind.NONE)
            record = read_record(raw)
        except DamagedRecord as error:
            return FoundDir(name, RecordKind.DAMAGED, problem=str(error))
        except RecordError as error:
            return FoundDir(name, RecordKind.UNREADABLE, problem=str(error))
        except OSError as error:
            # Not read is not damaged: a disk error may pass, and the file is left as it is.
            return FoundDir(name, RecordKind.UNREADABLE, problem=str(error))
        return FoundDir(name, RecordKind.GOOD, record)

    def _make_certain(self, directory: Path) -> None:
        try:
            with _opened(directory) as dir_fd:
                with suppress(FileNotFoundError):
                    fd = os.open(RECORD, _READ, dir_fd=dir_fd)
                    try:
                        os.fsync(fd)
                    finally:
                        os.close(fd)
                os.fsync(dir_fd)
        except OSError as error:
            # Good as it stands, if not for certain: better known than given up.
            self._log.warning("store.flush_failed", path=directory, error=error)

    def _create_in_place(self, dir: str, record: TaskRecord) -> None:
        path = self._runners / dir
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise OSError(errno.ENOTDIR, "something that is not a directory has this name")
        if os.path.lexists(path / RECORD):
            raise OSError(errno.EEXIST, "a record that this shim cannot use is there")
        with suppress(FileExistsError):
            _make_runner_dir(path)
        try:
            _replace(path, RECORD, write_record(record))
        except BaseException:
            with suppress(OSError):
                (path / RECORD).unlink()
            raise

    def _delete(self, path: Path) -> None:
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            self._log.warning("store.delete_failed", path=path, error=error)


def _make_runner_dir(parent: Path) -> None:
    runner = parent / "runner"
    runner.mkdir()
    # The job's user, whoever it is, has to enter it, whatever our umask.
    runner.chmod(0o755)


def _read(directory: Path, name: str) -> bytes | None:
    """The file's content, None if there is none.

    Raises ``DamagedRecord`` for what is not a plain file of reasonable size.
    """
    with _opened(directory) as dir_fd:
        try:
            fd = os.open(name, _READ, dir_fd=dir_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a symlink; a socket
                raise DamagedRecord(f"{name} is not a plain file") from error
            raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedRecord(f"{name} is not a plain file")
    with os.fdopen(fd, "rb") as file:
        raw = file.read(MAX_RECORD_BYTES + 1)
    if len(raw) > MAX_RECORD_BYTES:
        raise DamagedRecord(f"{name} is larger than {MAX_RECORD_BYTES} bytes")
    return raw


def _replace(directory: Path, name: str, content: bytes) -> None:
    """Put ``content`` in the file's place in one step that survives a power cut."""
    with _opened(directory) as dir_fd:
        with suppress(FileNotFoundError):
            os.unlink(_TEMPORARY, dir_fd=dir_fd)  # a leftover of a crash
        fd = os.open(_TEMPORARY, _WRITE_NEW, 0o600, dir_fd=dir_fd)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                view = memoryview(content)
                while view:
                    view = view[file.write(view) :]
                os.fsync(fd)
            os.rename(_TEMPORARY, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(_TEMPORARY, dir_fd=dir_fd)
            raise
        os.fsync(dir_fd)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    fd = os.open(directory, _DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def _flush_directory(directory: Path) -> None:
    with _opened(directory) as fd:
        os.fsync(fd)


@contextmanager
def _as_store_error(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {what} {path}: {error.strerror or error}") from error
    except RecordTooLarge as error:
        raise StoreError(f"cannot {what} {path}: {error}") from error
