"""Being replaced in place: whether, by what, and what became of it.

A proved file waits beside the path (:class:`dstack_shim.components.Target`). A shutdown that was
not forced makes it the successor of this process, once its own check of this host satisfied the
rules of :mod:`dstack_shim.preflight`; :mod:`dstack_shim.takeover` hands over. The file at the path
stays the old one until the new one has proved itself, so that whatever dies, the supervisor starts
a file that works.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
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
from dstack_shim.components import InstalledComponents
from dstack_shim.errors import CommandError, UpgradeRefused
from dstack_shim.host.commands import Runner
from dstack_shim.host.gpus import GpuInventory
from dstack_shim.host.machine import boot_id
from dstack_shim.installed import read_document
from dstack_shim.log import EventLog
from dstack_shim.preflight import KnownTask, objection
from dstack_shim.shim_files import ShimFiles
from dstack_shim.staged import file_digest
from dstack_shim.takeover import Possessions
from dstack_shim.upgrade_rules import FAILED, PROBATION, UNDER_WAY, ended, seen_after_an_end
from dstack_shim.upgrade_state import UpgradeFile

CHECK_LIMIT = 30.0
"""Seconds the new file's check may take: hundreds of records on a busy host."""

CHECK_OUTPUT = 8 << 20
"""Bytes its report may have."""

DOUBTS = 3
"""Times a file is asked that cannot tell what it would do; then it counts as unfit."""

Tasks = Callable[[], Mapping[str, KnownTask]]
"""Tells the tasks known at the moment, by id."""


class Upgrades:
    """Replacements of this process in place; the daemon's own."""

    def __init__(
        self,
        files: ShimFiles,
        components: InstalledComponents,
        file: UpgradeFile,
        run: Runner,
        now: Callable[[], float],
        log: EventLog,
    ) -> None:
        self._files = files
        self._components = components
        self._file = file
        self._run = run
        self._boot_id = boot_id() or ""
        self._now = now
        self._log = log
        self._state = UpgradeState()
        self._doubts: Counter[str] = Counter()

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
        failed = last is not None and self._state.is_unfit(last.new)
        if last is not None and failed and self._files.is_at_path(last.old.sha256):
            self._report(last)

    def _begin_alone(self, possessions: Possessions) -> None:
        last = self._state.last
        if last is not None and last.outcome in UNDER_WAY:
            self._judge(last, possessions)
        if self._state.beside not in ("", self._files.content):
            # Whoever put another file at the path decided later than who let this one wait.
            self._files.discard_waiting()
        if self._files.waiting is not None and self._state.beside != self._files.content:
            self._remember(attrs.evolve(self._state, beside=self._files.content))
        self._files.tidy()

    def _judge(self, last: Attempt, possessions: Possessions) -> None:
        in_place = self._files.is_at_path(last.new.sha256)
        same_boot = last.boot_id == self._boot_id
        seen = seen_after_an_end(
            last, in_place=in_place, same_boot=same_boot, now=time.monotonic()
        )
        version, outcome, reason = seen.new.version, seen.outcome, seen.reason
        self._log.warning("upgrade.ended", version=version, outcome=outcome, reason=reason)
        if outcome is not Outcome.DIED:
            self._remember(attrs.evolve(self._state, last=seen))
            return
        self._failed(outcome, reason)
        if in_place:
            self._become_previous(possessions, last.old.sha256, reason)

    def _become_previous(self, possessions: Possessions, sha256: str, why: str) -> None:
        """Put the file before this one back and become it; returns if that is impossible."""
        path = self._files.path
        try:
            if self._files.restore_previous(sha256):
                given = takeover.handover(possessions, generation=0, path=path, inventory=None)
                takeover.execute(path, attrs.evolve(given, rolled_back=why))
        except OSError as error:
            self._log.error("upgrade.not_rolled_back", error=error)

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
        self._files.take_place()
        last = self._state.last
        if last is not None:
            last = attrs.evolve(
                last,
                outcome=Outcome.SETTLING,
                at=self._time(),
                ready_at=time.monotonic(),
                deaths=0,
            )
            self._remember(UpgradeState(last, self._state.unfit, self._files.content))
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
            self._remember(attrs.evolve(self._state, last=ended(last, outcome, reason)))

    # -- being replaced

    async def choose(self, tasks: Tasks) -> Path | None:
        """Return the file that is to take over; None if the process is to exit.

        A file without our check is put at the path for the supervisor to start, as dstack's own
        shim does; so is one that waits where the path was replaced by hand.

        Raises:
            UpgradeRefused: the file would not do; this process goes on.
        """
        waiting = self._files.waiting
        if waiting is None:
            return None
        await self._components.reserve(SHIM)
        try:
            if not waiting.exists():
                if self._files.was_replaced_by_hand():
                    await asyncio.to_thread(self._files.keep_previous)
                return None
            document = await asyncio.to_thread(read_document, waiting)
            able = document is not None and document.takeover == TAKEOVER_PROTOCOL
            if document is None or not able or self._files.was_replaced_by_hand():
                await asyncio.to_thread(self._files.place_for_supervisor)
                return None
            await self._examine(waiting, document.version, tasks)
        except OSError as error:
            self._components.release(SHIM)
            raise UpgradeRefused(f"{self._files.path} cannot be replaced: {error}") from error
        except BaseException:
            self._components.release(SHIM)
            raise
        return waiting

    async def _examine(self, waiting: Path, version: str, tasks: Tasks) -> None:
        attempt = await asyncio.to_thread(self._attempt, waiting, version)
        self._log.info("upgrade.checking", version=version, sha256=attempt.new.sha256)
        reason, is_sure = await self._objection(waiting, version, tasks)
        if reason:
            await self._refuse(attempt, reason, is_sure=is_sure)
        state = attrs.evolve(self._state, last=attempt)
        try:
            await asyncio.to_thread(self._file.write, state)
        except OSError as error:
            # Without it nobody would know of a file that died: tried again and again.
            raise UpgradeRefused(f"{self._file.path} cannot be written: {error}") from error
        self._state = state

    def _attempt(self, waiting: Path, version: str) -> Attempt:
        return Attempt(
            ShimFile(build.version(), file_digest(self._files.path)),
            ShimFile(version, file_digest(waiting)),
            Outcome.STOPPING,
            self._time(),
            self._boot_id,
        )

    async def _refuse(self, attempt: Attempt, reason: str, *, is_sure: bool) -> NoReturn:
        """Raise ``UpgradeRefused``; what could not be told is asked again, a few times."""
        refused = ended(attempt, Outcome.REFUSED, reason)
        self._state = attrs.evolve(self._state, last=refused)
        self._doubts[attempt.new.sha256] += 1
        if is_sure or self._doubts[attempt.new.sha256] >= DOUBTS:
            await asyncio.to_thread(self._failed, Outcome.REFUSED, reason)
            self._report(refused)
        else:
            await asyncio.to_thread(self._remember, self._state)
        raise UpgradeRefused(reason)

    async def _objection(self, waiting: Path, version: str, tasks: Tasks) -> tuple[str, bool]:
        """Why it may not, "" if it may; and whether that is the file's own fault: a host on which
        nothing can be told, an engine that is away say, may be another one in a minute.
        """
        before = tasks()
        argv = [str(waiting), CHECK.name, *sys.argv[1:]]
        try:
            finished = await self._run(
                argv, timeout=CHECK_LIMIT, env=takeover.environment(), max_output=CHECK_OUTPUT
            )
        except CommandError as error:
            return f"its check: {error}", True
        if not finished.ok:
            return f"its check {finished.failure}", True
        try:
            found = decode(CheckReport, finished.out)
        except BodyError as error:
            return f"its check gives no report: {error}", True
        return objection(found, version, before, tasks()), not found.problems

    def execute(
        self, possessions: Possessions, generation: int, inventory: GpuInventory
    ) -> NoReturn:
        """Become the file that :meth:`choose` chose, or the old one again if that fails.

        Raises ``OSError`` if neither can be executed.
        """
        path, waiting, last = self._files.path, self._files.waiting, self._state.last
        assert waiting is not None
        assert last is not None
        # Not flushed, clients are waiting: after a reboot it says no more than what it replaces.
        trying = attrs.evolve(last, outcome=Outcome.TRYING)
        self._remember(attrs.evolve(self._state, last=trying), flush=False)
        given = takeover.handover(
            possessions, generation=generation + 1, path=path, inventory=inventory
        )
        try:
            takeover.execute(waiting, given)
        except OSError as error:
            why = f"it cannot be executed: {error.strerror}"
            takeover.execute(path, attrs.evolve(given, generation=generation, rolled_back=why))

    # -- memory

    def _failed(self, outcome: Outcome, reason: str) -> None:
        """Remember the content of the last attempt as unfit, and take it away."""
        last = self._state.last
        if last is None:
            return
        if last.outcome not in FAILED:
            last = attrs.evolve(ended(last, outcome, reason), at=self._time())
        self._remember(attrs.evolve(self._state, last=last).with_unfit(last.new, reason))
        self._files.discard_waiting()

    def _report(self, last: Attempt) -> None:
        self._components.refuse(SHIM, last.new.sha256, last.new.version, last.reason)

    def _remember(self, state: UpgradeState, *, flush: bool = True) -> None:
        self._state = state
        try:
            self._file.write(state, flush=flush)
        except OSError as error:
            self._log.error("upgrade.not_remembered", path=self._file.path, error=error)

    def _time(self) -> str:
        return rfc3339(self._now())


def rfc3339(seconds: float) -> str:
    """A time since the epoch in words."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
