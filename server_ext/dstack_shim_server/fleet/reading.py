"""What the command line reads of the record and changes in it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from dstack_shim_server.proof import Outcome
from dstack_shim_server.record.batch import Snapshot, count, read
from dstack_shim_server.record.tables import instances, replicas, restarts, rollout, stops
from dstack_shim_server.record.writing import failures, insert

# An instance no server has checked for so many seconds says nothing about now; checks are 15 to 20
# seconds apart.
SILENT_AFTER = 120.0


@attrs.frozen
class Instance:
    """An instance as it was last seen, and the restart it is in or had last."""

    row: Mapping[str, Any]
    under_way: bool
    now: float

    @property
    def state(self) -> str:
        """Return its state now, in a word or two."""
        if self.under_way:
            return "restarting"
        if self.now - self.row["seen_at"] > SILENT_AFTER:
            return "silent"
        # The claim said so; it is over, and no check has come since.
        return "waiting" if self.row["state"] == "restarting" else str(self.row["state"])

    @property
    def blocking(self) -> Mapping[str, int]:
        """Return the tasks in the way, by status."""
        return dict(json.loads(self.row["blocking"]))

    def document(self) -> Mapping[str, Any]:
        """Return all of it for programs."""
        row = self.row
        return {
            "id": row["id"],
            "instance": row["name"],
            "project": row["project"],
            "fleet": row["fleet"],
            "state": self.state,
            "running": row["running_version"],
            "installed": row["installed_version"],
            "installed_status": row["installed_status"],
            "wanted": row["wanted_version"],
            "features": listed(row["running_features"]),
            "installed_features": listed(row["installed_features"]),
            "implementation": json.loads(row["implementation"]),
            "reason": row["reason"],
            "reason_since": row["reason_since"],
            "waiting_for": self.blocking,
            "tasks": listed(row["tasks"]),
            "seen_at": row["seen_at"],
        }


async def read_instances(
    connection: AsyncConnection, now: float, name: str | None = None
) -> Sequence[Instance]:
    """Read all instances by project, fleet and name; or those of a name or id."""
    wanted = select(instances).order_by(
        instances.c.project, instances.c.fleet, instances.c.name, instances.c.id
    )
    if name is not None:
        wanted = wanted.where(or_(instances.c.name == name, instances.c.id == name))
    found = await connection.execute(wanted)
    open_now = await connection.execute(
        select(restarts.c.instance_id).where(restarts.c.outcome.is_(None))
    )
    under_way = {row[0] for row in open_now}
    return [Instance(dict(row), row["id"] in under_way, now) for row in found.mappings()]


async def read_restarts(
    connection: AsyncConnection, *, instance: str | None = None, limit: int = 50
) -> Sequence[Mapping[str, Any]]:
    """Read the newest restarts, of all instances or of one by name or id."""
    wanted = select(restarts).order_by(restarts.c.requested_at.desc(), restarts.c.id).limit(limit)
    if instance is not None:
        of_it = or_(restarts.c.instance == instance, restarts.c.instance_id == instance)
        wanted = wanted.where(of_it)
    found = await connection.execute(wanted)
    return [restart_document(dict(row)) for row in found.mappings()]


def restart_document(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make a restart fit for programs."""
    return {
        "id": row["id"],
        "instance": row["instance"],
        "instance_id": row["instance_id"],
        "fleet": row["fleet"],
        "from": row["from_version"],
        "to": row["to_version"],
        "requested_at": row["requested_at"],
        "outcome": row["outcome"],
        "outcome_at": row["outcome_at"],
        "why": row["why"],
        "absence": row["absence"],
        "tasks_before": listed(row["tasks_before"]),
        "tasks_after": listed(row["tasks_after"]),
        "replica": row["replica"],
    }


async def read_snapshot(connection: AsyncConnection) -> Snapshot:
    """Read how the roll-out stands, with its figures."""
    return await count(connection, await read(connection, {}))


async def read_stops(connection: AsyncConnection) -> Sequence[Mapping[str, Any]]:
    """Read the versions that are stopped."""
    wanted = select(stops.c.version, stops.c.at, stops.c.why).where(stops.c.lifted_at.is_(None))
    return [dict(row) for row in (await connection.execute(wanted)).mappings()]


async def read_replicas(connection: AsyncConnection) -> Sequence[Mapping[str, Any]]:
    """Read which server processes keep the record."""
    found = await connection.execute(select(replicas).order_by(replicas.c.began_at))
    return [dict(row) for row in found.mappings()]


async def pause(connection: AsyncConnection, by: str, now: float) -> None:
    """Let no restart begin; those under way go on."""
    await connection.execute(update(rollout).values(paused_by=by[:128], paused_at=now))


async def resume(connection: AsyncConnection) -> bool:
    """Lift a pause; False if there was none."""
    done = await connection.execute(
        update(rollout).where(rollout.c.paused_by != "").values(paused_by="", paused_at=None)
    )
    return bool(done.rowcount)


async def release(connection: AsyncConnection, version: str, by: str, now: float) -> bool:
    """Forget what stopped a version or made instances not take it; False if nothing did."""
    lifted = {"lifted_at": now, "lifted_by": by[:128]}
    stopped = (stops.c.version == version) & stops.c.lifted_at.is_(None)
    done = await connection.execute(update(stops).where(stopped).values(**lifted))
    failed = await connection.execute(failures().where(restarts.c.to_version == version))
    if failed.first() is not None:
        row = {"version": version, "at": now, "why": "", "restart_id": "", **lifted}
        statement = insert(connection, stops).values(**row)
        await connection.execute(
            statement.on_conflict_do_update(index_elements=["version"], set_=lifted)
        )
        return True
    return bool(done.rowcount)


def is_bad(outcome: str | None) -> bool:
    """Say whether somebody should look at a restart with this outcome."""
    return outcome not in {None, Outcome.CONFIRMED.value, Outcome.WITHDRAWN.value}


def listed(text: str | None) -> Any:
    """Read a list that may be unknown."""
    return None if text is None else json.loads(text)
