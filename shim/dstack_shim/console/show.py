"""``dstack-shim show``: everything there is to tell of one task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import attrs
from dstack_shim_contracts.api import TaskConfig

from dstack_shim.commands import UNKNOWN_TASK
from dstack_shim.console.ps import STYLES, asked_for, task_document, tell_problems
from dstack_shim.console.screen import Cell, as_json, percent, screen, size
from dstack_shim.console.sources import Sources, details_of, look
from dstack_shim.console.times import rfc3339, told
from dstack_shim.console.view import TaskView
from dstack_shim.engine.protocol import ContainerDetails
from dstack_shim.settings import Invocation

Fact = tuple[str, Cell]


def run(invocation: Invocation) -> int:
    """Tell about one task."""
    sources = asyncio.run(look(invocation.settings))
    task = asked_for(invocation.arguments[0], sources)
    if task is None:
        return UNKNOWN_TASK
    details = None if task.container is None else details_of(task.container.id)
    if invocation.json:
        print(as_json(document(task, details, sources)))  # noqa: T201 - the answer
        return 0
    screen().facts(list(facts(task, details, sources, time.time())))
    tell_problems(sources)
    return 0


def facts(
    task: TaskView, details: ContainerDetails | None, sources: Sources, now: float
) -> Iterator[Fact]:
    """What is told, in order; what is not known is left out."""
    yield "task", Cell(task.id)
    yield "name", Cell(task.config.name or "-")
    yield "status", Cell(task.status.value, STYLES.get(task.status, "yellow"))
    yield "since", Cell(told(task.since, now))
    if task.progress is not None:
        yield "pull", Cell(percent(task.progress))
    if task.outcome:
        yield "outcome", Cell(task.outcome)
    yield from _of_config(task.config)
    if task.record.gpus is not None:
        yield "GPUs", Cell(", ".join(task.record.gpus) or "none")
    if task.ports:
        yield "ports", Cell(", ".join(f"{port.host} -> {port.container}" for port in task.ports))
    yield from _of_container(task, details, sources, now)
    yield "released", Cell("yes" if task.record.cleaned_up else "no")
    if task.dir is not None:
        yield "directory", Cell(str(sources.home / "runners" / task.dir))
    yield "written by", Cell(task.record.written_by or "another shim, or none")


def _of_config(config: TaskConfig) -> Iterator[Fact]:
    if config.image_name:
        yield "image", Cell(config.image_name)
        yield "user", Cell(config.container_user or "root")
    limits = [
        f"{config.cpu:g} CPUs" if config.cpu else "",
        f"{size(config.memory)} memory" if config.memory else "",
        f"{size(config.shm_size)} /dev/shm" if config.shm_size else "",
        "privileged" if config.privileged else "",
    ]
    yield "network", Cell(config.network_mode or "host")
    yield "limits", Cell(", ".join(limit for limit in limits if limit) or "none")
    for mount in config.volume_mounts:
        yield "volume", Cell(f"{mount.name} at {mount.path}")
    for place in config.instance_mounts:
        yield "mount", Cell(f"{place.instance_path} at {place.path}")
    if config.host_ssh_keys:
        whose = config.host_ssh_user or "nobody"
        yield "host keys", Cell(f"{len(config.host_ssh_keys)} of {whose}")


def _of_container(
    task: TaskView, details: ContainerDetails | None, sources: Sources, now: float
) -> Iterator[Fact]:
    container = details.container if details else task.container
    if container is None:
        words = "none" if sources.engine_answers else "not known: the engine does not answer"
        yield "container", Cell(words)
        return
    yield "container", Cell(f"{container.name} ({container.id[:12]}), {container.state.value}")
    if details is None:
        return
    if details.started_at is not None:
        yield "started", Cell(told(details.started_at, now))
    if container.state.finished:
        killed = ", killed for want of memory" if details.oom_killed else ""
        yield "ended", Cell(told(details.finished_at, now))
        yield "exit code", Cell(f"{details.exit_code}{killed}")
    if details.error:
        yield "error", Cell(details.error)


def document(
    task: TaskView, details: ContainerDetails | None, sources: Sources
) -> dict[str, object]:
    """For programs; keys are added in later versions, never taken away or changed."""
    config = attrs.asdict(task.config.without_credentials())
    for secret in ("registry_username", "registry_password", "host_ssh_keys"):
        del config[secret]
    del config["container_ssh_keys"]
    return {
        **task_document(task),
        "shim": sources.shim is not None,
        "engine": sources.engine_answers,
        "problems": list(sources.problems),
        "config": config,
        "released": task.record.cleaned_up,
        "directory": None if task.dir is None else str(sources.home / "runners" / task.dir),
        "written_by": task.record.written_by,
        "container": _container_document(task, details),
    }


def _container_document(
    task: TaskView, details: ContainerDetails | None
) -> dict[str, object] | None:
    container = details.container if details else task.container
    if container is None:
        return None
    ended = details is not None and container.state.finished
    return {
        "id": container.id,
        "name": container.name,
        "state": container.state.value,
        "started_at": rfc3339(details.started_at) if details else None,
        "finished_at": rfc3339(details.finished_at) if details else None,
        "exit_code": details.exit_code if details and ended else None,
        "oom_killed": details.oom_killed if details and ended else None,
    }
