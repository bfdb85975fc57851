"""``dstack-shim status``: how the shim of this host is."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime

import attrs
from dstack_shim_contracts.api import HealthcheckResponse, InstanceHealth, LastUpgrade

from dstack_shim.commands import NOT_RUNNING
from dstack_shim.console.ps import tell_problems
from dstack_shim.console.screen import Cell, as_json, screen
from dstack_shim.console.sources import Sources, look
from dstack_shim.console.times import told
from dstack_shim.console.view import TaskView, tasks_of
from dstack_shim.settings import Invocation

Fact = tuple[str, Cell]
_HEALTH = {0: ("passed", "green"), 10: ("warning", "yellow"), 20: ("failed", "red")}


def run(invocation: Invocation) -> int:
    """Tell how the shim is."""
    sources = asyncio.run(look(invocation.settings, deep=True))
    tasks = tasks_of(sources)
    if invocation.json:
        print(as_json(document(sources, tasks)))  # noqa: T201 - the answer
    else:
        screen().facts(list(facts(sources, tasks, time.time())))
        tell_problems(sources)
    return 0 if sources.shim is not None else NOT_RUNNING


def facts(sources: Sources, tasks: Sequence[TaskView], now: float) -> Iterator[Fact]:
    """What is told, in order."""
    if sources.shim is None:
        yield "shim", Cell("no answer", "red")
    else:
        yield "shim", Cell(f"serves on 127.0.0.1:{sources.port}", "green")
        yield from _of_shim(sources.shim.healthcheck, now)
        yield from _of_gpus(sources.shim.health)
    yield "home", Cell(str(sources.home))
    if sources.holder:
        yield "process", Cell(str(sources.holder))
    if not sources.engine_answers:
        yield "engine", Cell("no answer", "red")
    elif sources.engine is not None:
        yield "engine", Cell(f"{sources.engine.version}, API {sources.engine.api_version}")
    counts = Counter(task.status.value for task in tasks)
    words = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    yield "tasks", Cell(words or "none")


def _of_shim(told_by: HealthcheckResponse, now: float) -> Iterator[Fact]:
    yield "version", Cell(told_by.version)
    implementation = told_by.implementation
    if implementation is None:
        yield "program", Cell("dstack's own shim, or one like it")
        return
    yield "program", Cell(f"{implementation.name} {implementation.version}")
    yield "features", Cell(", ".join(told_by.features or ()) or "none")
    yield "generation", Cell(str(implementation.generation))
    yield "since", Cell(told(_seconds(implementation.started_at), now))
    yield "last upgrade", Cell(upgrade_in_words(implementation.last_upgrade))


def _of_gpus(health: InstanceHealth | None) -> Iterator[Fact]:
    if health is None or health.dcgm is None:
        yield "GPU health", Cell("not watched (no DCGM)")
        return
    words, style = _HEALTH[health.dcgm.overall_health]
    yield "GPU health", Cell(words, style)
    for incident in health.dcgm.incidents:
        yield "", Cell(f"GPU {incident.entity_id}: {incident.error_message}")


def upgrade_in_words(upgrade: LastUpgrade | None) -> str:
    """How a replacement in place went."""
    if upgrade is None:
        return "none so far"
    reason = f": {upgrade.reason}" if upgrade.reason else ""
    return (
        f"{upgrade.outcome}, {upgrade.from_version} to {upgrade.to_version}, {upgrade.at}{reason}"
    )


def document(sources: Sources, tasks: Sequence[TaskView]) -> dict[str, object]:
    """For programs; keys are added in later versions, never taken away or changed."""
    shim = None
    if sources.shim is not None:
        check = sources.shim.healthcheck
        program = check.implementation
        dcgm = sources.shim.health.dcgm if sources.shim.health else None
        shim = {
            "version": check.version,
            "features": None if check.features is None else list(check.features),
            "implementation": None if program is None else attrs.asdict(program),
            "gpu_health": None if dcgm is None else attrs.asdict(dcgm),
        }
    return {
        "shim": shim,
        "port": sources.port,
        "home": str(sources.home),
        "process": sources.holder,
        "engine": None if sources.engine is None else attrs.asdict(sources.engine),
        "tasks": dict(Counter(task.status.value for task in tasks)),
        "problems": list(sources.problems),
    }


def _seconds(moment: str) -> float | None:
    try:
        return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
