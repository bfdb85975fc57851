"""``dstack-shim check``: the report on this host that a running shim asks of its successor.

Made as ``doctor`` looks, by the file that is to take over and with the running shim's own flags,
so that what the daemon could not read shows before anything is stopped.
"""

from __future__ import annotations

from importlib import import_module

from dstack_shim_contracts.api import TaskListItem
from dstack_shim_contracts.codec import encode
from dstack_shim_contracts.features import FEATURES
from dstack_shim_contracts.statuses import TaskStatus
from dstack_shim_contracts.upgrade import CheckReport

from dstack_shim import build
from dstack_shim.doctor import Level, examine
from dstack_shim.engine.docker import DockerEngine
from dstack_shim.settings import Settings
from dstack_shim.tasks.task import Saving


async def run(settings: Settings) -> int:
    """Print the report; returns the exit code."""
    import_module("dstack_shim.daemon")  # what would start must be there
    engine = DockerEngine()
    try:
        found = await examine(settings, engine)
    finally:
        await engine.close()
    report = CheckReport(
        version=build.version(),
        features=tuple(FEATURES),
        tasks=tuple(TaskListItem(task.id, TaskStatus(task.status)) for task in found.kept),
        recorded=tuple(
            item.task.id
            for item in (found.plan.restore if found.plan is not None else ())
            if item.task.saving is Saving.WRITTEN
        ),
        plan=found.plan.lines() if found.plan is not None else (),
        problems=tuple(
            f"{finding.what}: {finding.words}"
            for finding in found.findings
            if finding.level is Level.BROKEN
        ),
    )
    print(encode(report).decode())  # noqa: T201 - the answer
    return 0
