"""What a container's state means for its task: the tables of the background step, as functions.

Pure: no I/O, no clock. The rules hold for a task in any status once no start of it is in
flight, so one table serves the running daemon and the first step after a crash.
"""

from __future__ import annotations

from enum import Enum

import attrs
from dstack_shim_contracts.record import TaskRecord
from dstack_shim_contracts.statuses import Reason, TaskStatus

from dstack_shim.engine.container import LABEL_INTENT, START
from dstack_shim.engine.protocol import Container, ContainerDetails, ContainerState
from dstack_shim.tasks.task import Task

LAST_LINES = 5
"""Lines of output that go into the message of a job that failed."""
FRESH = 60.0
"""Seconds after its creation that a never-started container may still be started. Later the
server may have placed the job elsewhere, and two writers on one volume are worse than a failed
job."""
TOMBSTONE_KEPT = 7 * 24 * 3600.0
"""Seconds a task without a container stays known after its end, if nobody removes it."""


@attrs.frozen
class Boot:
    """Which boot of the host this is: the kernel's id, and when it began (unix seconds).

    ``earlier`` are those before it that somebody noted, oldest first.
    """

    id: str | None
    started_at: float
    earlier: tuple[Boot, ...] = ()


@attrs.frozen
class Outcome:
    """How a task ended, in the server's words."""

    reason: str
    message: str


class Do(str, Enum):
    """What the background step has to do for one task."""

    NOTHING = "nothing"
    SHOW_RUNNING = "show as running"
    ASK_OUTCOME = "ask the engine how it ended"
    ASK_WHETHER_GONE = "ask the engine whether it is gone"
    START = "start its container"
    END_UNSTARTED = "end it: its container never started"
    STOP = "stop its container"
    END = "end it with the recorded reason"
    RELEASE = "release what it holds"
    EXPIRE = "forget it"


def what_to_do(task: Task, container: Container | None, now: float, boot: Boot) -> Do:
    """What one round of the background step does for a task nobody else is busy with."""
    if task.over:
        return _for_decided(task, container, now)
    if container is None:
        return Do.ASK_WHETHER_GONE
    if container.state.alive:
        return Do.NOTHING if task.status is TaskStatus.RUNNING else Do.SHOW_RUNNING
    if container.state.finished:
        return Do.ASK_OUTCOME
    if container.state is ContainerState.CREATED:
        return Do.START if _may_start(task, container, now, boot) else Do.END_UNSTARTED
    return Do.NOTHING  # a state this shim does not know says nothing: never end a task on it


def _for_decided(task: Task, container: Container | None, now: float) -> Do:
    alive = container is not None and not (
        container.state.finished or container.state is ContainerState.CREATED
    )
    if alive:
        # Its grace may have been given before a restart: what is left of it still holds.
        in_grace = task.record.stop_by is not None and now < task.record.stop_by
        return Do.NOTHING if in_grace else Do.STOP
    if not task.terminated or task.record.ended_at is None:
        return Do.END
    if not task.released:
        return Do.RELEASE
    if container is None and _expired(task.record, now):
        return Do.EXPIRE
    return Do.NOTHING


def _expired(record: TaskRecord, now: float) -> bool:
    return record.ended_at is not None and record.ended_at + TOMBSTONE_KEPT < now


def _may_start(task: Task, container: Container, now: float, boot: Boot) -> bool:
    intent = task.record.intent
    if intent is None or intent.step not in ("creating", "starting") or task.released:
        return False
    if container.created < boot.started_at or rebooted(task.record, boot):
        return False
    return intent.handover or now - container.created < FRESH


def rebooted(record: TaskRecord, boot: Boot) -> bool:
    """Whether the host was restarted since the record was written; unknown counts as no."""
    return None not in (record.boot_id, boot.id) and record.boot_id != boot.id


def outcome_of_exit(
    record: TaskRecord, details: ContainerDetails, last_lines: str, boot: Boot
) -> Outcome:
    """How a task ended whose container ran and does not any more."""
    if details.exit_code == 0:
        if rebooted(record, boot) and not _ended_in_its_boot(record, details, boot):
            # The engine writes an exit code for what it finds dead after a power loss: a zero
            # there was never said by the job.
            return Outcome(Reason.EXECUTOR_ERROR, "host rebooted while the task ran")
        return Outcome(Reason.DONE_BY_RUNNER, "")
    if not last_lines:
        last_lines = exit_in_words(details)
    return Outcome(Reason.CONTAINER_EXITED_WITH_ERROR, last_lines)


def _ended_in_its_boot(record: TaskRecord, details: ContainerDetails, boot: Boot) -> bool:
    """Whether it ended before the next boot after the one it was started in, as far as known."""
    if details.finished_at is None:
        return False
    began = details.started_at or 0.0
    later = (
        other.started_at
        for other in boot.earlier
        if other.id != record.boot_id and other.started_at > began
    )
    return details.finished_at < min(later, default=boot.started_at)


def exit_in_words(details: ContainerDetails) -> str:
    """What there is to say of an exit without output."""
    why = "out of memory" if details.oom_killed else details.error
    return f"container exited with code {details.exit_code}" + (f": {why}" if why else "")


def outcome_of_unstarted(record: TaskRecord, details: ContainerDetails) -> Outcome:
    """How a task ended whose container was created and never ran."""
    if details.exit_code != 0 or details.error:
        return Outcome(Reason.CONTAINER_EXITED_WITH_ERROR, exit_in_words(details))
    step = record.intent.step if record.intent else ""
    if not step and details.container.labels.get(LABEL_INTENT) == START:
        # Only told, never made good: its end may have been decided in the record that is lost.
        step = "starting"
    while_ = f", interrupted while {step}" if step else ""
    return Outcome(Reason.EXECUTOR_ERROR, f"container was not started{while_}")


def outcome_of_gone(record: TaskRecord) -> Outcome:
    """How a task ended that has no container (any more)."""
    step = record.intent.step if record.intent else ""
    if step in ("preparing", "pulling", "creating"):
        return Outcome(Reason.EXECUTOR_ERROR, f"interrupted while {step}: the shim was restarted")
    return Outcome(Reason.EXECUTOR_ERROR, "container not found")
