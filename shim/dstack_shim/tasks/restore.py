"""Carries out a recovery plan: records set aside, GPUs reserved, tasks known again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import attrs

from dstack_shim.engine.protocol import Container, ContainerDetails, Engine
from dstack_shim.errors import ContainerNotFound, EngineError, StoreError
from dstack_shim.log import EventLog
from dstack_shim.records import Records
from dstack_shim.tasks.book import Blocking, Book
from dstack_shim.tasks.recovery import HostFacts, Plan, Restore, plan, untrusted_users
from dstack_shim.tasks.task import Task, with_gpus


class Reservations(Protocol):
    """Where GPUs are locked again for the tasks that had them."""

    def reserve(self, owner: str, ids: Iterable[str]) -> tuple[str, ...]:
        """Lock these for ``owner``; return those that another task holds already."""

    def reserve_unknown(self, owner: str) -> None:
        """Nobody can tell which GPUs ``owner`` has: give out none until somebody can."""


KeyCensus = Callable[[frozenset[str]], "dict[str, frozenset[str]]"]
"""For each of these users, the public keys on our lines of their authorized_keys. Blocks."""


class Restorer:
    """Makes what is on the host known again."""

    def __init__(
        self,
        book: Book,
        engine: Engine,
        records: Records,
        reservations: Reservations,
        gpus_of: Callable[[ContainerDetails], tuple[str, ...]],
        key_census: KeyCensus,
        blocking: Blocking,
        home: str,
        log: EventLog,
    ) -> None:
        self._book = book
        self._engine = engine
        self._records = records
        self._reservations = reservations
        self._gpus_of = gpus_of
        self._key_census = key_census
        self._blocking = blocking
        self._home = home
        self._log = log

    async def plan(self) -> Plan:
        """Read records, containers and host, and say what to do; nothing is changed.

        Raises ``EngineError`` and ``StoreError``.
        """
        # Records first: a container made by nobody else meanwhile is impossible (the home is
        # locked), and a record without its container would only be looked at once more.
        found = await self._blocking(self._records.scan)
        containers = await self._engine.list_task_containers()
        marked = await self._blocking(self._key_census, untrusted_users(found))
        return plan(found, containers, self._home, HostFacts(marked))

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
        """Make tasks of labelled containers nobody knows; those of another home are not ours."""
        if containers:
            await self.carry_out(
                attrs.evolve(plan((), containers, self._home, HostFacts()), leave=())
            )

    async def _restore(self, restore: Restore) -> None:
        task, gpus = restore.task, restore.gpus
        if not task.container_id and task.dir is not None:
            await self._discard_output(task.dir)
        if gpus is None and not task.released:
            gpus = await self._ask_gpus(task)
        if gpus:
            conflicts = self._reservations.reserve(task.id, gpus)
            if conflicts:
                self._log.error("gpus.conflict", task=task.id, gpus=conflicts)
            task = with_gpus(task, tuple(gpu for gpu in gpus if gpu not in conflicts))
        self._book.add(task)
        self._log.info(
            "task.restored",
            task=task.id,
            status=task.status.value,
            container=task.container_id or "none",
            reason=task.record.termination_reason,
        )

    async def _ask_gpus(self, task: Task) -> tuple[str, ...]:
        try:
            return self._gpus_of(await self._engine.inspect(task.container_id))
        except ContainerNotFound:
            return ()
        except EngineError as error:
            # GPUs that only look free would be given to a second job.
            self._log.error("gpus.unknown", task=task.id, error=error)
            self._reservations.reserve_unknown(task.id)
            return ()

    async def _discard_output(self, dir: str) -> None:
        try:
            await self._blocking(self._records.discard_output, dir)
        except StoreError as error:
            self._log.warning("record.output_kept", dir=dir, error=error)
