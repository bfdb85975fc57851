"""What the core asks of the disk, and what a scan of it finds."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import attrs
from dstack_shim_contracts.record import TaskRecord


class RecordKind(Enum):
    """What lies in a task directory where its record belongs."""

    GOOD = "good"
    NONE = "none"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    """Well-formed, but of a version this shim cannot read: it is left untouched."""


@attrs.frozen
class FoundDir:
    """One task directory as the scan found it; ``problem`` says what is wrong with its record."""

    name: str
    kind: RecordKind
    record: TaskRecord | None = None
    problem: str = ""


class Records(Protocol):
    """The durable records, as :class:`dstack_shim.store.Store` keeps them.

    Every call blocks, and raises ``StoreError`` when the disk refuses.
    """

    def scan(self) -> tuple[FoundDir, ...]:
        """Every task directory, in directory order."""

    def create(self, dir: str, record: TaskRecord) -> None:
        """Make the task's directory with its record, flushed; nothing is left on an error."""

    def write(self, dir: str, record: TaskRecord) -> None:
        """Replace the record, flushed."""

    def forget(self, dir: str) -> None:
        """Take the directory away, flushed."""

    def discard_output(self, dir: str) -> None:
        """Take away what the task left in its directory, but not its record."""

    def set_aside(self, dir: str) -> str:
        """Rename a damaged record inside its own directory; return its new name."""
