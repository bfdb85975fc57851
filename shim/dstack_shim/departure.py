"""How this process leaves: it exits, or it becomes the file that waits for its place."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from dstack_shim.errors import UpgradeRefused
from dstack_shim.log import EventLog
from dstack_shim.preflight import KnownTask
from dstack_shim.tasks.core import Core
from dstack_shim.tasks.task import Saving
from dstack_shim.upgrade import Upgrades


class Departure:
    """Begun by a shutdown or a signal; there is one at a time."""

    def __init__(self, upgrades: Upgrades, log: EventLog) -> None:
        self.forced = False
        self._upgrades = upgrades
        self._log = log
        self._told = asyncio.Event()
        self._must_exit = False
        self._successor: Path | None = None
        self._choosing: asyncio.Future[None] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether it was begun, and not given up again because no file would do."""
        return self._told.is_set() or self._choosing is not None

    @property
    def successor(self) -> Path | None:
        """The file to become; None: exit."""
        return None if self._must_exit else self._successor

    def begin(self, core: Core) -> None:
        """Leave as a shutdown asks for it that is not forced: no task is accepted from now on.

        Nothing happens if it was begun before.
        """
        if not self.is_under_way:
            core.hold()
            self._choosing = asyncio.ensure_future(self._choose(core))

    def exit(self, *, force: bool) -> None:
        """Leave at once and without a successor, whatever was begun."""
        self._must_exit = True
        self.forced = self.forced or force
        self._tell()

    async def wait(self) -> None:
        """Return when it is time to let go."""
        await self._told.wait()
        if self._choosing is not None:
            self._choosing.cancel()
            with suppress(asyncio.CancelledError):
                await self._choosing

    async def _choose(self, core: Core) -> None:
        try:
            self._successor = await self._upgrades.choose(lambda: _known(core))
        except UpgradeRefused as error:
            self._log.error("upgrade.refused", error=error)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not cost the shim that serves
            self._log.fault("upgrade.refused", error)
        else:
            self._tell()
            return
        self._choosing = None
        core.admit()

    def _tell(self) -> None:
        self._log.info("daemon.stopping", force=self.forced, successor=self.successor or "none")
        self._told.set()


def _known(core: Core) -> dict[str, KnownTask]:
    return {
        entry.task.id: KnownTask(entry.task.status, entry.task.saving is Saving.WRITTEN)
        for entry in core.book
    }
