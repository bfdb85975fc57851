"""Bugs planted into the core, each the loss of one rule; the simulation must find every one.

None of them is far-fetched: each is a line somebody could leave out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest

from dstack_shim.engine.protocol import Container
from dstack_shim.errors import EngineError, EngineUnreachable
from dstack_shim.resources.gpus import GpuLocks
from dstack_shim.tasks import finish, holdings, outcomes, recovery, step, survey
from dstack_shim.tasks import task as tasks
from dstack_shim.tasks.book import Book, Entry
from dstack_shim.tasks.recovery import Plan
from dstack_shim.tasks.task import Task
from tests.simulation.engine import EngineClient

Plant = Callable[[pytest.MonkeyPatch], None]


def answers_before_the_flush(patch: pytest.MonkeyPatch) -> None:
    """Acknowledge after flush: the record of a change is written some time later."""
    written = Book._saved

    async def saved(self: Book, entry: Entry, task: Task, *, insist: bool) -> Task:
        later = asyncio.ensure_future(written(self, entry, task, insist=True))
        later.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    patch.setattr(Book, "_saved", saved)


def goes_on_without_a_record(patch: pytest.MonkeyPatch) -> None:
    """Row 1: a failed write of the record is logged, then things are taken all the same."""
    real = Book.change

    async def change(self: Book, entry: Entry, change: Any, *, insist: bool = False) -> Task:
        return await real(self, entry, change, insist=True)

    patch.setattr(Book, "change", change)


def takes_unreachable_for_dead(patch: pytest.MonkeyPatch) -> None:
    """Unreachable is not dead: an engine that does not answer has no containers."""

    async def listed(self: EngineClient) -> tuple[Container, ...]:
        try:
            return await real_list(self)
        except EngineError:
            return ()

    async def gone(self: step.Step, entry: Entry, container: Container | None) -> None:
        try:
            await real_ask(self, entry, container)
        except EngineUnreachable:
            await self._finish.end(entry, "executor_error", "container not found")

    real_list, real_ask = EngineClient.list_task_containers, step.Step._ask_whether_gone
    patch.setattr(EngineClient, "list_task_containers", listed)
    patch.setattr(step.Step, "_ask_whether_gone", gone)


def does_not_wait_for_a_start(patch: pytest.MonkeyPatch) -> None:
    """One release: a terminate does not see that a start is in flight."""
    patch.setattr(Entry, "starting", property(lambda self: False))


def forgets_tombstones(patch: pytest.MonkeyPatch) -> None:
    """Row 6: a record without a container is dropped, as dstack's own shim does."""
    real = recovery.plan

    def plan(*args: Any) -> Plan:
        made = real(*args)
        kept = tuple(item for item in made.restore if item.task.container_id)
        return attrs.evolve(made, restore=kept)

    patch.setattr(survey, "plan", plan)


def does_not_look_at_the_boot(patch: pytest.MonkeyPatch) -> None:
    """Row 8: a reboot looks like a restart."""
    patch.setattr(outcomes, "rebooted", lambda record, boot: False)


def forgets_who_else_needs_it(patch: pytest.MonkeyPatch) -> None:
    """A mount or key that another live task needs stays: here nobody asks the others."""
    patch.setattr(holdings.Holdings, "_others", lambda self, entry: ())


def gives_back_what_another_holds(patch: pytest.MonkeyPatch) -> None:
    """Release names its owner: here all GPUs are given back, whoever has them."""
    patch.setattr(GpuLocks, "release", lambda self, owner: self._owner_of.clear())


def replaces_a_recorded_reason(patch: pytest.MonkeyPatch) -> None:
    """The first reason stays: here the outcome seen last does."""
    real = tasks.ended

    def ended(task: Task, reason: str, message: str, now: float) -> Task:
        record = attrs.evolve(task.record, termination_reason=reason, termination_message=message)
        return real(attrs.evolve(task, record=record) if reason else task, reason, message, now)

    patch.setattr(finish, "ended", ended)


def forgets_a_grace(patch: pytest.MonkeyPatch) -> None:
    """The time left of a graceful stop is kept across a restart: here it is not."""
    real = outcomes.what_to_do

    def what_to_do(task: Task, *args: Any) -> outcomes.Do:
        record = attrs.evolve(task.record, stop_by=None)
        return real(attrs.evolve(task, record=record), *args)

    patch.setattr(step, "what_to_do", what_to_do)


def acts_on_an_old_list(patch: pytest.MonkeyPatch) -> None:
    """The step leaves a task alone that moved since the list was asked for: here it does not."""
    patch.setattr(
        Entry, "changed_at", property(lambda self: -1, lambda self, value: None), raising=False
    )


def releases_before_it_stops(patch: pytest.MonkeyPatch) -> None:
    """Released only once the container cannot be running: here it is stopped afterwards."""
    real: Callable[..., Awaitable[None]] = finish.Finish._stop

    async def stop(self: finish.Finish, entry: Entry, timeout: int) -> None:
        await self.release(entry)
        await real(self, entry, timeout)

    patch.setattr(finish.Finish, "_stop", stop)


PLANTS: tuple[Plant, ...] = (
    answers_before_the_flush,
    goes_on_without_a_record,
    takes_unreachable_for_dead,
    does_not_wait_for_a_start,
    forgets_tombstones,
    does_not_look_at_the_boot,
    forgets_who_else_needs_it,
    gives_back_what_another_holds,
    replaces_a_recorded_reason,
    forgets_a_grace,
    acts_on_an_old_list,
    releases_before_it_stops,
)
