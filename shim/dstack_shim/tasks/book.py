"""All tasks, and the only way to change one: under its lock, on disk first, or not at all.

Reading never waits. Every change counts up :attr:`Book.sequence`, which is how the background
step knows that a task moved while it was looking at the containers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import attrs
from dstack_shim_contracts.api import ImagePullProgress
from dstack_shim_contracts.statuses import may_become

from dstack_shim.cancelling import to_its_end
from dstack_shim.errors import IllegalTransition, StoreError, TaskExists, TaskNotFound
from dstack_shim.log import EventLog
from dstack_shim.records import Records
from dstack_shim.resources.protocol import Blocking
from dstack_shim.tasks.task import Saving, Task

Change = Callable[[Task], Task]


class Entry:
    """One task's place in the book.

    ``is_leftover``: nobody submitted it to this process, and its container, found while we run,
    is over or never began: a create that came true after its task was gone.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.lock = asyncio.Lock()
        self.release_lock = asyncio.Lock()
        self.remove_lock = asyncio.Lock()
        self.changed_at = 0
        self.unsaved = False
        self.handlers = 0
        self.cancel = asyncio.Event()
        self.cancelled_because = ""
        self.start_done = asyncio.Event()
        self.start_done.set()
        self.progress: ImagePullProgress | None = None
        self.is_leftover = False

    @property
    def starting(self) -> bool:
        """Whether a start is in flight; it alone owns the task's resources then."""
        return not self.start_done.is_set()

    @property
    def busy(self) -> bool:
        """Whether somebody is at work on the task: the background step leaves it alone."""
        return self.starting or self.handlers > 0 or self.lock.locked()

    def cancel_start(self, because: str) -> None:
        """Ask a start in flight to stop at its next chance."""
        self.cancelled_because = self.cancelled_because or because
        self.cancel.set()


class Book:
    """Every task known to the API, by id."""

    def __init__(self, records: Records, blocking: Blocking, log: EventLog) -> None:
        self.sequence = 0
        self.submit_lock = asyncio.Lock()
        self._entries: dict[str, Entry] = {}
        self._removed_at: dict[str, int] = {}
        self._records = records
        self._blocking = blocking
        self._log = log

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, task_id: str) -> Entry:
        """The task's entry.

        Raises ``TaskNotFound``.
        """
        entry = self._entries.get(task_id)
        if entry is None:
            raise TaskNotFound(f"task {task_id} not found")
        return entry

    def holds(self, entry: Entry) -> bool:
        """Whether this very entry is in it: its id may have been removed and submitted anew."""
        return self._entries.get(entry.task.id) is entry

    def add(self, task: Task) -> Entry:
        """Make a task known whose record, if it is to have one, is on disk.

        Raises ``TaskExists``.
        """
        if task.id in self._entries:
            raise TaskExists(f"task {task.id} is already submitted")
        entry = Entry(task)
        self._entries[task.id] = entry
        self._count(entry)
        return entry

    async def change(self, entry: Entry, change: Change, *, insist: bool = False) -> Task:
        """Apply ``change`` to the stored task and return the new one.

        The record is written first. A change that raises, moves the task backwards, or whose
        record cannot be written is discarded whole; with ``insist`` it then counts in memory
        all the same and is written by a later round (``entry.unsaved``): a full disk must not
        keep a container running or a GPU held.

        Raises ``IllegalTransition``, ``StoreError`` (not with ``insist``), and ``TaskNotFound``
        for a task that was removed while somebody waited to change it: its directory may belong
        to a new task of the same id by now.
        """
        async with entry.lock:
            self._must_be_in_it(entry)
            old, new = entry.task, change(entry.task)
            if new.status is not old.status and not may_become(old.status, new.status):
                raise IllegalTransition(
                    f"task {old.id} is {old.status.value}: it does not become {new.status.value}"
                )
            if new.record == old.record and not entry.unsaved:
                return self._counts(entry, new)
            # What is on disk counts: whoever is cancelled while it is written takes nothing back.
            return await to_its_end(self._written(entry, new, insist=insist))

    async def forget(self, entry: Entry) -> None:
        """Take the task out of the book, once its directory is gone from the disk.

        Raises ``StoreError``; the task then stays. ``TaskNotFound`` if it is gone already.
        """
        async with entry.lock:
            await to_its_end(self._forgotten(entry))

    def removed_since(self, task_id: str, sequence: int) -> bool:
        """Whether the task was removed after the book stood at ``sequence``."""
        return self._removed_at.get(task_id, -1) > sequence

    def forget_removals(self, until: int) -> None:
        """Drop what :meth:`removed_since` needs for sequences before ``until``."""
        self._removed_at = {k: v for k, v in self._removed_at.items() if v > until}

    async def _written(self, entry: Entry, task: Task, *, insist: bool) -> Task:
        return self._counts(entry, await self._saved(entry, task, insist=insist))

    def _counts(self, entry: Entry, task: Task) -> Task:
        entry.task = task
        self._count(entry)
        return task

    async def _forgotten(self, entry: Entry) -> None:
        self._must_be_in_it(entry)
        task = entry.task
        if task.dir is not None:
            await self._blocking(self._records.forget, task.dir)
        del self._entries[task.id]
        self.sequence += 1
        self._removed_at[task.id] = self.sequence

    def _must_be_in_it(self, entry: Entry) -> None:
        if not self.holds(entry):
            raise TaskNotFound(f"task {entry.task.id} not found")

    async def _saved(self, entry: Entry, task: Task, *, insist: bool) -> Task:
        """The task as it counts once written: with the directory its record now has."""
        if task.saving is Saving.HANDS_OFF:
            return task
        try:
            if task.dir is None:
                name = task.container_name
                await self._blocking(self._records.create, name, task.record)
                task = _with_record(task, name)
            else:
                await self._blocking(self._records.write, task.dir, task.record)
                task = _with_record(task, task.dir)
        except StoreError as error:
            if not insist:
                raise
            entry.unsaved = True
            self._log.error("record.unsaved", task=task.id, error=error)
        else:
            entry.unsaved = False
        return task

    def _count(self, entry: Entry) -> None:
        self.sequence += 1
        entry.changed_at = self.sequence


def _with_record(task: Task, dir: str) -> Task:
    if task.dir == dir and task.saving is Saving.WRITTEN:
        return task
    return attrs.evolve(task, dir=dir, saving=Saving.WRITTEN)
