"""Whether a file may take over, by what its check reports of this host: a pure function.

The report is the new file's own (:mod:`dstack_shim.check`), made beside the shim that serves; the
judgement is the old one's.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from dstack_shim_contracts.features import PERSISTED_STATE
from dstack_shim_contracts.statuses import TaskStatus
from dstack_shim_contracts.upgrade import CheckReport

_LASTING = frozenset({TaskStatus.RUNNING, TaskStatus.TERMINATED})
"""Statuses that only an end or nothing changes, so that both must see the same."""


@attrs.frozen
class KnownTask:
    """A task as the shim that serves knows it."""

    status: TaskStatus
    recorded: bool
    """Whether its record is on disk and can be read."""


def objection(
    found: CheckReport,
    version: str,
    before: Mapping[str, KnownTask],
    after: Mapping[str, KnownTask],
) -> str:
    """Why the file must not take over, "" if it may.

    ``version`` is the one it was proved with; ``before`` and ``after`` are the tasks known when
    the report was begun and when it was there: what changed meanwhile it need not know.
    """
    if found.version != version:
        return f"its check reports version {found.version!r}, not {version!r}"
    if PERSISTED_STATE not in found.features:
        return "it keeps no state"
    if found.problems:
        return f"its check found: {found.problems[0]}"
    kept = {task.id: task.status for task in found.tasks}
    recorded = frozenset(found.recorded)
    for task_id, task in before.items():
        if after.get(task_id) == task and (words := _loss(task_id, task, kept, recorded)):
            return words
    return ""


def _loss(
    task_id: str, task: KnownTask, kept: Mapping[str, TaskStatus], recorded: frozenset[str]
) -> str:
    if task_id not in kept:
        return f"it would lose task {task_id}"
    if task.recorded and task_id not in recorded:
        return f"it cannot read the record of task {task_id}"
    if task.status in _LASTING and kept[task_id] is not task.status:
        return f"it takes task {task_id} for {kept[task_id].value}, not {task.status.value}"
    return ""
