"""The background step: brings tasks in line with their containers.

Runs once, completely, before the first request is answered, then for as long as the shim
serves. One container list a round for all tasks; a container is inspected only when it is not
running any more. When the list fails nothing changes: unreachable is not dead.

A round comes at once when the engine tells that something happened (``watch.py``), and by itself
in two measures: often while that cannot be relied on or something is left to be done, seldom
otherwise. What is left to be done is known without asking the engine, see :meth:`Step._must_look`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from dstack_shim_contracts.statuses import Reason, TaskStatus

from dstack_shim.clock import Clock
from dstack_shim.engine.container import runner_port_from_labels
from dstack_shim.engine.protocol import Container, Engine
from dstack_shim.errors import (
    ContainerNotFound,
    EngineError,
    EngineUnreachable,
    IllegalTransition,
    StartFailed,
    StoreError,
    TaskNotFound,
)
from dstack_shim.log import EventLog
from dstack_shim.tasks.book import Book, Entry
from dstack_shim.tasks.finish import Finish
from dstack_shim.tasks.outcomes import (
    LAST_LINES,
    Boot,
    Do,
    outcome_of_exit,
    outcome_of_gone,
    outcome_of_unstarted,
    what_to_do,
)
from dstack_shim.tasks.task import Task, advance, found
from dstack_shim.tasks.watch import Watch
from dstack_shim.timing import Timing

_AT_ONCE = 8
"""Tasks worked on at the same time in one round: a burst of ends must not queue up, nor take
every connection to the engine."""

Action = Callable[["Entry", Container | None], Coroutine[Any, Any, None]]


class Step:
    """The background step over all tasks of a book."""

    def __init__(
        self,
        book: Book,
        engine: Engine,
        finish: Finish,
        watch: Watch,
        adopt: Callable[[tuple[Container, ...]], Coroutine[Any, Any, None]],
        settle_gpus: Callable[[], Coroutine[Any, Any, bool]],
        runner_port: int,
        boot: Boot,
        clock: Clock,
        log: EventLog,
    ) -> None:
        self._book = book
        self._engine = engine
        self._finish = finish
        self._watch = watch
        self._adopt = adopt
        self._settle_gpus = settle_gpus
        self._runner_port = runner_port
        self._boot = boot
        self._clock = clock
        self._log = log
        self._engine_lost = False
        self._starts: set[asyncio.Future[None]] = set()
        self._is_unfinished = True
        self.wake = watch.wake
        self.timing = Timing()

    async def run(self, interval: float, quiet: float) -> None:
        """Round after round, never ending.

        At once when :attr:`wake` is set; ``interval`` seconds after the last while there is
        reason to look, ``quiet`` seconds after it if there is none.
        """
        while True:
            await self.round()
            await self._until_due(interval, quiet)

    async def _until_due(self, interval: float, quiet: float) -> None:
        loop = asyncio.get_running_loop()
        listed_at = loop.time()
        alarm: asyncio.TimerHandle

        def tick() -> None:
            nonlocal alarm
            if loop.time() - listed_at >= quiet or self._must_look():
                self.wake.set()
            else:
                alarm = loop.call_later(interval, tick)

        # Not wait_for(): before Python 3.12 it loses a cancellation that comes together
        # with the wake, and the shim could then never stop.
        alarm = loop.call_later(interval, tick)
        try:
            await self.wake.wait()
        finally:
            alarm.cancel()
        self.wake.clear()

    def _must_look(self) -> bool:
        """Whether there is reason to look before long, by what is known without looking."""
        if self._is_unfinished or not self._watch.is_healthy:
            return True
        now = self._clock.now()
        return any(self._asks_for_a_look(entry, now) for entry in self._book)

    def _asks_for_a_look(self, entry: Entry, now: float) -> bool:
        if entry.busy:
            return False  # whoever is at work on it may have more to do than the step
        task, record = entry.task, entry.task.record
        is_settled = task.terminated and task.released and record.ended_at is not None
        in_grace = record.stop_by is not None and now < record.stop_by
        return entry.unsaved or (task.over and not is_settled and not in_grace)

    async def round(self, listed: tuple[Container, ...] | None = None) -> None:
        """One round over all tasks. Never raises but when cancelled.

        ``listed`` is what the engine has just told a restore; without it, it is asked.
        """
        with self.timing.measured(asyncio.get_running_loop().time):
            await self._round(listed)

    async def _round(self, listed: tuple[Container, ...] | None) -> None:
        self._is_unfinished = True
        seen_at = self._book.sequence
        if listed is None:
            listed = await self._list()
        if listed is None:
            return
        await self._adopt_strangers(listed, seen_at)
        are_gpus_settled = await self._settle_gpus()
        by_id = {container.id: container for container in listed}
        by_name = {container.name: container for container in listed}
        limit = asyncio.Semaphore(_AT_ONCE)

        def has_work(entry: Entry) -> bool:
            return entry.unsaved or self._do(entry, container_of(entry)) is not Do.NOTHING

        def is_due(entry: Entry) -> bool:
            # The list tells nothing about a task that moved after it was asked for: a container
            # made meanwhile would look gone.
            return not entry.busy and entry.changed_at <= seen_at and has_work(entry)

        def container_of(entry: Entry) -> Container | None:
            return _container_of(entry.task, by_id, by_name)

        async def one(entry: Entry) -> None:
            async with limit:
                if is_due(entry):  # still, after waiting
                    await self._guarded(entry, container_of(entry))

        await asyncio.gather(*(one(entry) for entry in self._book if is_due(entry)))
        self._is_unfinished = not are_gpus_settled or any(
            has_work(entry) for entry in self._book if not entry.busy
        )
        self._book.forget_removals(seen_at)

    async def _list(self) -> tuple[Container, ...] | None:
        """The containers, None if the engine does not tell."""
        try:
            listed = await self._engine.list_task_containers()
        except EngineError as error:
            if not self._engine_lost:
                self._log.error("engine.lost", error=error)
            self._engine_lost = True
            return None
        if self._engine_lost:
            self._log.info("engine.back", containers=len(listed))
        self._engine_lost = False
        return listed

    async def _adopt_strangers(self, listed: tuple[Container, ...], seen_at: int) -> None:
        if not self._strangers(listed, seen_at):
            return
        # Nobody may submit a stranger's id while it is made known; somebody may have by now.
        async with self._book.submit_lock:
            await self._adopt(self._strangers(listed, seen_at))

    def _strangers(self, listed: tuple[Container, ...], seen_at: int) -> tuple[Container, ...]:
        """Task containers nobody in the book knows: a create that came true after all."""
        return tuple(
            container
            for container in listed
            if container.task_id not in self._book
            and not self._book.removed_since(container.task_id, seen_at)
        )

    async def _guarded(self, entry: Entry, container: Container | None) -> None:
        """Do what is to be done for one task; one broken task never costs its neighbours."""
        try:
            if entry.unsaved:
                await self._finish.save(entry)
            do = self._do(entry, container)
            if do is not Do.NOTHING:
                await self._act(do, entry, container)
        except (EngineUnreachable, IllegalTransition, TaskNotFound) as error:
            # Undecided, or somebody moved or removed the task meanwhile.
            self._log.debug("step.undecided", task=entry.task.id, error=error)
        except (EngineError, StoreError) as error:
            self._log.warning("step.failed", task=entry.task.id, error=error)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not stop the step for all
            self._log.fault("step.broken", error, task=entry.task.id)

    def _do(self, entry: Entry, container: Container | None) -> Do:
        is_behind = (
            container is not None
            and container.state.alive
            and not entry.task.over
            and self._watch.has_told_end(container.id)
        )
        if is_behind:
            return Do.ASK_OUTCOME
        return what_to_do(entry.task, container, self._clock.now(), self._boot)

    async def _act(self, do: Do, entry: Entry, container: Container | None) -> None:
        actions: Mapping[Do, Action] = {
            Do.SHOW_RUNNING: self._show_running,
            Do.ASK_OUTCOME: self._ask_outcome,
            Do.ASK_WHETHER_GONE: self._ask_whether_gone,
            Do.START: self._start,
            Do.END_UNSTARTED: self._end_unstarted,
            Do.STOP: lambda entry, _: self._finish.stop_and_end(entry),
            Do.END: lambda entry, _: self._finish.end(entry),
            Do.RELEASE: lambda entry, _: self._finish.release(entry),
            Do.EXPIRE: lambda entry, _: self._expire(entry),
        }
        await actions[do](entry, container)

    async def _show_running(self, entry: Entry, container: Container | None) -> None:
        assert container is not None
        ports = container.ports if container.network_mode != "host" else ()
        bridge = entry.task.record.config.network_mode == "bridge"
        runner_port = runner_port_from_labels(container.labels) or self._runner_port
        if bridge and not any(port.container == runner_port for port in ports):
            # Reported as running it would make servers talk to host port 10999, perhaps to the
            # runner of another job.
            message = f"no host port for the runner's port {runner_port}"
            return await self._finish.abandon(entry, Reason.EXECUTOR_ERROR, message)
        change = partial(
            advance,
            status=TaskStatus.RUNNING,
            step="running",
            now=self._clock.now(),
            container_id=container.id,
            ports=ports,
        )
        await self._book.change(entry, change)
        self._log.info("task.running", task=entry.task.id, container=container.id)
        return None

    async def _ask_outcome(self, entry: Entry, container: Container | None) -> None:
        assert container is not None
        try:
            details = await self._engine.inspect(container.id)
        except ContainerNotFound:
            return  # it vanished since the list: the next round confirms that
        if details.container.state.alive:
            self._watch.disprove(container.id)  # it was started again: the next list tells
            return
        self._watch.ended(container.id, details.finished_at)
        lines = ""
        if details.exit_code != 0:
            lines = await self._last_lines(container.id)
        outcome = outcome_of_exit(entry.task.record, details, lines, self._boot)
        await self._finish.end(entry, outcome.reason, outcome.message)

    async def _ask_whether_gone(self, entry: Entry, _: Container | None) -> None:
        """Confirm that a container that is not in the list is nowhere: a list may lag."""
        task = entry.task
        try:
            await self._engine.inspect(task.container_id or task.container_name)
        except ContainerNotFound:
            self._watch.ended(task.container_id, None)
            outcome = outcome_of_gone(task.record)
            await self._finish.end(entry, outcome.reason, outcome.message)
        else:
            if not task.container_id:
                # The name belongs to somebody else, or the list is late; either way no proof.
                outcome = outcome_of_gone(task.record)
                await self._finish.abandon(entry, outcome.reason, outcome.message)

    async def _start(self, entry: Entry, container: Container | None) -> None:
        """Start a container a crash left created: the record says that was intended."""
        assert container is not None
        # A start in flight like any other: a terminate that lands now waits for it, and finds
        # the container that it has to stop. And it runs to its end even if the step is stopped.
        entry.start_done.clear()
        start = asyncio.ensure_future(self._start_late(entry, container.id))
        self._starts.add(start)
        start.add_done_callback(self._start_ended)
        await asyncio.shield(start)

    def _start_ended(self, start: asyncio.Future[None]) -> None:
        self._starts.discard(start)
        with suppress(asyncio.CancelledError):
            start.exception()  # seen: whoever waited for it may have been stopped

    async def _start_late(self, entry: Entry, container_id: str) -> None:
        try:
            task = await self._book.change(entry, partial(found, container_id=container_id))
            if task.over:
                return
            self._log.info("container.started_late", task=task.id, container=container_id)
            await self._engine.start(container_id)
            self.wake.set()  # the next round sees it run, with its ports
        except StartFailed as error:
            lines = await self._last_lines(container_id)
            await self._finish.abandon(
                entry, Reason.CONTAINER_EXITED_WITH_ERROR, lines or str(error)
            )
        finally:
            entry.start_done.set()

    async def _end_unstarted(self, entry: Entry, container: Container | None) -> None:
        assert container is not None
        details = await self._engine.inspect(container.id)
        outcome = outcome_of_unstarted(entry.task.record, details)
        await self._finish.end(entry, outcome.reason, outcome.message)

    async def _expire(self, entry: Entry) -> None:
        await self._book.forget(entry)
        self._log.info("task.expired", task=entry.task.id)

    async def _last_lines(self, container_id: str) -> str:
        try:
            return await self._engine.last_lines(container_id, LAST_LINES)
        except EngineUnreachable:
            raise
        except EngineError:
            return ""  # some log drivers cannot be read: the exit code still counts


def _container_of(
    task: Task, by_id: Mapping[str, Container], by_name: Mapping[str, Container]
) -> Container | None:
    if task.container_id:
        return by_id.get(task.container_id)
    # A create whose answer was lost: the name leads to it, the label says whether it is ours.
    named = by_name.get(task.container_name)
    return named if named is not None and named.task_id == task.id else None
