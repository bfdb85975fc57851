"""Between our objects and the rows of the tables."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from dstack_shim_server.observation import Observation, Subject
from dstack_shim_server.proof import OpenRestart, TaskBefore


@attrs.frozen
class Fleet:
    """Names of a fleet and its project, "" if there is none or it is not known."""

    project: str = ""
    name: str = ""


@attrs.frozen
class NewRestart:
    """A restart that is about to be made, or was just made."""

    id: str
    subject: Subject
    from_version: str
    to_version: str
    process: str
    tasks: tuple[TaskBefore, ...]


def instance_row(seen: Observation, fleet: Fleet) -> dict[str, Any]:
    """Make the row of an instance."""
    return {
        "id": seen.subject.id,
        "name": seen.subject.name,
        "project": fleet.project,
        "fleet": fleet.name,
        "running_version": seen.running_version,
        "running_features": _listed(seen.running_features),
        "implementation": json.dumps(dict(seen.implementation)),
        "installed_version": seen.installed_version,
        "installed_status": seen.installed_status,
        "installed_features": _listed(seen.installed_features),
        "wanted_version": seen.wanted_version,
        "state": seen.state,
        "answer": None if seen.answer is None else int(seen.answer),
        "reason": seen.reason,
        "blocking": json.dumps(dict(seen.blocking)),
        "tasks": _listed(seen.tasks),
        "seen_at": seen.at,
        "reason_since": seen.at,
    }


def restart_row(new: NewRestart, fleet: Fleet, replica: str, now: float) -> dict[str, Any]:
    """Make the row of a restart that has no outcome yet."""
    return {
        "id": new.id,
        "instance_id": new.subject.id,
        "instance": new.subject.name,
        "fleet": fleet.name,
        "from_version": new.from_version,
        "to_version": new.to_version,
        "requested_at": now,
        "replica": replica,
        "process": new.process,
        "tasks_before": json.dumps([attrs.astuple(task) for task in new.tasks]),
        "reasons": "{}",
        "why": "",
    }


def open_restart(row: Any) -> OpenRestart:
    """Read a restart back."""
    return OpenRestart(
        id=row.id,
        instance_id=row.instance_id,
        instance=row.instance,
        from_version=row.from_version,
        to_version=row.to_version,
        requested_at=row.requested_at,
        tasks=tuple(TaskBefore(*task) for task in json.loads(row.tasks_before)),
        process=row.process,
        after=None if row.tasks_after is None else _pairs(row.tasks_after),
    )


def told_reasons(
    restart: OpenRestart, recorded: str, heard: Mapping[str, str]
) -> Mapping[str, str]:
    """Join the reasons recorded with those this process heard of the same tasks."""
    ours = {task.id: heard[task.id] for task in restart.tasks if task.id in heard}
    return {**json.loads(recorded), **ours}


def pairs(found: Iterable[Any]) -> dict[Any, Any]:
    """Make a dictionary of rows of two columns."""
    return {row[0]: row[1] for row in found}


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((task_id, status) for task_id, status in json.loads(text))


def _listed(items: Iterable[Any] | None) -> str | None:
    return None if items is None else json.dumps(list(items))
