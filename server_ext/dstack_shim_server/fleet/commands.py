"""The commands: each reads, shows, and returns the exit code."""

import argparse
import asyncio
import getpass
import json
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from rich.console import Console
from sqlalchemy.ext.asyncio import AsyncEngine

from dstack_shim_server import metrics
from dstack_shim_server.fleet import reading, words
from dstack_shim_server.record import schema
from dstack_shim_server.record.batch import Snapshot

WELL, LOOK, ABSENT = 0, 1, 4

_INSTANCE_HEAD = (
    *("INSTANCE", "FLEET", "RUNNING", "WANTED", "FEATURES", "STATE", "SEEN"),
    "WAITING FOR",
)
_RESTART_HEAD = (
    *("REQUESTED", "INSTANCE", "FROM", "TO", "OUTCOME", "ABSENT", "TASKS"),
    "WHY",
)


@attrs.frozen
class Session:
    """What a command works with."""

    engine: AsyncEngine
    options: argparse.Namespace
    console: Console

    def show(self, lines: Iterable[str], document: object) -> None:
        """Print the lines, or the document for programs."""
        if self.options.json:
            lines = [json.dumps(document, indent=2)]
        # Past rich's wrapping and markup: names and reasons are not ours, and rows are many.
        self.console.file.write("".join(f"{line}\n" for line in lines))

    def title(self, text: str) -> None:
        """Print a line to stand out, for people only."""
        if not self.options.json:
            self.console.print(text, style="bold", markup=False, soft_wrap=True)


async def status(session: Session) -> int:
    """All instances, and how the roll-out stands."""
    now = time.time()
    async with session.engine.begin() as connection:
        await schema.require_current(connection)
        found = await reading.read_instances(connection, now)
        snapshot = await reading.read_snapshot(connection)
        stopped = await reading.read_stops(connection)
        replicas = await reading.read_replicas(connection)
    wanted = session.options.state
    shown = [one for one in found if wanted is None or one.state == wanted]
    session.title(_headline(found, snapshot))
    session.show(
        [
            *words.table(_INSTANCE_HEAD, map(words.instance_cells, shown)),
            *_rollout_sentences(snapshot, stopped, now),
        ],
        {
            "instances": [one.document() for one in shown],
            "paused_by": snapshot.state.paused_by,
            "stopped": stopped,
            "under_way": len(snapshot.state.under_way),
            "confirmed": snapshot.state.confirmed,
            "servers": replicas,
        },
    )
    return LOOK if stopped else WELL


async def why(session: Session) -> int:
    """Why an instance is restarted or not."""
    now, name = time.time(), session.options.instance
    async with session.engine.begin() as connection:
        await schema.require_current(connection)
        found = await reading.read_instances(connection, now, name)
        histories = [
            await reading.read_restarts(connection, instance=one.row["id"], limit=5)
            for one in found
        ]
        snapshot = await reading.read_snapshot(connection)
        stopped = await reading.read_stops(connection)
    if not found:
        session.show([f"No instance is called {name}."], {"error": f"no instance {name}"})
        return ABSENT
    lines: list[str] = []
    for one, restarts in zip(found, histories, strict=True):
        relevant = _relevant(stopped, one)
        lines += words.why(one, restarts, _rollout_sentences(snapshot, relevant, now))
    documents = [
        {**one.document(), "restarts": restarts}
        for one, restarts in zip(found, histories, strict=True)
    ]
    session.show(lines, documents)
    return WELL


async def history(session: Session) -> int:
    """Restarts and their outcomes, newest first."""
    async with session.engine.begin() as connection:
        await schema.require_current(connection)
        found = await reading.read_restarts(
            connection, instance=session.options.instance, limit=session.options.limit
        )
    session.show(words.table(_RESTART_HEAD, map(words.restart_cells, found)), found)
    return LOOK if any(reading.is_bad(restart["outcome"]) for restart in found) else WELL


async def watch(session: Session) -> int:
    """Restarts as they go on: one line for each that changed since the last look."""
    known: dict[str, Any] = {}
    looks = 0
    while session.options.looks is None or looks < session.options.looks:
        if looks:
            await asyncio.sleep(session.options.interval)
        looks += 1
        async with session.engine.begin() as connection:
            await schema.require_current(connection)
            found = await reading.read_restarts(connection, limit=200)
        for restart in reversed(found):
            if known.get(restart["id"]) == restart:
                continue
            known[restart["id"]] = restart
            line = "  ".join(words.restart_cells(restart))
            session.show([line], restart)
        session.console.file.flush()
    return LOOK if any(reading.is_bad(one["outcome"]) for one in known.values()) else WELL


async def pause(session: Session) -> int:
    """Let no restart begin."""
    async with session.engine.begin() as connection:
        await schema.require_current(connection)
        await reading.pause(connection, _operator(), time.time())
    session.show(["Paused. Restarts under way go on, no other begins."], {"paused": True})
    return WELL


async def resume(session: Session) -> int:
    """Let restarts begin again."""
    async with session.engine.begin() as connection:
        await schema.require_current(connection)
        was_paused = await reading.resume(connection)
    line = "Resumed." if was_paused else "It was not paused."
    session.show([line], {"paused": False, "was_paused": was_paused})
    return WELL


async def release(session: Session) -> int:
    """Lift the stop of a version."""
    version = session.options.version
    async with session.engine.begin() as connection:
        await schema.require_current(connection)
        lifted = await reading.release(connection, version, _operator(), time.time())
    line = f"{version} is rolled out again." if lifted else f"{version} was not stopped."
    session.show([line], {"version": version, "released": lifted})
    return WELL if lifted else ABSENT


async def show_metrics(session: Session) -> int:
    """Figures in Prometheus' text format."""
    async with session.engine.begin() as connection:
        await schema.require_current(connection)
        found = list(metrics.families(await reading.read_snapshot(connection)))
    document = [attrs.asdict(family) for family in found]
    session.show(metrics.as_text(found).splitlines(), document)
    return WELL


def _headline(found: Sequence[reading.Instance], snapshot: Snapshot) -> str:
    states = Counter(one.state for one in found)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    under_way = len(snapshot.state.under_way)
    return f"{len(found)} instances: {counted or 'none'}; {under_way} restarts under way"


def _rollout_sentences(
    snapshot: Snapshot, stopped: Sequence[Mapping[str, Any]], now: float
) -> Sequence[str]:
    lines = []
    if snapshot.state.paused_by:
        lines.append(f"The roll-out is paused by {snapshot.state.paused_by}.")
    lines += [
        f"Version {stop['version']} is stopped for {words.age(now - stop['at'])}: {stop['why']}. "
        f"`dstack-shim-fleet release {stop['version']}` lifts that."
        for stop in stopped
    ]
    return lines


def _relevant(
    stopped: Sequence[Mapping[str, Any]], instance: reading.Instance
) -> Sequence[Mapping[str, Any]]:
    versions = {instance.row["installed_version"], instance.row["wanted_version"]}
    return [stop for stop in stopped if stop["version"] in versions]


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "somebody"
    return f"{user} on {socket.gethostname()}"
