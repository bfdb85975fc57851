"""
Did a restart hurt anyone: a pure function over what was there before and what a check sees now.

A task that was there must still be there, not back a status, with its reason unchanged. It may have
ended meanwhile: by dstack, which then has no such job on the instance any more, or by itself, which
its reason tells. A shim that lost a task ends it with `executor_error`, or does not know it.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

import attrs
from dstack_shim_contracts.statuses import Reason, TaskStatus, may_become

from dstack_shim_server.observation import Observation


class Outcome(str, Enum):
    """How a restart ended; `withdrawn` is one that was asked for and, as far as seen, not made."""

    CONFIRMED = "confirmed"
    LOST_TASKS = "lost tasks"
    DID_NOT_COME_BACK = "did not come back"
    ROLLED_BACK = "rolled back by the shim"
    WITHDRAWN = "withdrawn"


# The instance did not take the version: it is not tried again there until an operator says so.
FAILURES = (Outcome.DID_NOT_COME_BACK, Outcome.ROLLED_BACK)


@attrs.frozen
class TaskBefore:
    """A task at the request; its reason if it was told by then."""

    id: str
    status: str
    reason: str = ""


@attrs.frozen
class OpenRestart:
    """A restart without an outcome, as recorded."""

    id: str
    instance_id: str
    instance: str
    from_version: str
    to_version: str
    requested_at: float
    tasks: tuple[TaskBefore, ...]
    # What the shim said of its process at the request, "" if it said nothing.
    process: str = ""
    # The tasks when it was last looked at; None: it was not seen back yet.
    after: tuple[tuple[str, str], ...] | None = None


@attrs.frozen
class Proof:
    """What a check says about a restart; no outcome means: look again at the next one."""

    outcome: Outcome | None
    why: str
    returned: bool = True
    # The tasks seen; None: none were.
    after: tuple[tuple[str, str], ...] | None = None


def examine(restart: OpenRestart, seen: Observation, reasons: Mapping[str, str]) -> Proof:
    """
    Compare a restart with a later check of its instance.

    `reasons` are the termination reasons told since, by task. It takes two checks to confirm, and
    also to call a task lost that is not there: the server removes those that ended, and the jobs a
    check goes by were read a moment before it.
    """
    if not _is_back(restart, seen):
        return Proof(None, f"still runs {restart.from_version}", returned=False)
    if seen.tasks is None:
        return Proof(None, "back, its tasks were not seen yet")
    lost, open_questions = _compare(restart, seen, reasons)
    if lost:
        return Proof(Outcome.LOST_TASKS, "; ".join(lost), after=seen.tasks)
    if open_questions:
        return Proof(None, "; ".join(open_questions), after=seen.tasks)
    if restart.after is None:
        return Proof(None, "back, to be confirmed at the next check", after=seen.tasks)
    if seen.running_version == restart.from_version:
        words = seen.upgrade_words or f"it runs {seen.running_version} again"
        return Proof(Outcome.ROLLED_BACK, words, after=seen.tasks)
    return Proof(Outcome.CONFIRMED, _praise(restart.tasks), after=seen.tasks)


def never_explained(restart: OpenRestart, proof: Proof) -> Proof:
    """Judge a restart whose time is over without an outcome."""
    if proof.returned:
        return attrs.evolve(proof, outcome=Outcome.LOST_TASKS)
    return Proof(Outcome.WITHDRAWN, f"the shim still runs {restart.from_version}", returned=False)


def _is_back(restart: OpenRestart, seen: Observation) -> bool:
    if seen.running_version != restart.from_version:
        return bool(seen.running_version)
    # The old version again: another process of it, or the same one after it tried the new file.
    if seen.is_trying:
        return False
    return seen.process not in {"", restart.process} and bool(restart.process)


def _compare(
    restart: OpenRestart, seen: Observation, reasons: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return what is lost and what is not explained yet, in words."""
    now = dict(seen.tasks or ())
    seen_missing_before = restart.after is not None
    known_before = dict(restart.after or ())
    lost: list[str] = []
    questions: list[str] = []
    for task in restart.tasks:
        reason = reasons.get(task.id, "")
        if task.id not in now:
            words = f"task {task.id} was {task.status} and is not known any more"
            if _may_be_gone(task, seen, reason):
                continue
            certain = seen_missing_before and task.id not in known_before
            (lost if certain else questions).append(words)
        elif complaint := _complaint(task, now[task.id], reason):
            lost.append(complaint)
        elif _ended_unexplained(task, now[task.id], seen, reason):
            questions.append(f"task {task.id} was {task.status} and ended, why is not told yet")
    return lost, questions


def _may_be_gone(task: TaskBefore, seen: Observation, reason: str) -> bool:
    """Say whether dstack is done with a task that the shim does not list any more."""
    if seen.jobs is not None and task.id not in seen.jobs:
        return True
    return bool(reason) and reason != Reason.EXECUTOR_ERROR


def _complaint(task: TaskBefore, status: str, reason: str) -> str:
    if status != task.status and not may_become(TaskStatus(task.status), TaskStatus(status)):
        return f"task {task.id} was {task.status} and is {status}"
    ended = task.status != TaskStatus.TERMINATED
    if ended and status == TaskStatus.TERMINATED and reason == Reason.EXECUTOR_ERROR:
        return f"task {task.id} was {task.status} and ended with {reason}"
    if not ended and task.reason and reason not in {"", task.reason}:
        return f"task {task.id} had ended with {task.reason} and now with {reason}"
    return ""


def _ended_unexplained(task: TaskBefore, status: str, seen: Observation, reason: str) -> bool:
    if status != TaskStatus.TERMINATED or task.status == TaskStatus.TERMINATED:
        return False
    still_a_job = seen.jobs is None or task.id in seen.jobs
    return still_a_job and not reason


def _praise(before: Sequence[TaskBefore]) -> str:
    return f"all {len(before)} tasks are as they were" if before else "there were no tasks"
