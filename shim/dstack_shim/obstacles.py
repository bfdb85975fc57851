"""What is in the way of a shutdown that is to be safe: one pure function.

The gate of the contracts judges, as servers do from outside; here it is asked under the lock that
submits take, so that no task slips in between the question and the shutdown.
"""

from __future__ import annotations

from collections.abc import Iterable

from dstack_shim_contracts.api import Component, ComponentStatus, Obstacle, TaskListItem
from dstack_shim_contracts.gate import Verdict
from dstack_shim_contracts.statuses import TaskStatus


def obstacles(
    unsafe: Iterable[TaskListItem], verdict: Verdict, target: Component, installing: Iterable[str]
) -> tuple[Obstacle, ...]:
    """List the tasks that would not survive, the file that is why, and installs under way.

    ``target`` is the shim that would start next, ``verdict`` the gate's about it.
    """
    found = [
        Obstacle("task", task.id, task.status.value, f"task {task.id} is {task.status.value}")
        for task in unsafe
    ]
    if any(obstacle.status == TaskStatus.RUNNING.value for obstacle in found):
        found.append(Obstacle("target", target.name, target.status.value, verdict.reason))
    found += [
        Obstacle("install", name, ComponentStatus.INSTALLING.value, f"{name} is being installed")
        for name in installing
    ]
    return tuple(found)
