"""The shim's own files: the one at the path, and those that are kept beside it.

``.dstack-shim.next`` was proved and waits, ``.dstack-shim.previous`` was replaced by the one at the
path, ``.dstack-shim.running`` is a copy of what runs. The path itself only ever changes by a rename
of a whole file over it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dstack_shim_contracts.api import SHIM

from dstack_shim import build
from dstack_shim.components import Target
from dstack_shim.installed import FileIdentity
from dstack_shim.log import EventLog
from dstack_shim.staged import StagedFile, file_digest, flush_directory, sweep


def shim_target(path: Path, *, takes_over: bool) -> Target:
    """Where the shim's file goes.

    It waits beside the path only if this process runs from the path, or takes over and will:
    elsewhere (an installation, a path named by a flag) there is no file to go back to.
    """
    own = build.own_file()
    runs_from_it = takes_over or (own is not None and path.exists() and own.samefile(path))
    return Target(SHIM, path, _beside(path, "next") if runs_from_it else None)


class ShimFiles:
    """Those of one running shim."""

    def __init__(self, target: Target, log: EventLog) -> None:
        self.path = target.path
        self.waiting = target.waiting
        self._log = log
        self._running = FileIdentity.of(target.path)

    @property
    def content(self) -> str:
        """Tells the file at the path from another; "" if there was none."""
        return self._running.content if self._running is not None else ""

    def is_at_path(self, sha256: str) -> bool:
        """Whether the file at the path has this content."""
        return _has(self.path, sha256)

    def was_replaced_by_hand(self) -> bool:
        """Whether what lies at the path is not what this process runs from."""
        there = FileIdentity.of(self.path)
        return there is None or there.content != self.content

    def tidy(self) -> None:
        """Remove what crashes have left."""
        for what in ("previous", "running"):
            sweep(_beside(self.path, what))

    def take_place(self) -> None:
        """Put the waiting file, which this process runs from, at the path.

        Raises ``OSError``: the file at the path is still the old one.
        """
        self._place()
        self._running = FileIdentity.of(self.path)

    def place_for_supervisor(self) -> None:
        """Put the waiting file at the path, for whoever starts it next.

        Raises ``OSError``: the file at the path is still the old one.
        """
        self._place()
        self._log.info("upgrade.placed", path=self.path)

    def restore_previous(self, sha256: str) -> bool:
        """Put the file before this one back, if that is what is kept; whether it was.

        Raises ``OSError``: the file at the path is still this one.
        """
        previous = _beside(self.path, "previous")
        if not _has(previous, sha256):
            return False
        previous.rename(self.path)
        flush_directory(self.path.parent)
        return True

    def discard_waiting(self) -> None:
        """Take the waiting file away."""
        try:
            if self.waiting is not None:
                self.waiting.unlink(missing_ok=True)
        except OSError as error:
            self._log.warning("upgrade.file_not_removed", path=self.waiting, error=error)

    def keep_previous(self) -> None:
        """Keep the file before the next one: what lies at the path, or, where that was replaced
        by hand, the copy of what this process runs from.
        """
        running = _beside(self.path, "running")
        by_hand = self.was_replaced_by_hand() and running.exists()
        self._keep(running if by_hand else self.path, "previous", os.link)

    def keep_running(self) -> None:
        """Copy the file that this process runs from: a link would not survive that somebody
        writes over it in place.
        """
        copy, wanted = FileIdentity.of(_beside(self.path, "running")), FileIdentity.of(self.path)
        if self.waiting is None or wanted is None or self.was_replaced_by_hand():
            return
        if copy is None or (copy.size, copy.modified) != (wanted.size, wanted.modified):
            self._keep(self.path, "running", shutil.copy2)

    def _place(self) -> None:
        assert self.waiting is not None
        self.keep_previous()
        self.waiting.rename(self.path)
        flush_directory(self.path.parent)

    def _keep(self, file: Path, what: str, link: Callable[[Path, Path], object]) -> None:
        kept = _beside(self.path, what)
        sweep(kept)
        try:
            with StagedFile(kept) as staged:
                staged.path.unlink()
                try:
                    link(file, staged.path)
                except OSError:  # a file system without links
                    shutil.copy2(file, staged.path)
                staged.place(flush=what == "previous")
        except OSError as error:
            # It cannot be gone back to later, but the one that runs serves.
            self._log.warning("upgrade.file_not_kept", kept=kept, error=error)


def _has(path: Path, sha256: str) -> bool:
    try:
        return file_digest(path) == sha256
    except OSError:
        return False


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")
