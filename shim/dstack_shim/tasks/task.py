"""One task: an immutable value, and the changes that may happen to it.

A change is a function from task to task. It is applied under the task's lock, after its record
is on disk, or not at all (see :mod:`dstack_shim.tasks.book`).
"""

from __future__ import annotations

from enum import Enum

import attrs
from dstack_shim_contracts.api import ImagePullProgress, PortMapping, TaskConfig, TaskInfo
from dstack_shim_contracts.record import Intent, TaskRecord
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.errors import IllegalTransition


class Saving(Enum):
    """What lies on disk for a task, and so whether a change of it is written."""

    WRITTEN = "written"
    """A record: every change is written before it counts."""
    ON_CHANGE = "on change"
    """Nothing yet (a container older than records): the first change makes the record."""
    HANDS_OFF = "hands off"
    """A record of a newer shim, unreadable here: it is never overwritten."""


@attrs.frozen
class Task:
    """One task as the shim knows it.

    ``dir`` is the name of its directory below ``runners/``, None while it has none. ``record``
    is what outlives the shim; the rest is read from the container or is gone with the process.
    """

    record: TaskRecord
    status: TaskStatus
    container_name: str
    dir: str | None = None
    saving: Saving = Saving.WRITTEN
    container_id: str = ""
    ports: tuple[PortMapping, ...] | None = None

    @property
    def id(self) -> str:
        """The id the server gave it."""
        return self.record.id

    @property
    def over(self) -> bool:
        """Whether its end is decided, even if its container has still to be stopped."""
        return self.record.terminated or self.record.termination_reason != ""

    @property
    def released(self) -> bool:
        """Whether it holds nothing on this host any more."""
        return self.record.cleaned_up

    @property
    def terminated(self) -> bool:
        """Whether its status, as the server sees it, is the last one."""
        return self.status is TaskStatus.TERMINATED

    @property
    def step(self) -> str:
        """How far its start came, in the words of its record; "" if nobody wrote it down."""
        return self.record.intent.step if self.record.intent else ""

    def info(self, progress: ImagePullProgress | None = None) -> TaskInfo:
        """The task as the API tells it, with the progress of its image's pull."""
        return TaskInfo(
            id=self.id,
            status=self.status,
            termination_reason=self.record.termination_reason,
            termination_message=self.record.termination_message,
            ports=self.ports,
            image_pull_progress=progress,
            container_name=self.container_name,
            container_id=self.container_id,
            gpus_ids=self.record.gpus or (),
        )


def new_task(
    config: TaskConfig, container_name: str, *, boot_id: str | None, now: float, written_by: str
) -> Task:
    """A task just submitted, before anything is on disk."""
    record = TaskRecord(
        id=config.id,
        config=config.without_credentials(),
        intent=Intent(step="preparing", at=now),
        boot_id=boot_id,
        written_by=written_by,
    )
    return Task(record, TaskStatus.PENDING, container_name, dir=container_name)


def advance(
    task: Task,
    status: TaskStatus,
    step: str,
    now: float,
    *,
    container_id: str = "",
    ports: tuple[PortMapping, ...] | None = None,
) -> Task:
    """The task one step further into its start.

    Raises ``IllegalTransition`` once its end is decided: whoever starts it stops there.
    """
    if task.over:
        raise IllegalTransition(f"task {task.id} is terminated: it does not become {status.value}")
    return attrs.evolve(
        task,
        status=status,
        record=attrs.evolve(task.record, intent=Intent(step=step, at=now)),
        container_id=container_id or task.container_id,
        ports=task.ports if ports is None else ports,
    )


def found(task: Task, container_id: str) -> Task:
    """The task with this container as its own, "" for none."""
    return attrs.evolve(task, container_id=container_id)


def with_gpus(task: Task, gpus: tuple[str, ...]) -> Task:
    """The task with these GPUs written down as its own."""
    return attrs.evolve(task, record=attrs.evolve(task.record, gpus=gpus))


def asked_to_end(task: Task, reason: str, message: str, stop_by: float) -> Task:
    """The task with its end decided from outside; its container may still have to be stopped.

    The first non-empty reason stays, with its message; asked when it has ended already, that is
    all there is to note. ``stop_by`` (unix seconds) is until when
    the container may take its time; asked twice, the earlier one counts.
    """
    record = task.record
    if not record.termination_reason:
        record = attrs.evolve(record, termination_reason=reason, termination_message=message)
    if task.terminated:
        return attrs.evolve(task, record=attrs.evolve(record, terminated=True))
    if record.stop_by is not None:
        stop_by = min(stop_by, record.stop_by)
    return attrs.evolve(task, record=attrs.evolve(record, terminated=True, stop_by=stop_by))


def ended(task: Task, reason: str, message: str, now: float) -> Task:
    """The task at its last status, with the outcome seen unless one was recorded before."""
    record = task.record
    if not task.over:
        record = attrs.evolve(record, termination_reason=reason, termination_message=message)
    record = attrs.evolve(
        record,
        terminated=True,
        stop_by=None,
        ended_at=now if record.ended_at is None else record.ended_at,
    )
    return attrs.evolve(task, record=record, status=TaskStatus.TERMINATED)


def released(task: Task) -> Task:
    """The task holding nothing; its record still says which GPUs it had, for the API."""
    return attrs.evolve(task, record=attrs.evolve(task.record, cleaned_up=True))
