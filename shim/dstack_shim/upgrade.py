"""Being replaced in place: whether, by what, and what became of it.

A proved file waits beside the path (:class:`dstack_shim.components.Target`). A shutdown that was
not forced makes it the successor of this process, once its own check of this host satisfied the
rules of :mod:`dstack_shim.preflight`; :mod:`dstack_shim.takeover` hands over. The file at the path
stays the old one until the new one has proved itself, so that whatever dies, the supervisor starts
a file that works.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn

import attrs
from dstack_shim_contracts.api import SHIM, LastUpgrade
from dstack_shim_contracts.codec import decode
from dstack_shim_contracts.errors import BodyError
from dstack_shim_contracts.features import TAKEOVER_PROTOCOL
from dstack_shim_contracts.upgrade import (
    Attempt,
    CheckReport,
    Handover,
    Outcome,
    ShimFile,
    UpgradeState,
)

from dstack_shim import build, takeover
from dstack_shim.commands import CHECK
from dstack_shim.components import InstalledComponents, Target
from dstack_shim.errors import CommandError, UpgradeRefused
from dstack_shim.host.commands import Runner
from dstack_shim.host.gpus import GpuInventory
from dstack_shim.host.machine import boot_id
from dstack_shim.installed import FileIdentity, read_document
from dstack_shim.log import EventLog
from dstack_shim.preflight import KnownTask, objection
from dstack_shim.staged import StagedFile, file_digest, flush_directory, sweep
from dstack_shim.takeover import Possessions
from dstack_shim.upgrade_state import UpgradeFile

CHECK_LIMIT = 30.0
"""Seconds the new file's check may take: hundreds of records on a busy host."""

CHECK_OUTPUT = 8 << 20
"""Bytes its report may have."""

PROBATION = 60.0
"""Seconds after a replacement in which the new file must not end by itself twice."""

Tasks = Callable[[], Mapping[str, KnownTask]]
"""Tells the tasks known at the moment, by id."""

_FAILED = (Outcome.REFUSED, Outcome.ROLLED_BACK, Outcome.DIED)


def shim_target(path: Path, given: Handover | None) -> Target:
    """Where the shim's file goes.

    It waits beside the path only if this process runs from the path, or took over and will:
    elsewhere (an installation, a path named by a flag) there is no file to go back to.
    """
    own = build.own_file()
    runs_from_it = given is not None or (own is not None and path.exists() and own.samefile(path))
    return Target(SHIM, path, _beside(path, "next") if runs_from_it else None)


def seen_after_an_end(last: Attempt, *, in_place: bool, same_boot: bool, now: float) -> Attempt:
    """What an attempt has come to, as seen by a start to which nobody handed over.

    ``in_place`` tells that its new content lies at the path; ``now`` is in monotonic seconds.
    """
    if last.outcome is Outcome.STOPPING:
        return _ended(last, Outcome.INTERRUPTED, "the old shim was stopped before it handed over")
    if last.outcome is Outcome.TRYING and in_place:
        return attrs.evolve(last, outcome=Outcome.SETTLING, ready_at=now, deaths=1)
    if last.outcome is Outcome.TRYING and not same_boot:
        return _ended(last, Outcome.INTERRUPTED, "the host went down meanwhile")
    if last.outcome is Outcome.TRYING:
        return _ended(last, Outcome.DIED, "it ended before it was ready")
    if last.outcome is not Outcome.SETTLING:
        return last
    if not in_place or not same_boot or now - last.ready_at >= PROBATION:
        return _ended(last, Outcome.DONE, "")
    if last.deaths == 0:
        return attrs.evolve(last, deaths=1)
    return _ended(last, Outcome.DIED, f"it ended twice within {PROBATION:g} s of being ready")


def _ended(last: Attempt, outcome: Outcome, reason: str) -> Attempt:
    return attrs.evolve(last, outcome=outcome, reason=reason)


class Upgrades:
    """Replacements of this process in place; the daemon's own."""

    def __init__(
        self,
        target: Target,
        components: InstalledComponents,
        file: UpgradeFile,
        run: Runner,
        now: Callable[[], float],
        log: EventLog,
    ) -> None:
        self._target = target
        self._components = components
        self._file = file
        self._run = run
        self._boot_id = boot_id() or ""
        self._now = now
        self._log = log
        self._state = UpgradeState()
        self._running = FileIdentity.of(target.path)  # replaced by hand, it is another one

    @property
    def last(self) -> LastUpgrade | None:
        """How the latest attempt went, for the healthcheck."""
        return self._state.last.told() if self._state.last else None

    # -- starting

    def begin(self, given: Handover | None, possessions: Possessions) -> None:
        """Find out how the last attempt ended, and remember which contents are unfit.

        To be called when home and port are ours and before components are looked at. May not
        return: a file that proved itself and then died twice gives way to the one before it.
        """
        self._state = self._file.read()
        if given is None:
            self._begin_alone(possessions)
        elif given.rolled_back:
            self._failed(Outcome.ROLLED_BACK, given.rolled_back)
        for unfit in self._state.unfit:
            self._components.avoid(SHIM, unfit.file.sha256, unfit.reason)
        last = self._state.last
        if last is not None and last.outcome in _FAILED and self._is_at_path(last.old):
            self._report(last)

    def _begin_alone(self, possessions: Possessions) -> None:
        last = self._state.last
        if last is not None and last.outcome in (
            Outcome.STOPPING,
            Outcome.TRYING,
            Outcome.SETTLING,
        ):
            in_place = self._is_at_path(last.new)
            seen = seen_after_an_end(
                last,
                in_place=in_place,
                same_boot=last.boot_id == self._boot_id,
                now=time.monotonic(),
            )
            self._log.warning(
                "upgrade.ended",
                outcome=seen.outcome,
                version=seen.new.version,
                reason=seen.reason,
            )
            if seen.outcome is Outcome.DIED:
                self._failed(Outcome.DIED, seen.reason)
                if in_place:
                    self._restore_previous(possessions, seen.reason)
            else:
                self._remember(attrs.evolve(self._state, last=seen))
        self._forget_stale_file()

    def _restore_previous(self, possessions: Possessions, why: str) -> None:
        """Put the file before this one back and become it."""
        previous = _beside(self._target.path, "previous")
        last = self._state.last
        assert last is not None
        try:
            if file_digest(previous) != last.old.sha256:
                return
            previous.rename(self._target.path)
            flush_directory(previous.parent)
            given = takeover.handover(
                possessions, generation=0, path=self._target.path, inventory=None
            )
            takeover.execute(self._target.path, attrs.evolve(given, rolled_back=why))
        except OSError as error:
            self._log.error("upgrade.not_rolled_back", error=error)

    def _forget_stale_file(self) -> None:
        """Drop a file that waits beside another one than it was to replace.

        Whoever put a file at the path meanwhile decided later.
        """
        waiting = self._target.waiting
        if waiting is None or self._running is None:
            return
        beside = self._running.content
        if self._state.beside and self._state.beside != beside:
            self._discard(waiting)
        if self._state.beside != beside:
            self._remember(attrs.evolve(self._state, beside=beside))

    # -- taking over

    async def prove(self, address: tuple[str, int], generation: int) -> None:
        """Ask this process through its own socket who it is.

        Raises:
            UpgradeRefused: another one answers, or nobody.
        """
        try:
            answer = await takeover.ask(address)
        except (OSError, BodyError, ValueError) as error:
            raise UpgradeRefused(f"it does not answer itself: {error}") from error
        implementation = answer.implementation
        if implementation is None or implementation.generation != generation:
            raise UpgradeRefused("somebody else answers on its port")

    def take_place(self) -> None:
        """Put this file at the path, and keep the one before it beside.

        Raises ``OSError``: the file at the path is still the old one.
        """
        path, waiting = self._target.path, self._target.waiting
        assert waiting is not None
        self._keep_previous()
        waiting.rename(path)
        flush_directory(path.parent)
        self._running = FileIdentity.of(path)
        last = self._state.last
        if last is not None and self._running is not None:
            last = attrs.evolve(
                last,
                outcome=Outcome.SETTLING,
                at=self._time(),
                ready_at=time.monotonic(),
                deaths=0,
            )
            self._remember(UpgradeState(last, self._state.unfit, self._running.content))
        self._log.info("upgrade.done", version=build.version())

    def confirm(self) -> None:
        """End the probation of a file that served until now, or ends because it was told to."""
        self._end_settling(Outcome.DONE, "")

    async def end_probation(self) -> None:
        """Wait until the file that took over counts as settled, and remember that."""
        last = self._state.last
        if last is not None and last.outcome is Outcome.SETTLING:
            await asyncio.sleep(last.ready_at + PROBATION - time.monotonic())
            await asyncio.to_thread(self.confirm)

    def interrupt(self) -> None:
        """Remember that this process was told to stop before it had proved itself."""
        self._end_settling(Outcome.INTERRUPTED, "the new shim was told to stop")

    def _end_settling(self, outcome: Outcome, reason: str) -> None:
        expected = Outcome.SETTLING if outcome is Outcome.DONE else Outcome.TRYING
        last = self._state.last
        if last is not None and last.outcome is expected:
            self._remember(attrs.evolve(self._state, last=_ended(last, outcome, reason)))

    # -- being replaced

    async def choose(self, tasks: Tasks) -> Path | None:
        """Return the file that is to take over; None if the process is to exit.

        A file without our check is put at the path for the supervisor to start, as dstack's own
        shim does; so is one that waits where the path was replaced by hand.

        Raises:
            UpgradeRefused: the file would not do; this process goes on.
        """
        waiting = self._target.waiting
        if waiting is None:
            return None
        await self._components.reserve(SHIM)
        try:
            if not waiting.exists():
                return None
            document = await asyncio.to_thread(read_document, waiting)
            able = document is not None and document.takeover == TAKEOVER_PROTOCOL
            if document is None or not able or self._was_replaced_by_hand():
                await asyncio.to_thread(self._place_for_supervisor, waiting)
                return None
            await self._examine(waiting, document.version, tasks)
        except BaseException:
            self._components.release(SHIM)
            raise
        return waiting

    async def _examine(self, waiting: Path, version: str, tasks: Tasks) -> None:
        new, old = await asyncio.to_thread(
            lambda: (file_digest(waiting), file_digest(self._target.path))
        )
        attempt = Attempt(
            ShimFile(build.version(), old),
            ShimFile(version, new),
            Outcome.STOPPING,
            self._time(),
            self._boot_id,
        )
        self._log.info("upgrade.checking", version=version, sha256=new)
        reason = await self._objection(waiting, version, tasks)
        if reason:
            self._state = attrs.evolve(self._state, last=attempt)
            await asyncio.to_thread(self._failed, Outcome.REFUSED, reason)
            self._report(attrs.evolve(attempt, reason=reason))
            raise UpgradeRefused(reason)
        try:
            state = attrs.evolve(self._state, last=attempt)
            await asyncio.to_thread(self._file.write, state)
        except OSError as error:
            # Without it nobody would know of a file that died: tried again and again.
            raise UpgradeRefused(f"{self._file.path} cannot be written: {error}") from error
        self._state = state

    async def _objection(self, waiting: Path, version: str, tasks: Tasks) -> str:
        before = tasks()
        argv = [str(waiting), CHECK.name, *sys.argv[1:]]
        try:
            finished = await self._run(
                argv, timeout=CHECK_LIMIT, env=takeover.environment(), max_output=CHECK_OUTPUT
            )
        except CommandError as error:
            return f"its check: {error}"
        if not finished.ok:
            return f"its check {finished.failure}"
        try:
            found = decode(CheckReport, finished.out)
        except BodyError as error:
            return f"its check gives no report: {error}"
        return objection(found, version, before, tasks())

    def execute(
        self, possessions: Possessions, generation: int, inventory: GpuInventory
    ) -> NoReturn:
        """Become the file that :meth:`choose` chose, or the old one again if that fails.

        Raises ``OSError`` if neither can be executed.
        """
        path, waiting, last = self._target.path, self._target.waiting, self._state.last
        assert waiting is not None
        assert last is not None
        self._remember(attrs.evolve(self._state, last=attrs.evolve(last, outcome=Outcome.TRYING)))
        given = takeover.handover(
            possessions, generation=generation + 1, path=path, inventory=inventory
        )
        try:
            takeover.execute(waiting, given)
        except OSError as error:
            why = f"it cannot be executed: {error.strerror}"
            takeover.execute(path, attrs.evolve(given, generation=generation, rolled_back=why))

    # -- files

    def _keep_previous(self) -> None:
        path = self._target.path
        previous = _beside(path, "previous")
        sweep(previous)
        try:
            with StagedFile(previous) as staged:
                staged.path.unlink()
                try:
                    os.link(path, staged.path)
                except OSError:  # a file system without links
                    shutil.copy2(path, staged.path)
                staged.place()
        except OSError as error:
            # The old shim cannot be gone back to later, but this one serves.
            self._log.warning("upgrade.previous_not_kept", error=error)

    def _place_for_supervisor(self, waiting: Path) -> None:
        self._keep_previous()
        try:
            waiting.rename(self._target.path)
            flush_directory(waiting.parent)
        except OSError as error:
            raise UpgradeRefused(f"{self._target.path} cannot be replaced: {error}") from error
        self._log.info("upgrade.placed", path=self._target.path)

    def _was_replaced_by_hand(self) -> bool:
        there = FileIdentity.of(self._target.path)
        return there is None or self._running is None or there.content != self._running.content

    def _discard(self, waiting: Path) -> None:
        try:
            waiting.unlink(missing_ok=True)
        except OSError as error:
            self._log.warning("upgrade.file_not_removed", path=waiting, error=error)

    def _is_at_path(self, file: ShimFile) -> bool:
        try:
            return file_digest(self._target.path) == file.sha256
        except OSError:
            return False

    # -- memory

    def _failed(self, outcome: Outcome, reason: str) -> None:
        """Remember the content of the last attempt as unfit, and take it away."""
        last = self._state.last
        if last is None:
            return
        if last.outcome not in _FAILED:
            last = attrs.evolve(_ended(last, outcome, reason), at=self._time())
        self._remember(attrs.evolve(self._state, last=last).with_unfit(last.new, reason))
        if self._target.waiting is not None:
            self._discard(self._target.waiting)

    def _report(self, last: Attempt) -> None:
        self._components.refuse(SHIM, last.new.sha256, last.new.version, last.reason)

    def _remember(self, state: UpgradeState) -> None:
        self._state = state
        try:
            self._file.write(state)
        except OSError as error:
            self._log.error("upgrade.not_remembered", path=self._file.path, error=error)

    def _time(self) -> str:
        return rfc3339(self._now())


def rfc3339(seconds: float) -> str:
    """A time since the epoch in words."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")
