"""Statuses of a task, the way they follow each other, and why a task ends."""

from enum import Enum
from typing import Final


class TaskStatus(str, Enum):
    """The six statuses, in the order a task goes through them. Servers know no other."""

    PENDING = "pending"
    PREPARING = "preparing"
    PULLING = "pulling"
    CREATING = "creating"
    RUNNING = "running"
    TERMINATED = "terminated"

    def __str__(self) -> str:
        return self.value


_ORDER: Final = tuple(TaskStatus)


def may_become(current: TaskStatus, new: TaskStatus) -> bool:
    """Tell whether a task may go from one status to the other: only forward, never to itself.

    Steps may be left out: a task taken up again in the middle of its start may turn out to run.
    Being the last, ``terminated`` follows every other status.
    """
    return _ORDER.index(current) < _ORDER.index(new)


class Reason:
    """The termination reasons a shim sets by itself; any other string is only passed on."""

    EXECUTOR_ERROR: Final = "executor_error"
    """Preparing failed, no GPU capacity, container vanished or never started, interrupted."""

    CREATING_CONTAINER_ERROR: Final = "creating_container_error"
    """Pulling the image or creating the container failed."""

    CONTAINER_EXITED_WITH_ERROR: Final = "container_exited_with_error"
    """Exit code other than 0, or the container could not be started."""

    DONE_BY_RUNNER: Final = "done_by_runner"
    """Exit code 0."""


SERVER_REASONS: Final = frozenset(
    {
        Reason.EXECUTOR_ERROR,
        Reason.CREATING_CONTAINER_ERROR,
        Reason.CONTAINER_EXITED_WITH_ERROR,
        Reason.DONE_BY_RUNNER,
        "aborted_by_user",
        "failed_to_start_due_to_no_capacity",
        "gateway_error",
        "inactivity_duration_exceeded",
        "instance_access_revoked",
        "instance_unreachable",
        "interrupted_by_no_capacity",
        "log_quota_exceeded",
        "max_duration_exceeded",
        "ports_binding_failed",
        "scaled_down",
        "terminated_by_server",
        "terminated_by_user",
        "terminated_due_to_utilization_policy",
        "volume_error",
        "waiting_instance_limit_exceeded",
        "waiting_runner_limit_exceeded",
    }
)
"""Members of the server's own enum of termination reasons (the same in 0.21.2 and 0.22.5).

A server retries a pulling job for ever when it is told a reason outside this set.
"""
