"""The end of a task: decided, stopped, written down, released, and at last removed.

One path for everybody: the background step, terminate, remove and a start that failed. The
order is always the same: the decision is recorded, the container is stopped, the last status is
recorded, everything is released. After a crash between any two of these the record says where
to go on.
"""

from __future__ import annotations

import math
from functools import partial

from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.clock import Clock
from dstack_shim.engine.protocol import Engine
from dstack_shim.errors import (
    ContainerNotFound,
    EngineError,
    ResourceError,
    StoreError,
    TaskNotFound,
    TaskNotTerminated,
)
from dstack_shim.log import EventLog
from dstack_shim.tasks.book import Book, Entry
from dstack_shim.tasks.holdings import Holdings
from dstack_shim.tasks.task import Task, asked_to_end, ended


class Finish:
    """Ends tasks."""

    def __init__(
        self,
        book: Book,
        engine: Engine,
        holdings: Holdings,
        clock: Clock,
        home: str,
        log: EventLog,
    ) -> None:
        self._book = book
        self._engine = engine
        self._holdings = holdings
        self._clock = clock
        self._home = home
        self._log = log

    async def terminate(self, entry: Entry, reason: str, message: str, timeout: int) -> None:
        """End the task because the server asks; return with everything released.

        ``timeout`` is the seconds its container gets between TERM and KILL.

        Raises ``EngineError`` if the container could not be stopped (the status is unchanged;
        the end is recorded and the background step goes on trying), ``ResourceError`` and
        ``StoreError`` if it was stopped and something else failed.
        """
        entry.handlers += 1
        try:
            stop_by = self._clock.now() + timeout
            change = partial(asked_to_end, reason=reason, message=message, stop_by=stop_by)
            await self._book.change(entry, change, insist=True)
            self._log.info("task.terminate", task=entry.task.id, reason=reason, timeout=timeout)
            if entry.starting:
                entry.cancel_start("the task was terminated")
                await entry.start_done.wait()
            if not (entry.task.terminated and entry.task.released):
                await self._stop(entry, self._grace(entry.task, timeout))
                await self._ended(entry, "", "")
                await self._holdings.release(entry)
            _must_be_saved(entry)
        finally:
            entry.handlers -= 1

    async def remove(self, entry: Entry) -> None:
        """Take a terminated task away: container, directory, and then its place in the book.

        Raises ``TaskNotTerminated``, ``TaskNotFound`` (somebody else was first),
        ``EngineError``, ``ResourceError``, ``StoreError``; the task then stays.
        """
        async with entry.remove_lock:
            if not self._book.holds(entry):  # its id may be another task's by now
                raise TaskNotFound(f"task {entry.task.id} not found")
            if not entry.task.terminated:
                raise TaskNotTerminated(
                    f"task {entry.task.id} is {entry.task.status.value}, not terminated"
                )
            entry.handlers += 1
            try:
                await entry.start_done.wait()
                if not entry.task.released:
                    await self._stop(entry, 0)
                    await self._holdings.release(entry)
                container_id = await self._container_id(entry.task)
                if container_id:
                    await self._engine.remove(container_id)
                await self._book.forget(entry)
                self._log.info("task.removed", task=entry.task.id)
            finally:
                entry.handlers -= 1

    async def abandon(self, entry: Entry, reason: str, message: str) -> None:
        """End a task that cannot go on; what fails is left to the background step."""
        now = self._clock.now()
        change = partial(asked_to_end, reason=reason, message=message, stop_by=now)
        await self._book.change(entry, change, insist=True)
        try:
            await self._stop(entry, 0)
        except EngineError as error:
            self._log.warning("task.stop_failed", task=entry.task.id, error=error)
            return
        await self.end(entry, reason, message)

    async def stop_and_end(self, entry: Entry) -> None:
        """Stop a container that outlived its task, and release; a failure is tried again."""
        try:
            await self._stop(entry, 0)
        except EngineError as error:
            self._log.warning("task.stop_failed", task=entry.task.id, error=error)
            return
        await self.end(entry)

    async def end(self, entry: Entry, reason: str = "", message: str = "") -> None:
        """Give a task whose container cannot be running its last status, and release.

        A reason recorded before stays. What could not be released is tried again later.
        """
        if not entry.task.terminated or entry.task.record.ended_at is None:
            await self._ended(entry, reason, message)
        await self.release(entry)

    async def release(self, entry: Entry) -> None:
        """Release; a failure is logged and tried again by the next round."""
        try:
            await self._holdings.release(entry)
        except (ResourceError, StoreError) as error:
            self._log.error("task.release_failed", task=entry.task.id, error=error)

    async def save(self, entry: Entry) -> None:
        """Write a record that could not be written before; a failure is tried again."""
        await self._book.change(entry, lambda task: task, insist=True)

    async def _ended(self, entry: Entry, reason: str, message: str) -> None:
        was = entry.task.status
        change = partial(ended, reason=reason, message=message, now=self._clock.now())
        task = await self._book.change(entry, change, insist=True)
        if was is not TaskStatus.TERMINATED:
            record = task.record
            self._log.info(
                "task.ended",
                task=task.id,
                was=was.value,
                reason=record.termination_reason,
                message=record.termination_message,
            )

    async def _stop(self, entry: Entry, timeout: int) -> None:
        container_id = await self._container_id(entry.task)
        if container_id:
            await self._engine.stop(container_id, timeout)

    def _grace(self, task: Task, timeout: int) -> int:
        """Seconds left of the shortest grace that was given, maybe before a restart."""
        if task.record.stop_by is None:
            return timeout
        return min(timeout, max(0, math.ceil(task.record.stop_by - self._clock.now())))

    async def _container_id(self, task: Task) -> str:
        """The task's container, "" if it has none.

        A create whose answer was lost leaves the id unknown: then the deterministic name leads
        to it, and the label tells whether it is ours, for a stranger may bear that name.
        """
        if task.container_id:
            return task.container_id
        try:
            container = (await self._engine.inspect(task.container_name)).container
        except ContainerNotFound:
            return ""
        ours = container.task_id == task.id and container.home in (None, self._home)
        return container.id if ours else ""


def _must_be_saved(entry: Entry) -> None:
    if entry.unsaved:
        raise StoreError(
            f"task {entry.task.id} is terminated and released, but its record could not be "
            "written; it will be tried again"
        )
