"""Starting a task: prepare → pull → create → start, and return.

Nothing here waits for the container. While a start is in flight it alone owns the task's
resources. Each step is written down before it is taken, so that after a crash the record says
how far it came and what to give back. A terminate that lands meanwhile is seen at the next
change (which refuses to move a task whose end is decided) and, in a pull, within a second.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import BinaryIO, Protocol

from dstack_shim_contracts.api import ImagePullProgress, PortMapping, TaskConfig
from dstack_shim_contracts.statuses import Reason, TaskStatus

from dstack_shim.clock import Clock
from dstack_shim.engine.protocol import (
    ContainerSpec,
    Credentials,
    Engine,
)
from dstack_shim.errors import (
    ContainerNotFound,
    EngineError,
    EngineUnreachable,
    IllegalTransition,
    NameConflict,
    PullCancelled,
    ShimError,
    StartFailed,
    StoreError,
)
from dstack_shim.log import EventLog
from dstack_shim.resources.protocol import Blocking
from dstack_shim.tasks.book import Book, Entry
from dstack_shim.tasks.finish import Finish
from dstack_shim.tasks.holdings import Holdings
from dstack_shim.tasks.outcomes import LAST_LINES
from dstack_shim.tasks.task import Task, advance, found

OpenPullLog = Callable[[str], BinaryIO]
"""Opens the file of a task directory that takes the raw pull stream. Blocks."""


class Recipe(Protocol):
    """How a container is made from a task; the daemon binds it to the engine's and host's facts."""

    runner_port: int

    async def specify(self, task: Task) -> ContainerSpec:
        """The whole container for ``task``.

        Raises ``ShimError`` where this host cannot run it (runner missing or too old).
        """
        ...

    def retry(self, spec: ContainerSpec, error: StartFailed) -> ContainerSpec | None:
        """The container to try instead after ``error``, None to give up."""
        ...

    async def must_pull(self, image: str) -> bool:
        """Whether the image has to be fetched, or a local one serves."""
        ...


class Starter:
    """Starts tasks, one asyncio task each."""

    def __init__(
        self,
        book: Book,
        engine: Engine,
        holdings: Holdings,
        finish: Finish,
        recipe: Recipe,
        open_pull_log: OpenPullLog,
        blocking: Blocking,
        clock: Clock,
        home: str,
        log: EventLog,
    ) -> None:
        self._book = book
        self._engine = engine
        self._holdings = holdings
        self._finish = finish
        self._recipe = recipe
        self._open_pull_log = open_pull_log
        self._blocking = blocking
        self._clock = clock
        self._home = home
        self._log = log

    async def run(self, entry: Entry, config: TaskConfig) -> None:
        """Start the task; ``config`` still has its registry credentials. Never raises.

        The caller has cleared ``entry.start_done``; it is set when this returns.
        """
        try:
            await self._steps(entry, config)
        except IllegalTransition:
            # Its end was decided meanwhile. Who decided it waits for us, then stops the
            # container and releases; should they be gone, the background step does.
            self._log.info("start.abandoned", task=entry.task.id, status=entry.task.status.value)
        except Exception as error:  # noqa: BLE001 - a fault of ours must end this task, not the daemon
            self._log.fault("start.broken", error, task=entry.task.id)
            await self._end(entry, Reason.EXECUTOR_ERROR, f"internal error: {error!r}")
        finally:
            entry.start_done.set()

    async def _steps(self, entry: Entry, config: TaskConfig) -> None:
        steps: tuple[tuple[str, Callable[[], Awaitable[None]]], ...] = (
            (Reason.EXECUTOR_ERROR, partial(self._prepare, entry)),
            (Reason.CREATING_CONTAINER_ERROR, partial(self._pull, entry, config)),
            (Reason.CREATING_CONTAINER_ERROR, partial(self._create_and_start, entry)),
        )
        for reason, step in steps:
            try:
                await step()
            except IllegalTransition:
                raise
            except StartFailed as error:
                lines = await self._last_lines(entry)
                message = lines or str(error)
                return await self._end(entry, Reason.CONTAINER_EXITED_WITH_ERROR, message)
            except _Undecided as error:
                self._log.warning("start.undecided", task=entry.task.id, error=error)
                return None
            except PullCancelled:
                if entry.task.over:
                    return None
                message = f"interrupted while pulling: {entry.cancelled_because}"
                return await self._end(entry, Reason.EXECUTOR_ERROR, message)
            except StoreError as error:
                return await self._end(entry, Reason.EXECUTOR_ERROR, str(error))
            except ShimError as error:
                return await self._end(entry, reason, str(error))
        return None

    async def _end(self, entry: Entry, reason: str, message: str) -> None:
        self._log.warning("start.failed", task=entry.task.id, reason=reason, message=message)
        await self._finish.abandon(entry, reason, message)

    async def _prepare(self, entry: Entry) -> None:
        await self._advance(entry, TaskStatus.PREPARING, "preparing")
        await self._holdings.acquire(entry)

    async def _pull(self, entry: Entry, config: TaskConfig) -> None:
        await self._advance(entry, TaskStatus.PULLING, "pulling")
        if not await self._recipe.must_pull(config.image_name):
            return
        self._log.info("pull.started", task=entry.task.id, image=config.image_name)
        credentials = None
        if config.registry_username or config.registry_password:
            credentials = Credentials(config.registry_username, config.registry_password)

        def progress(now: ImagePullProgress) -> None:
            entry.progress = now

        assert entry.task.dir is not None  # a submitted task has one from its first record on
        sink = await self._blocking(self._open_pull_log, entry.task.dir)
        try:
            await self._engine.pull(config.image_name, credentials, sink, progress, entry.cancel)
        finally:
            await self._blocking(sink.close)
        self._log.info("pull.finished", task=entry.task.id, image=config.image_name)

    async def _create_and_start(self, entry: Entry) -> None:
        task = await self._advance(entry, TaskStatus.CREATING, "creating")
        spec = await self._recipe.specify(task)
        try:
            await self._start(await self._created(entry, spec))
        except StartFailed as error:
            other = self._recipe.retry(spec, error)
            if other is None:
                raise
            self._log.warning("start.retried", task=task.id, error=error)
            await self._engine.remove(entry.task.container_id)
            await self._book.change(entry, partial(found, container_id=""))
            await self._start(await self._created(entry, other))
        await self.show_running(entry)

    async def _created(self, entry: Entry, spec: ContainerSpec) -> str:
        """Create the container, and write down that it is to be started."""
        container_id = await self._create(entry, spec)
        # First of all known as the task's own: if its end is decided by now, the next line
        # raises, and whoever ends the task must find this container and no earlier one.
        await self._book.change(entry, partial(found, container_id=container_id))
        await self._advance(entry, TaskStatus.CREATING, "starting")
        return container_id

    async def _create(self, entry: Entry, spec: ContainerSpec) -> str:
        """Create the container, taking back the name from a lost attempt of our own."""
        try:
            return await self._engine.create(spec)
        except NameConflict as conflict:
            try:
                ref = conflict.container_id or spec.name
                other = (await self._engine.inspect(ref)).container
            except ContainerNotFound:
                return await self._engine.create(spec)
            if other.task_id != entry.task.id or other.home not in (None, self._home):
                raise NameConflict(
                    f"the name {spec.name} belongs to container {other.id[:12]}, which is not "
                    f"of this task"
                ) from conflict
        # The engine finished a create whose answer we never saw: replaced, never run twice.
        self._log.warning("container.replaced", task=entry.task.id, container=other.id)
        await self._engine.remove(other.id)
        return await self._engine.create(spec)

    async def _start(self, container_id: str) -> None:
        try:
            await self._engine.start(container_id)
        except EngineUnreachable as error:
            # It may run or not: only the engine can tell, so the background step asks it.
            raise _Undecided(str(error)) from error

    async def show_running(self, entry: Entry) -> None:
        """Report the task as running, with its ports.

        In bridge mode a missing mapping makes a server talk to host port 10999, perhaps to
        another job's runner: then the task stays as it is and the background step decides.
        """
        task = entry.task
        ports: tuple[PortMapping, ...] = ()
        if task.record.config.network_mode == "bridge":
            try:
                ports = (await self._engine.inspect(task.container_id)).container.ports
            except EngineError as error:
                raise _Undecided(str(error)) from error
            if not any(port.container == self._recipe.runner_port for port in ports):
                raise _Undecided(f"no host port for the runner's {self._recipe.runner_port}")
        try:
            await self._advance(entry, TaskStatus.RUNNING, "running", ports=ports)
        except StoreError as error:
            raise _Undecided(str(error)) from error
        self._log.info("task.running", task=task.id, container=task.container_id)

    async def _last_lines(self, entry: Entry) -> str:
        try:
            return await self._engine.last_lines(entry.task.container_id, LAST_LINES)
        except EngineError:
            return ""

    async def _advance(
        self,
        entry: Entry,
        status: TaskStatus,
        step: str,
        *,
        ports: tuple[PortMapping, ...] | None = None,
    ) -> Task:
        change = partial(
            advance,
            status=status,
            step=step,
            now=self._clock.now(),
            ports=ports,
        )
        return await self._book.change(entry, change)


class _Undecided(Exception):
    """Nobody can say yet whether the container runs: left to the background step."""
