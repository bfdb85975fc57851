"""What our own shims say to each other when one replaces another in place.

Not part of the API: a check's report on standard output, what is handed over in one environment
variable, and ``upgrade.json`` in the home. Both sides may be of different releases, so members may
be added, never given another meaning; ``TAKEOVER_PROTOCOL`` counts what cannot be so.
"""

from enum import Enum
from typing import Final

import attrs
from dstack_shim_contracts.api import LastUpgrade, TaskListItem

STATE_FILE_NAME: Final = "upgrade.json"

MOST_UNFIT: Final = 16
"""Contents remembered as unfit; the oldest are forgotten."""


@attrs.frozen
class CheckReport:
    """What a file makes of a host without changing anything there.

    ``tasks`` are those it would know after a start and in which status, ``recorded`` the ids of
    those whose record it can read, ``plan`` is what it would do in words, ``problems`` what keeps
    it from starting.
    """

    version: str
    features: tuple[str, ...]
    tasks: tuple[TaskListItem, ...]
    recorded: tuple[str, ...]
    plan: tuple[str, ...]
    problems: tuple[str, ...]


@attrs.frozen
class HandedGpu:
    """One GPU of the host."""

    id: str
    name: str
    memory_mib: int


@attrs.frozen
class Handover:
    """What one shim leaves to the next, besides the descriptors themselves.

    ``path`` is where the shim belongs; the file there is the one to go back to. ``rolled_back``
    says why a successor was not up to it, "" on the way forward. The GPUs are handed over because
    finding them may take minutes; ``gpu_vendor`` "" means they have to be found.
    """

    protocol: int
    socket: int
    lock: int
    generation: int
    deadline: float
    """Monotonic seconds: when the successor must have proved itself."""
    path: str
    rolled_back: str = ""
    gpu_vendor: str = ""
    gpu_driver_version: str | None = None
    gpus: tuple[HandedGpu, ...] = ()


class Outcome(str, Enum):
    """How far an attempt came."""

    STOPPING = "stopping"
    """The old shim lets go; nothing was executed yet."""
    TRYING = "trying"
    """The new file is executed and has not proved itself."""
    SETTLING = "settling"
    """It took its place and is on probation."""
    DONE = "done"
    REFUSED = "refused"
    """The check before found that it would not do; nothing was stopped."""
    ROLLED_BACK = "rolled-back"
    """It did not prove itself in time, and the old file went on."""
    DIED = "died"
    """It ended by itself, and the old file was started again."""
    INTERRUPTED = "interrupted"
    """Stopped from outside: it says nothing about the file."""

    def __str__(self) -> str:
        return self.value


_TOLD_AS: Final = {Outcome.STOPPING: Outcome.TRYING, Outcome.SETTLING: Outcome.DONE}


@attrs.frozen
class ShimFile:
    """A shim's file: the version it reports, and its content."""

    version: str = ""
    sha256: str = ""


@attrs.frozen
class Attempt:
    """One replacement in place. ``ready_at`` is in monotonic seconds of the boot ``boot_id``."""

    old: ShimFile
    new: ShimFile
    outcome: Outcome
    at: str
    """RFC 3339."""
    boot_id: str = ""
    reason: str = ""
    ready_at: float = 0.0
    deaths: int = 0
    """How often it ended by itself since it was ready."""

    def told(self) -> LastUpgrade:
        """As the healthcheck shows it."""
        outcome = _TOLD_AS.get(self.outcome, self.outcome)
        return LastUpgrade(self.old.version, self.new.version, outcome.value, self.reason, self.at)


@attrs.frozen
class Unfit:
    """A content that is not tried again."""

    file: ShimFile
    reason: str


@attrs.frozen
class UpgradeState:
    """Content of ``upgrade.json``: the last attempt, and which contents are unfit."""

    last: Attempt | None = None
    unfit: tuple[Unfit, ...] = ()
    beside: str = ""
    """Which file lay at the path, so that one put there by somebody else is noticed."""

    def is_unfit(self, file: ShimFile) -> bool:
        """Whether this content is remembered as unfit."""
        return any(one.file.sha256 == file.sha256 for one in self.unfit)

    def with_unfit(self, file: ShimFile, reason: str) -> "UpgradeState":
        """Remember one more content."""
        others = [one for one in self.unfit if one.file.sha256 != file.sha256]
        return attrs.evolve(self, unfit=(*others, Unfit(file, reason))[-MOST_UNFIT:])
