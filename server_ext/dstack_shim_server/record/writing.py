"""What a batch of checks changes in the record: statements for a transaction of the caller's."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from sqlalchemy import Select, case, delete, func, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from dstack_shim_server import guard, proof
from dstack_shim_server.observation import Observation, Subject
from dstack_shim_server.proof import FAILURES, OpenRestart, Outcome, Proof
from dstack_shim_server.record import rows
from dstack_shim_server.record.rows import Fleet
from dstack_shim_server.record.tables import instances, replicas, restarts, stops

# Finished restarts kept at most, whatever their age.
MOST_RESTARTS = 100_000
_DAY = 86_400.0

_FLEETS = text(
    "SELECT f.id AS id, f.name AS name, p.name AS project"
    " FROM fleets f JOIN projects p ON p.id = f.project_id"
)


@attrs.frozen
class Ended:
    """A restart that got its outcome in this transaction, and what that means for the roll-out."""

    restart: OpenRestart
    proof: Proof
    stops_version: bool


def insert(connection: AsyncConnection, table: Any) -> Any:
    """Return an INSERT of the database's own kind: both know ON CONFLICT, each in its class."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


async def write_instances(
    connection: AsyncConnection, seen: Iterable[Observation], fleets: Mapping[str, Fleet]
) -> None:
    """Write what was seen of instances, each replacing what was known of it."""
    found = [rows.instance_row(one, fleet_of(one.subject, fleets)) for one in seen]
    if not found:
        return
    # In one order everywhere: two replicas that write the same instances must not lock crosswise.
    found.sort(key=lambda row: str(row["id"]))
    statement = insert(connection, instances)
    new = statement.excluded
    changes: dict[str, Any] = {name: new[name] for name in found[0] if name != "id"}
    same = (instances.c.reason == new.reason) & (instances.c.state == new.state)
    changes["reason_since"] = case((same, instances.c.reason_since), else_=new.reason_since)
    await connection.execute(
        statement.on_conflict_do_update(index_elements=["id"], set_=changes), found
    )


async def write_restarts(connection: AsyncConnection, found: Sequence[Mapping[str, Any]]) -> None:
    """Add restarts that were made without a claim; one that is under way already stays."""
    if found:
        await connection.execute(
            insert(connection, restarts).on_conflict_do_nothing(), [dict(row) for row in found]
        )


async def open_restarts(connection: AsyncConnection) -> Sequence[Any]:
    """Return the rows of all restarts without an outcome."""
    found = await connection.execute(select(restarts).where(restarts.c.outcome.is_(None)))
    return found.fetchall()


async def note_progress(
    connection: AsyncConnection,
    row: Any,
    found: Proof,
    reasons: Mapping[str, str],
    now: float,
) -> bool:
    """Write how far a restart is; False if somebody else has given it an outcome meanwhile."""
    changes: dict[str, Any] = {"why": found.why, "reasons": json.dumps(dict(reasons))}
    if found.returned:
        changes["tasks_after"] = None if found.after is None else json.dumps(found.after)
        if row.returned_at is None:
            changes |= {"returned_at": now, "absence": max(0.0, now - row.requested_at)}
    if found.outcome is not None:
        changes |= {"outcome": found.outcome.value, "outcome_at": now}
    still_open = (restarts.c.id == row.id) & restarts.c.outcome.is_(None)
    done = await connection.execute(update(restarts).where(still_open).values(**changes))
    return bool(done.rowcount)


async def withdraw(connection: AsyncConnection, restart_ids: Iterable[str]) -> None:
    """Take back claims of restarts that were not made: nothing happened that a record should tell."""
    still_open = restarts.c.id.in_(list(restart_ids)) & restarts.c.outcome.is_(None)
    await connection.execute(delete(restarts).where(still_open))


async def stop_if_needed(
    connection: AsyncConnection, restart: OpenRestart, found: Proof, failures: int, now: float
) -> bool:
    """Stop the roll-out of a version that hurt somebody; True if it was not stopped before."""
    if found.outcome is Outcome.LOST_TASKS:
        why = f"instance {restart.instance} lost tasks: {found.why}"
    elif found.outcome in FAILURES:
        count = await _failed_instances(connection, restart.to_version)
        if count < failures:
            return False
        why = f"{count} instances did not take it, the last was {restart.instance}: {found.why}"
    else:
        return False
    changes = {
        "at": now,
        "why": why,
        "restart_id": restart.id,
        "lifted_at": None,
        "lifted_by": "",
    }
    statement = insert(connection, stops).values(version=restart.to_version, **changes)
    done = await connection.execute(
        statement.on_conflict_do_update(
            index_elements=["version"], set_=changes, where=stops.c.lifted_at.is_not(None)
        )
    )
    return bool(done.rowcount)


def failures() -> Select[Any]:
    """Select restarts that failed since somebody last lifted the stop of their version."""
    lifted = stops.c.version == restarts.c.to_version
    return (
        select(restarts.c.instance_id, restarts.c.to_version, restarts.c.outcome)
        .outerjoin(stops, lifted)
        .where(
            restarts.c.outcome.in_([outcome.value for outcome in FAILURES]),
            restarts.c.outcome_at > func.coalesce(stops.c.lifted_at, 0.0),
        )
    )


async def _failed_instances(connection: AsyncConnection, version: str) -> int:
    """Count instances that failed to take a version since somebody last lifted its stop."""
    found = failures().where(restarts.c.to_version == version).subquery()
    counted = select(func.count(found.c.instance_id.distinct()))
    return int((await connection.execute(counted)).scalar_one())


async def write_replica(
    connection: AsyncConnection, replica: str, settings: str, now: float
) -> None:
    """Say that this server process is there, and with which settings."""
    row = {"id": replica, "began_at": now, "seen_at": now, "settings": settings}
    statement = insert(connection, replicas).values(**row)
    await connection.execute(
        statement.on_conflict_do_update(index_elements=["id"], set_={"seen_at": now})
    )


async def forget_old(connection: AsyncConnection, days: int, now: float) -> None:
    """Keep the record bounded."""
    before = now - days * _DAY
    finished = restarts.c.outcome.is_not(None)
    newest = (
        select(restarts.c.requested_at)
        .where(finished)
        .order_by(restarts.c.requested_at.desc())
        .offset(MOST_RESTARTS)
        .limit(1)
    )
    oldest_kept = (await connection.execute(newest)).scalar()
    limit = before if oldest_kept is None else max(before, oldest_kept)
    await connection.execute(delete(restarts).where(finished, restarts.c.requested_at <= limit))
    await connection.execute(delete(instances).where(instances.c.seen_at <= before))
    await connection.execute(delete(replicas).where(replicas.c.seen_at <= now - _DAY))


async def fleet_names(connection: AsyncConnection) -> Mapping[str, Fleet]:
    """Read the names of fleets and their projects from dstack's own tables, if they are as ever."""
    try:
        async with connection.begin_nested():
            found = (await connection.execute(_FLEETS)).fetchall()
    except DBAPIError as exception:
        guard.logger.warning("shim_restart: fleets have no names: %s", exception.orig)
        return {}
    return {plain_id(row.id): Fleet(row.project, row.name) for row in found}


def fleet_of(subject: Subject, fleets: Mapping[str, Fleet]) -> Fleet:
    """Return the names of an instance's fleet, as far as they are known."""
    return fleets.get(plain_id(subject.fleet_id), Fleet())


def plain_id(value: object) -> str:
    """Make ids comparable: dstack's are UUIDs here, text with dashes there, text without elsewhere."""
    return str(value).replace("-", "").lower()


def examine(
    row: Any, seen: Observation | None, heard: Mapping[str, str], *, overdue: bool, silent: bool
) -> tuple[OpenRestart, Proof, Mapping[str, str]] | None:
    """Judge an open restart by the newest check of its instance; None: there is nothing new."""
    restart = rows.open_restart(row)
    reasons = rows.told_reasons(restart, row.reasons, heard)
    if seen is not None:
        found = proof.examine(restart, seen, reasons)
        looked_at_before = not found.returned or restart.after is not None
        if found.outcome is None and overdue and looked_at_before:
            found = proof.never_explained(restart, found)
        return restart, found, reasons
    if silent:
        words = "not seen again" if restart.after is None else "seen again once and then no more"
        gone = Proof(Outcome.DID_NOT_COME_BACK, words, returned=False)
        return restart, gone, reasons
    if reasons != json.loads(row.reasons):
        # Another server may be the one that checks this instance: it shall know them too.
        return restart, Proof(None, row.why, returned=False), reasons
    return None
