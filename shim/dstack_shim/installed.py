"""What a program file on disk says it is: its version by running it, its features by reading it.

Only ``--version`` is ever executed: dstack's own shim ignores words it does not know and
starts as a daemon.
"""

from __future__ import annotations

import asyncio
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from attrs import frozen
from dstack_shim_contracts.api import SHIM
from dstack_shim_contracts.errors import BodyError
from dstack_shim_contracts.features import (
    FEATURE_DOCUMENT_NAME,
    FeatureDocument,
    read_feature_document,
)

from dstack_shim.errors import CommandError, ComponentError
from dstack_shim.host.commands import Runner

QUICK = 4.0
"""Limit in s where a request waits for the answer: clients give up after 9 s."""

PATIENT = 30.0
"""Limit in s where nobody waits: a host that has just booted may be slow."""

_REMEMBER_FAILURE = 60.0  # s: a file that hangs is not run again at every request
_MAX_VERSION = 128  # characters
_MAX_DOCUMENT = 1 << 16  # bytes
_ATTEMPTS = 3  # to read a file that is being replaced


@frozen
class FileIdentity:
    """Tells two contents of one path apart without reading them."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @property
    def content(self) -> str:
        """Tells two contents apart; the same after a change of name, mode or owner, and after a
        reboot that gives the disk another number.
        """
        return f"{self.inode}:{self.size}:{self.modified}"

    @classmethod
    def of(cls, path: Path) -> FileIdentity | None:
        """Look at the file; None if there is none."""
        try:
            status = path.stat()
        except OSError:
            return None
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


@frozen
class ProgramFile:
    """What a file says of itself.

    ``version`` is "" when it does not tell (``problem`` says why); ``features`` is None when
    they are not known, and ``lists_features`` is false for a file of a kind that has none to
    list: dstack's own shim is no archive.
    """

    version: str = ""
    features: tuple[str, ...] | None = None
    lists_features: bool = True
    problem: str = ""


async def read_version(run: Runner, path: Path, name: str, *, timeout: float) -> str:
    """Ask the program for its version: it must print ``<name> <a word> <version>``.

    Raises:
        ComponentError: it cannot be run, fails, takes too long or prints something else.
    """
    try:
        finished = await run([str(path), "--version"], timeout=timeout)
    except CommandError as error:
        raise ComponentError(f"{name}: {error}") from error
    if not finished.ok:
        raise ComponentError(f"{name}: --version {finished.failure}")
    words = finished.out.split()
    if len(words) != 3 or words[0] != name:
        raise ComponentError(
            f"{name}: --version printed {finished.out[:80]!r}, expected '{name} version X'"
        )
    if len(words[2]) > _MAX_VERSION or not words[2].isprintable():
        raise ComponentError(f"{name}: --version printed no usable version")
    return words[2]


def read_features(path: Path, version: str) -> tuple[str, ...] | None:
    """Return the features a shim file lists in its document, without executing it.

    None if there is no sound document, or if it belongs to another version than the file
    reports: then it says nothing about this file.
    """
    document = read_document(path)
    return document.features if document is not None and document.version == version else None


def read_document(path: Path) -> FeatureDocument | None:
    """Return what a shim file says of itself, without executing it; None if it says nothing."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(FEATURE_DOCUMENT_NAME) as member:
            raw = member.read(_MAX_DOCUMENT + 1)
        if len(raw) > _MAX_DOCUMENT:
            return None
        return read_feature_document(raw)
    except (
        OSError,
        BodyError,
        KeyError,  # no such member
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,  # a compression or version unknown to zipfile
        RuntimeError,  # encrypted
        ValueError,  # offsets that make no sense, names that are no text
        OverflowError,
    ):
        return None


class ProgramReader:
    """Reads one component's file, and again only when the file has changed."""

    def __init__(
        self, name: str, run: Runner, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._run = run
        self._monotonic = monotonic
        self._lock = asyncio.Lock()
        self._known: tuple[Path, FileIdentity] | None = None
        self._file = ProgramFile()
        self._forget_at = float("inf")

    async def read(self, path: Path, *, timeout: float = QUICK) -> ProgramFile | None:
        """Return what the file at ``path`` says of itself, None if there is no file."""
        async with self._lock:  # two requests at once run the file once
            identity = FileIdentity.of(path)
            for _ in range(_ATTEMPTS):
                if identity is None:
                    return None
                if self._known == (path, identity) and self._monotonic() < self._forget_at:
                    return self._file
                file = await self._read(path, timeout)
                before, identity = identity, FileIdentity.of(path)
                if identity == before:
                    self._remember(path, before, file)
                    return file
            return ProgramFile(problem=f"{self._name}: the file keeps changing")

    async def _read(self, path: Path, timeout: float) -> ProgramFile:
        try:
            version = await read_version(self._run, path, self._name, timeout=timeout)
        except ComponentError as error:
            return ProgramFile(problem=str(error))
        if self._name != SHIM:
            return ProgramFile(version)
        if not await asyncio.to_thread(zipfile.is_zipfile, path):
            return ProgramFile(version, lists_features=False)
        return ProgramFile(version, await asyncio.to_thread(read_features, path, version))

    def _remember(self, path: Path, identity: FileIdentity, file: ProgramFile) -> None:
        self._known = (path, identity)
        self._file = file
        self._forget_at = self._monotonic() + _REMEMBER_FAILURE if file.problem else float("inf")
