"""What a task holds on the host, taken and given back as one.

Taking follows the record: what is taken is written there first, so that after a crash at any
instant the record alone is enough to give it back. Giving back is idempotent and names its
owner; a volume or key that another task still needs stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from dstack_shim_contracts.record import TaskRecord

from dstack_shim.errors import IllegalTransition, ResourceError
from dstack_shim.log import EventLog
from dstack_shim.resources.gpus import GpuLocks
from dstack_shim.resources.protocol import Claim, Others
from dstack_shim.tasks.book import Book, Entry
from dstack_shim.tasks.task import released, with_gpus


class Resource(Protocol):
    """One kind of thing on the host that tasks take: keys, volumes, mounts."""

    name: str

    async def acquire(self, record: Claim, others: Others) -> None:
        """Take what the record's task needs of this kind.

        Raises ``ResourceError`` with the user's words; what was taken by then is given back by
        the release that follows.
        """

    async def release(self, record: Claim, others: Others) -> None:
        """Give back whatever the task has of this kind; having nothing is fine.

        Raises ``ResourceError``: it is tried again.
        """


class Holdings:
    """Takes and gives back everything a task holds."""

    def __init__(
        self, book: Book, gpus: GpuLocks, resources: Sequence[Resource], log: EventLog
    ) -> None:
        self._book = book
        self._gpus = gpus
        self._resources = tuple(resources)
        self._log = log

    async def acquire(self, entry: Entry) -> None:
        """Take all the task needs; the caller releases whatever comes of it.

        Raises ``ResourceError``, ``StoreError``, and ``IllegalTransition`` when the task's end
        was decided meanwhile: that is noticed also by whoever waits for a disk to appear, since
        a server gives a terminate 9 s.
        """
        task = entry.task
        gpus = self._gpus.acquire(task.id, task.record.config.gpu)
        if gpus:
            await self._book.change(entry, partial(with_gpus, gpus=gpus))
            self._log.info("gpus.acquired", task=task.id, gpus=gpus)
        for resource in self._resources:
            _must_go_on(entry)
            await self._unless_given_up(
                entry, resource.acquire(entry.task.record, partial(self._others, entry))
            )

    async def release(self, entry: Entry) -> None:
        """Give back all the task holds, and write that down; done already is fine.

        Called only once its container cannot be running.

        Raises ``ResourceError`` naming what could not be given back (all the rest was), and
        ``StoreError``.
        """
        async with entry.release_lock:
            if entry.task.released:
                self._gpus.release(entry.task.id)
                return
            problems = []
            for resource in reversed(self._resources):
                try:
                    await resource.release(entry.task.record, partial(self._others, entry))
                except ResourceError as error:
                    problems.append(f"{resource.name}: {error}")
            if problems:
                # The container cannot run any more, so its GPUs are free whatever else failed.
                await self._book.change(entry, partial(with_gpus, gpus=()))
                self._gpus.release(entry.task.id)
                raise ResourceError("; ".join(problems))
            # Unlocked only once that is on disk: after a crash in between, a GPU given to the
            # next task would be claimed by both.
            await self._book.change(entry, released)
            self._gpus.release(entry.task.id)
            self._log.info("task.released", task=entry.task.id)

    async def _unless_given_up(self, entry: Entry, taking: Coroutine[Any, Any, None]) -> None:
        work = asyncio.ensure_future(taking)
        given_up = asyncio.ensure_future(entry.cancel.wait())
        try:
            await asyncio.wait({work, given_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            given_up.cancel()
            work.cancel()
        await asyncio.wait({work})  # what must not be cut short still comes to its end
        if work.cancelled():
            _must_go_on(entry)
            raise ResourceError(f"interrupted while preparing: {entry.cancelled_because}")
        work.result()

    def _others(self, entry: Entry) -> tuple[TaskRecord, ...]:
        return tuple(
            other.task.record
            for other in self._book
            if other is not entry and not other.task.released
        )


def _must_go_on(entry: Entry) -> None:
    if entry.task.over:
        raise IllegalTransition(f"task {entry.task.id} is terminated")
