"""Carries out a recovery plan: records set aside, GPUs reserved, tasks known again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import attrs

from dstack_shim.engine.protocol import Container, ContainerDetails, Engine
from dstack_shim.errors import (
    ContainerNotFound,
    EngineError,
    StoreError,
    TaskNotFound,
)
from dstack_shim.log import EventLog
from dstack_shim.records import Records
from dstack_shim.resources.gpus import GpuLocks
from dstack_shim.resources.protocol import Blocking
from dstack_shim.tasks.book import Book
from dstack_shim.tasks.recovery import HostFacts, Plan, Restore, plan
from dstack_shim.tasks.survey import ConfirmKeys, Survey, survey
from dstack_shim.tasks.task import Task, with_gpus


class Restorer:
    """Makes what is on the host known again."""

    def __init__(
        self,
        book: Book,
        engine: Engine,
        records: Records,
        gpus: GpuLocks,
        gpus_of: Callable[[ContainerDetails], tuple[str, ...]],
        confirm_keys: ConfirmKeys,
        blocking: Blocking,
        home: str,
        log: EventLog,
    ) -> None:
        self._book = book
        self._engine = engine
        self._records = records
        self._gpus = gpus
        self._gpus_of = gpus_of
        self._confirm_keys = confirm_keys
        self._blocking = blocking
        self._home = home
        self._log = log

    async def look(self) -> Survey:
        """Read records, containers and host; nothing is changed.

        Raises ``EngineError`` and ``StoreError``.
        """
        return await survey(
            self._records,
            self._engine,
            self._confirm_keys,
            self._blocking,
            self._home,
            self._log,
        )

    async def carry_out(self, todo: Plan) -> None:
        """Do it. One task that cannot be restored never costs another."""
        for line in todo.lines():
            self._log.info("recovery.plan", action=line)
        for item in todo.set_aside:
            try:
                name = await self._blocking(self._records.set_aside, item.dir)
            except StoreError as error:
                self._log.error("record.set_aside_failed", dir=item.dir, error=error)
            else:
                self._log.error("record.damaged", dir=item.dir, kept_as=name, why=item.why)
        for restore in todo.restore:
            await self._restore(restore)

    async def adopt(self, containers: tuple[Container, ...]) -> None:
        """Make tasks of labelled containers nobody knows; those of another home are not ours.

        To be called under the submit lock: an id must not become known twice.
        """
        if containers:
            await self.carry_out(
                attrs.evolve(plan((), containers, self._home, HostFacts()), leave=())
            )
        for container in containers:
            if container.task_id in self._book and not container.state.alive:
                self._book.get(container.task_id).is_leftover = True

    async def settle_gpus(self) -> bool:
        """Ask again which GPUs those tasks have of which nobody could tell; whether all are known."""
        for owner in self._gpus.doubtful:
            entry = self._book.get(owner)
            gpus = await self._ask_gpus(entry.task)
            if gpus is None or owner not in self._gpus.doubtful:
                continue  # still unknown, or released meanwhile
            held = self._reserved(owner, gpus)
            self._gpus.settle(owner)
            with suppress(TaskNotFound):
                await self._book.change(entry, partial(with_gpus, gpus=held), insist=True)
        return not self._gpus.doubtful

    async def _restore(self, restore: Restore) -> None:
        task, gpus = restore.task, restore.gpus
        if not task.container_id and task.dir is not None:
            await self._discard_output(task.dir)
        if gpus is None and not task.released:
            gpus = await self._ask_gpus(task)
            if gpus is None:
                self._gpus.doubt(task.id)
        if gpus:
            task = with_gpus(task, self._reserved(task.id, gpus))
        self._book.add(task)
        self._log.info(
            "task.restored",
            task=task.id,
            status=task.status.value,
            container=task.container_id or "none",
            reason=task.record.termination_reason,
        )

    def _reserved(self, owner: str, gpus: tuple[str, ...]) -> tuple[str, ...]:
        reserved = self._gpus.reserve(owner, gpus)
        for gpu, other in reserved.conflicts.items():
            self._log.error("gpus.conflict", task=owner, gpu=gpu, owner=other)
        if reserved.unknown:
            self._log.warning("gpus.missing", task=owner, gpus=reserved.unknown)
        return reserved.held

    async def _ask_gpus(self, task: Task) -> tuple[str, ...] | None:
        """What the engine says; None: nobody can tell.

        One that only looks idle would be given to a second job: as long as there is a doubt,
        none is given to anybody.
        """
        try:
            return self._gpus_of(await self._engine.inspect(task.container_id))
        except ContainerNotFound:
            return ()
        except EngineError as error:
            self._log.error("gpus.unknown", task=task.id, error=error)
            return None

    async def _discard_output(self, dir: str) -> None:
        try:
            await self._blocking(self._records.discard_output, dir)
        except StoreError as error:
            self._log.warning("record.output_kept", dir=dir, error=error)
