"""The tasks of a host as people see them: records, containers and the shim's word put together.

Pure. With a shim, its word on a status counts. Without one, a task stands where a restart would
find it: that is what :func:`dstack_shim.tasks.recovery.plan` says, which the shim itself goes by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import attrs
from dstack_shim_contracts.api import ImagePullProgress, PortMapping, TaskConfig
from dstack_shim_contracts.record import TaskRecord
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.console.sources import Sources
from dstack_shim.engine.protocol import Container
from dstack_shim.errors import ShimError
from dstack_shim.tasks.recovery import HostFacts, Plan, plan
from dstack_shim.tasks.task import Task


class NoSuchTask(ShimError):
    """No task, or more than one, goes by what was given for an id."""


@attrs.frozen
class TaskView:
    """One task.

    ``since`` is when it came to its status, Unix seconds, None if nobody wrote it down.
    ``hint`` says what its container tells beyond its status, for want of a shim that acts on it.
    """

    id: str
    status: TaskStatus
    record: TaskRecord
    container: Container | None = None
    container_name: str = ""
    dir: str | None = None
    ports: tuple[PortMapping, ...] | None = None
    progress: ImagePullProgress | None = None
    hint: str = ""

    @property
    def config(self) -> TaskConfig:
        """What was asked; as far as its container tells where the record is lost."""
        return self.record.config

    @property
    def since(self) -> float | None:
        """When it came to its status."""
        if self.status is TaskStatus.TERMINATED:
            return self.record.ended_at
        if self.record.intent is not None:
            return self.record.intent.at
        return self.container.created if self.container else None

    @property
    def outcome(self) -> str:
        """How it ended, or what is to be said instead, in one text; "" for nothing."""
        if self.status is not TaskStatus.TERMINATED:
            return self.hint
        reason, message = self.record.termination_reason, self.record.termination_message
        return ": ".join(part for part in (reason or "ended without a reason", message) if part)


def tasks_of(sources: Sources) -> tuple[TaskView, ...]:
    """The tasks: those that go on first, then the newest ends."""
    containers = {container.id: container for container in sources.containers or ()}
    views = {
        item.task.id: _view(item.task, containers.get(item.task.container_id), sources)
        for item in plan_of(sources).restore
    }
    if sources.shim is not None:
        views = _as_the_shim_says(views, sources)
    return tuple(sorted(views.values(), key=_order))


def plan_of(sources: Sources) -> Plan:
    """What a restart would make of records and containers."""
    return plan(sources.found, sources.containers or (), str(sources.home), HostFacts())


def find(tasks: Iterable[TaskView], word: str) -> TaskView:
    """The task that goes by ``word``: its id, else the beginning of one id, else its name.

    Raises :class:`NoSuchTask`.
    """
    known = tuple(tasks)
    for fits in (_has_id, _begins_id, _has_name):
        found = [task for task in known if fits(task, word)]
        if len(found) == 1:
            return found[0]
        if found:
            few = ", ".join(task.id for task in found[:5])
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise NoSuchTask(f"{word[:100]!r} fits {len(found)} tasks: {few}{more}")
    raise NoSuchTask(f"no task has the id or name {word[:100]!r}; dstack-shim ps lists them")


def short_ids(ids: Sequence[str], least: int = 8) -> Mapping[str, str]:
    """For each id the beginning that tells it from all others, at least ``least`` characters."""
    ordered = sorted(set(ids))
    shared = dict.fromkeys(ordered, 0)
    for one, other in pairwise(ordered):
        same = _shared(one, other)
        shared[one], shared[other] = max(shared[one], same), max(shared[other], same)
    return {task_id: task_id[: max(least, shared[task_id] + 1)] for task_id in ordered}


def _shared(one: str, other: str) -> int:
    """How many characters they have in common from the beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _view(task: Task, container: Container | None, sources: Sources) -> TaskView:
    return TaskView(
        id=task.id,
        status=task.status,
        record=task.record,
        container=container,
        container_name=task.container_name,
        dir=task.dir,
        ports=task.ports if container is not None else None,
        hint=_hint(task, container, sources),
    )


def _as_the_shim_says(views: Mapping[str, TaskView], sources: Sources) -> dict[str, TaskView]:
    assert sources.shim is not None
    told = {}
    for item in sources.shim.tasks:
        view = views.get(item.id) or TaskView(item.id, item.status, _unknown(item.id))
        told[item.id] = attrs.evolve(
            view, status=item.status, progress=sources.shim.progress.get(item.id), hint=""
        )
    return told


def _unknown(task_id: str) -> TaskRecord:
    return TaskRecord(id=task_id, config=TaskConfig(id=task_id))


def _hint(task: Task, container: Container | None, sources: Sources) -> str:
    if not sources.engine_answers or task.status is not TaskStatus.RUNNING:
        return ""
    if container is None:
        return "its container is gone"
    return "" if container.state.alive else f"its container is {container.state.value}"


def _order(task: TaskView) -> tuple[bool, float, str]:
    return task.status is TaskStatus.TERMINATED, -(task.since or 0.0), task.id


def _has_id(task: TaskView, word: str) -> bool:
    return task.id == word


def _begins_id(task: TaskView, word: str) -> bool:
    return word != "" and task.id.startswith(word)


def _has_name(task: TaskView, word: str) -> bool:
    return word != "" and word in (task.config.name, task.container_name)
