"""The core as the API sees it: submit, list, info, terminate, remove; and its start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from dstack_shim_contracts.api import TaskConfig, TaskInfo, TaskListItem
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.clock import Clock
from dstack_shim.errors import ShuttingDown, TaskExists
from dstack_shim.log import EventLog
from dstack_shim.records import Records
from dstack_shim.resources.protocol import Blocking
from dstack_shim.tasks.book import Book, Entry
from dstack_shim.tasks.finish import Finish
from dstack_shim.tasks.outcomes import Boot
from dstack_shim.tasks.restore import Restorer
from dstack_shim.tasks.start import Starter
from dstack_shim.tasks.step import Step
from dstack_shim.tasks.task import new_task
from dstack_shim.tasks.watch import Watch
from dstack_shim.timing import Timing

T = TypeVar("T")


class Core:
    """All a shim does with tasks, whoever asks and whatever it runs on."""

    def __init__(
        self,
        book: Book,
        records: Records,
        starter: Starter,
        finish: Finish,
        step: Step,
        watch: Watch,
        restorer: Restorer,
        blocking: Blocking,
        boot: Boot,
        clock: Clock,
        written_by: str,
        log: EventLog,
    ) -> None:
        self.book = book
        self.step = step
        self._records = records
        self._starter = starter
        self._finish = finish
        self._watch = watch
        self._restorer = restorer
        self._blocking = blocking
        self._boot = boot
        self._clock = clock
        self._written_by = written_by
        self._log = log
        self._held = False
        self.restore_timing = Timing()
        self._running: set[asyncio.Task[Any]] = set()

    async def restore(self) -> None:
        """Make what is on the host known again and run the first background step.

        To be awaited before the first request is answered.

        Raises ``EngineError`` and ``StoreError``.
        """
        with self.restore_timing.measured(asyncio.get_running_loop().time):
            seen = await self._restorer.look()
            await self._restorer.carry_out(seen.plan())
            await self.step.round(seen.containers)

    @property
    def hears_of_ends(self) -> bool:
        """Whether the engine's events can be relied on at the moment."""
        return self._watch.is_healthy

    async def attend(self, interval: float, quiet: float) -> None:
        """Follow the engine's events and run the background step, until cancelled.

        When this has ended nothing of it is open any more. See :meth:`Step.run` for the seconds.
        """
        watch = asyncio.ensure_future(self._watch.run())
        try:
            await self.step.run(interval, quiet)
        finally:
            watch.cancel()
            await asyncio.wait((watch,))

    async def submit(self, config: TaskConfig) -> None:
        """Accept a task; return once its record is on disk. Its start goes on by itself.

        Raises ``TaskExists``, ``ShuttingDown``, ``StoreError``; nothing is left then.
        """
        async with self.book.submit_lock:
            if self._held:
                raise ShuttingDown("the shim is shutting down; submit again when it is back")
            await self._make_way(config.id)
            config = config.with_defaults()
            task = new_task(
                config,
                container_name(config.name, config.id),
                boot_id=self._boot.id,
                now=self._clock.now(),
                written_by=self._written_by,
            )
            assert task.dir is not None
            await self._blocking(self._records.create, task.dir, task.record)
            entry = self.book.add(task)
            entry.start_done.clear()
        self._log.info("task.submitted", task=config.id, image=config.image_name)
        self.spawn(self._start(entry, config))

    async def _start(self, entry: Entry, config: TaskConfig) -> None:
        await self._starter.run(entry, config)
        # While it was being started the step left it alone, and may have been told of its end.
        self.step.wake.set()

    async def _make_way(self, task_id: str) -> None:
        """See to it that the id is free: only a leftover goes, as it would by its name.

        Raises ``TaskExists``, and whatever keeps the leftover from being removed.
        """
        if task_id not in self.book:
            return
        entry = self.book.get(task_id)
        if not entry.is_leftover:
            raise TaskExists(f"task {task_id} is already submitted")
        self._log.info("task.leftover_removed", task=task_id)
        await self._finish.terminate(entry, "", "", 0)
        await self._finish.remove(entry)

    def list(self) -> tuple[TaskListItem, ...]:
        """Every known task with its status, in the order they became known."""
        return tuple(TaskListItem(entry.task.id, entry.task.status) for entry in self.book)

    def info(self, task_id: str) -> TaskInfo:
        """One task.

        Raises ``TaskNotFound``.
        """
        return _info(self.book.get(task_id))

    async def terminate(self, task_id: str, reason: str, message: str, timeout: int) -> TaskInfo:
        """End a task; see :meth:`Finish.terminate` for the errors, and ``TaskNotFound``."""
        entry = self.book.get(task_id)
        await self._finish.terminate(entry, reason, message, timeout)
        return _info(entry)

    async def remove(self, task_id: str) -> None:
        """Take a terminated task away; see :meth:`Finish.remove` for the errors."""
        await self._finish.remove(self.book.get(task_id))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` to its end even if whoever asked for it goes away."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def hold(self) -> None:
        """Accept no task from now on."""
        self._held = True

    def admit(self) -> None:
        """Accept tasks again."""
        self._held = False

    async def hold_if(self, safe: frozenset[TaskStatus]) -> tuple[TaskListItem, ...]:
        """Accept no task from now on if all that are known are in one of these statuses.

        Else return the others, and go on. Decided under the lock that submits take: none is
        accepted between the look and the hold.
        """
        async with self.book.submit_lock:
            unsafe = tuple(item for item in self.list() if item.status not in safe)
            if not unsafe:
                self.hold()
            return unsafe

    async def drain(self, limit: float) -> None:
        """Accept nothing new, stop the pulls, and give what is under way ``limit`` seconds.

        A pull that is cut short ends its task with a recorded reason; what is not done in time
        is left to the restart, as after a crash.
        """
        self.hold()
        async with self.book.submit_lock:
            pass  # a submit under way is accepted, and its start is among those that are stopped
        for entry in self.book:
            if entry.starting:
                entry.cancel_start("the shim was stopped")
        if self._running:
            self._log.info("core.draining", tasks=len(self._running))
            await asyncio.wait(tuple(self._running), timeout=limit)


def _info(entry: Entry) -> TaskInfo:
    return entry.task.info(entry.progress)
