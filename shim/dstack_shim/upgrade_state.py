"""``upgrade.json`` in the home: how the last replacement in place went, and which files are unfit.

Both sides of a replacement write it, and whoever starts after one that died reads it. It is about
contents, by their SHA-256: a version says little about a file whose download may have broken.
"""

from __future__ import annotations

from pathlib import Path

from dstack_shim_contracts.codec import decode, encode
from dstack_shim_contracts.errors import BodyError
from dstack_shim_contracts.upgrade import STATE_FILE_NAME, UpgradeState

from dstack_shim.log import EventLog
from dstack_shim.staged import StagedFile


class UpgradeFile:
    """The file of one home."""

    def __init__(self, home: Path, log: EventLog) -> None:
        self.path = home / STATE_FILE_NAME
        self._log = log

    def read(self) -> UpgradeState:
        """Read what is remembered; nothing if the file is missing or damaged."""
        try:
            return decode(UpgradeState, self.path.read_bytes())
        except FileNotFoundError:
            return UpgradeState()
        except (OSError, BodyError) as error:
            self._log.error("upgrade.state_unreadable", path=self.path, error=error)
            return UpgradeState()

    def write(self, state: UpgradeState, *, flush: bool = True) -> None:
        """Remember it; without ``flush`` only for as long as the host does not go down.

        Raises:
            OSError: the old state is still there.
        """
        with StagedFile(self.path) as staged:
            staged.fill(encode(state), flush=flush)
            staged.place(flush=flush)
