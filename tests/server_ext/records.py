"""Records for tests: recorders over a database, and checks of instances as words."""

from __future__ import annotations

from typing import Any

import attrs

from dstack_shim_server.observation import Observation, Subject
from dstack_shim_server.policy import Policy
from dstack_shim_server.proof import TaskBefore
from dstack_shim_server.record.recorder import Recorder
from dstack_shim_server.record.rows import NewRestart
from dstack_shim_server.settings import Settings
from tests.server_ext.databases import Database

OLD, NEW = "0.22.4", "0.22.5"
RUNNING = (("job-1", "running"),)


@attrs.define
class Clock:
    """Both clocks of a recorder, moved by hand."""

    wall: float = 1_800_000_000.0
    own: float = 50.0

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.own += seconds


def recorder(
    database: Database, clock: Clock | None = None, *, name: str = "replica", **settings: Any
) -> Recorder:
    """A started recorder that has been through its first transaction."""
    clock = clock or Clock()
    made = Recorder(
        database.url,
        Settings(**settings),
        clock=lambda: clock.wall,
        monotonic=lambda: clock.own,
        replica=name,
    )
    made.start()
    made.flush()
    return made


def policy(**choices: Any) -> dict[str, Any]:
    """Settings with a policy; without canaries unless they are what it is about."""
    return {"policy": Policy(**{"canaries": 0, **choices})}


def check(
    box: str = "box",
    *,
    running: str = OLD,
    installed: str = NEW,
    tasks: Any = RUNNING,
    jobs: Any = frozenset({"job-1"}),
    at: float = 1_800_000_000.0,
    fleet_id: str = "f1",
    **more: Any,
) -> Observation:
    """What a check of an instance saw."""
    return Observation(
        Subject(id=f"id of {box}", name=box, fleet_id=fleet_id, jobs=jobs),
        at,
        running_version=running,
        installed_version=installed,
        installed_status="installed",
        tasks=tasks,
        **more,
    )


def restart(seen: Observation, number: int = 1) -> NewRestart:
    """The restart that follows from a check."""
    return NewRestart(
        id=f"{seen.subject.name} {number}",
        subject=seen.subject,
        from_version=seen.running_version,
        to_version=seen.installed_version,
        process=seen.process,
        tasks=tuple(TaskBefore(*task) for task in seen.tasks or ()),
    )


def claim(keeper: Recorder, box: str = "box", number: int = 1, **seen: Any) -> str:
    """Claim a restart of an instance; "" if it is allowed, else why not."""
    found = check(box, **seen)
    ruling = keeper.claim(restart(found, number), found)
    return "" if ruling.allowed else ruling.reason


def see(keeper: Recorder, *seen: Observation) -> None:
    """Let checks be recorded, and wait for it."""
    for one in seen:
        keeper.see(one)
    keeper.flush()


def outcomes(database: Database) -> dict[str, str | None]:
    """Outcome by restart."""
    rows = database.ask("SELECT id, outcome FROM shim_restart_restarts")
    return {row["id"]: row["outcome"] for row in rows}
