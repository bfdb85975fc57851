"""The disk below ``runners/``, in memory, with what a power cut can do to it.

The model follows :mod:`dstack_shim.store` call by call. Each call is a list of stages in the
order the real one goes through them: what a kill or an error between two of them leaves behind is
what it leaves on a real disk (``tests/shim/test_store.py`` and the power-cut tests show that on
real ones). Until its flush a change is *visible* (a restarted shim sees it) but not *certain*: a
power cut may keep it or not, for each directory by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from enum import Enum

import attrs
from dstack_shim_contracts.record import TaskRecord, read_record, write_record

from dstack_shim.errors import StoreError
from dstack_shim.records import FoundDir, RecordKind


@attrs.frozen
class Content:
    """What lies in one task directory."""

    kind: RecordKind = RecordKind.NONE
    record: TaskRecord | None = None
    set_aside: int = 0
    has_output: bool = False


class Stage(str, Enum):
    """The stages of a change."""

    VISIBLE = "visible"
    CERTAIN = "certain"


@attrs.frozen
class Change:
    """One call of the store, in stages; ``undo`` is what it does after a failed flush."""

    dir: str
    visible: Callable[[], None]
    certain: Callable[[], None]
    undo: Callable[[], None]


class Disk:
    """Directories by name. It outlives every shim."""

    def __init__(self) -> None:
        self.visible: dict[str, Content] = {}
        self._after_cut: dict[str, list[Content | None]] = {}
        self.on_certain: Callable[[str, Content | None], None] = lambda *_: None
        """Called with what a directory certainly holds from now on."""
        self.on_first_record: Callable[[str, TaskRecord], None] = lambda *_: None
        """Called when a record can be seen where none was."""
        self.on_taken_back: Callable[[str], None] = lambda _: None
        """Called when it is gone again because it could not be flushed."""

    def possible(self, dir: str) -> list[Content | None]:
        """All a power cut may leave of the directory; None: nothing."""
        return self._after_cut.get(dir, [self.visible.get(dir)])

    def put(self, dir: str, content: Content | None) -> None:
        """Make a change visible."""
        self._after_cut[dir] = [*self.possible(dir), content]
        self._see(dir, content)

    def flush(self, dir: str) -> None:
        """Make what is visible certain."""
        self._after_cut.pop(dir, None)
        self.on_certain(dir, self.visible.get(dir))

    def flush_all(self) -> None:
        """Make everything that is visible certain."""
        for dir in sorted(self._after_cut):
            self.flush(dir)

    def cut_power(self, random: random.Random) -> None:
        """Keep of each directory one of the states it may be in."""
        for dir in sorted(self._after_cut):
            self._see(dir, random.choice(self.possible(dir)))
            self.flush(dir)

    def _see(self, dir: str, content: Content | None) -> None:
        if content is None:
            self.visible.pop(dir, None)
        else:
            self.visible[dir] = content


class MemoryRecords:
    """Implements :class:`dstack_shim.records.Records` on a :class:`Disk`.

    With ``as_bytes`` each record is written and read back as it would be on a disk; without, what
    that does to it is done by hand, which is twenty times as fast.
    """

    def __init__(self, disk: Disk, *, as_bytes: bool = False) -> None:
        self._disk = disk
        self._as_bytes = as_bytes

    # What the core calls, whole.

    def scan(self) -> tuple[FoundDir, ...]:
        self._disk.flush_all()  # what is read is certain
        return tuple(
            FoundDir(
                name,
                content.kind,
                content.record,
                problem="" if content.kind in _FINE else content.kind.value,
            )
            for name, content in sorted(self._disk.visible.items())
        )

    def create(self, dir: str, record: TaskRecord) -> None:
        self._whole(self.creating(dir, record))

    def write(self, dir: str, record: TaskRecord) -> None:
        self._whole(self.writing(dir, record))

    def forget(self, dir: str) -> None:
        self._whole(self.forgetting(dir))

    def discard_output(self, dir: str) -> None:
        content = self._existing(dir)
        if content.has_output:  # never flushed: coming back after a power cut costs nothing
            self._disk.put(dir, attrs.evolve(content, has_output=False))

    def set_aside(self, dir: str) -> str:
        self._whole(self.setting_aside(dir))
        return f".task.json.damaged-{self._disk.visible[dir].set_aside}"

    # The same in stages.

    def changes(self, call: str, *args: object) -> Change | None:
        """The stages of a call by its name, None if it has none."""
        stages: dict[str, Callable[..., Change]] = {
            "create": self.creating,
            "write": self.writing,
            "forget": self.forgetting,
            "set_aside": self.setting_aside,
        }
        return stages[call](*args) if call in stages else None

    def creating(self, dir: str, record: TaskRecord) -> Change:
        there = self._disk.visible.get(dir)
        if there is not None and there.kind is not RecordKind.NONE:
            raise StoreError(f"cannot create {dir}: a record that cannot be used is there")
        put = self._putting(dir, self._with(there or Content(), record))

        def visible() -> None:
            self._disk.on_first_record(dir, record)
            put.visible()

        def undo() -> None:
            # Whoever gets an error is told that nothing is left: the name is taken back, unflushed.
            self._disk.put(dir, there)
            self._disk.on_taken_back(dir)

        return attrs.evolve(put, visible=visible, undo=undo)

    def writing(self, dir: str, record: TaskRecord) -> Change:
        return self._putting(dir, self._with(self._existing(dir), record))

    def forgetting(self, dir: str) -> Change:
        return self._putting(dir, None)

    def setting_aside(self, dir: str) -> Change:
        there = self._existing(dir)
        if there.kind is RecordKind.NONE:
            raise StoreError(f"cannot set aside {dir}/task.json: No such file or directory")
        return self._putting(dir, Content(set_aside=there.set_aside + 1, has_output=True))

    def _putting(self, dir: str, content: Content | None) -> Change:
        def visible() -> None:
            self._disk.put(dir, content)

        return Change(dir, visible, lambda: self._disk.flush(dir), undo=lambda: None)

    def _with(self, content: Content, record: TaskRecord) -> Content:
        if self._as_bytes:
            record = read_record(write_record(record))
        elif not record.terminated and record.termination_reason:
            record = attrs.evolve(record, terminated=True)
        return attrs.evolve(content, kind=RecordKind.GOOD, record=record, has_output=True)

    def _existing(self, dir: str) -> Content:
        content = self._disk.visible.get(dir)
        if content is None:
            raise StoreError(f"cannot write {dir}/task.json: No such file or directory")
        return content

    @staticmethod
    def _whole(change: Change) -> None:
        change.visible()
        change.certain()


_FINE = frozenset({RecordKind.GOOD, RecordKind.NONE})


def records_on(disk: Disk) -> Iterator[tuple[str, TaskRecord]]:
    """Every good record that is visible, with its directory."""
    for dir, content in sorted(disk.visible.items()):
        if content.record is not None:
            yield dir, content.record
