"""``dstack-shim ps``: the tasks of this host, a line each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import attrs
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.console.screen import Cell, Column, Screen, as_json, note, screen
from dstack_shim.console.sources import Sources, look
from dstack_shim.console.text import Keep, one_line
from dstack_shim.console.times import age, rfc3339
from dstack_shim.console.view import NoSuchTask, TaskView, find, plan_of, short_ids, tasks_of
from dstack_shim.settings import Invocation

COLUMNS = (
    Column("TASK"),
    Column("NAME", least=12, keep=Keep.BOTH),
    Column("STATUS"),
    Column("SINCE"),
    Column("IMAGE", least=8, keep=Keep.TAIL),
    Column("GPUS"),
    Column("PORTS", least=5),
    Column("OUTCOME", least=12),
)
STYLES = {TaskStatus.RUNNING: "green", TaskStatus.TERMINATED: "dim"}
"""Of the status; any other is on its way."""
_UNDER_WAY = "yellow"
_GOOD_END = "done_by_runner"


def run(invocation: Invocation) -> int:
    """List the tasks."""
    sources = asyncio.run(look(invocation.settings))
    tasks = tasks_of(sources)
    if invocation.json:
        print(as_json(document(sources, tasks)))  # noqa: T201 - the answer
        return 0
    here = screen()
    if "quiet" in invocation.options:
        for task in tasks:
            here.line(here.shown(task.id))
        return 0
    listed(here, tasks, time.time())
    tell_problems(sources)
    return 0


def listed(here: Screen, tasks: Sequence[TaskView], now: float) -> None:
    """Print the table."""
    short = short_ids([task.id for task in tasks])
    here.table(
        COLUMNS, [_row(task, short[task.id] if here.width else task.id, now) for task in tasks]
    )


def tell_problems(sources: Sources) -> None:
    """Say what the answer lacks, and what is there beside it."""
    for problem in sources.problems:
        note(problem)
    for note_text in notes(sources):
        note(note_text)


def asked_for(word: str, sources: Sources) -> TaskView | None:
    """The task that goes by ``word``; None, once it is said why, if no single one does."""
    try:
        return find(tasks_of(sources), word)
    except NoSuchTask as error:
        tell_problems(sources)
        note(str(error))
        return None


def notes(sources: Sources) -> tuple[str, ...]:
    """What somebody should know of the answer: whose word it is, what was left out of it."""
    words = []
    if sources.shim is None:
        rest = "records and containers" if sources.engine_answers else "the records alone"
        words.append(f"this is what {rest} say")
    found = plan_of(sources)
    odd = len(found.set_aside) + len(found.leave)
    if odd and sources.engine_answers:
        words.append(f"{odd} more found that are no task of this shim; see dstack-shim doctor")
    return tuple(words)


def document(sources: Sources, tasks: Sequence[TaskView]) -> dict[str, object]:
    """For programs; keys are added in later versions, never taken away or changed."""
    return {
        "shim": sources.shim is not None,
        "engine": sources.engine_answers,
        "problems": list(sources.problems),
        "notes": list(notes(sources)),
        "tasks": [task_document(task) for task in tasks],
    }


def task_document(task: TaskView) -> dict[str, object]:
    """One task for programs; null is what is not known."""
    ports = None if task.ports is None else [attrs.asdict(port) for port in task.ports]
    return {
        "id": task.id,
        "name": task.config.name,
        "status": task.status.value,
        "since": rfc3339(task.since),
        "image": task.config.image_name or None,
        "gpus": None if task.record.gpus is None else list(task.record.gpus),
        "network_mode": task.config.network_mode or "host",
        "ports": ports,
        "termination_reason": task.record.termination_reason or None,
        "termination_message": task.record.termination_message or None,
        "hint": task.hint or None,
        "pull": None if task.progress is None else attrs.asdict(task.progress),
    }


def _row(task: TaskView, task_id: str, now: float) -> tuple[Cell, ...]:
    over = task.status is TaskStatus.TERMINATED
    bad = over and task.record.termination_reason != _GOOD_END
    return (
        Cell(task_id),
        Cell(task.config.name or task.container_name or "-"),
        Cell(task.status.value, STYLES.get(task.status, _UNDER_WAY)),
        Cell("-" if task.since is None else age(now - task.since)),
        Cell(task.config.image_name or "-"),
        Cell("-" if task.record.gpus is None else str(len(task.record.gpus))),
        Cell("-" if over else ports_in_short(task)),
        Cell(one_line(task.outcome) or "-", "red" if bad or task.hint else "", task.progress),
    )


def ports_in_short(task: TaskView) -> str:
    """The host's ports, or whose they are."""
    if task.config.network_mode in ("", "host") and task.config.image_name:
        return "host"
    if not task.ports:
        return "-"
    return ",".join(str(port.host) for port in task.ports)
