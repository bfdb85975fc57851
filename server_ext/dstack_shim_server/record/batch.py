"""One transaction of the record's thread: everything noted since the last one, and a look at it all."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from dstack_shim_server.policy import RolloutState
from dstack_shim_server.record import claiming, rows, schema, writing
from dstack_shim_server.record.notes import Batch
from dstack_shim_server.record.rows import Fleet
from dstack_shim_server.record.tables import instances, restarts, rollout
from dstack_shim_server.record.writing import Ended


@attrs.frozen
class Snapshot:
    """The record as of the last transaction: checks read this, never the database."""

    state: RolloutState = attrs.Factory(RolloutState)
    choice: str = ""
    choice_by: str = ""
    fleets: Mapping[str, Fleet] = attrs.Factory(dict)
    # When the instances of restarts under way were last seen, by restart.
    last_seen: Mapping[str, float] = attrs.Factory(dict)
    by_state: Mapping[str, int] = attrs.Factory(dict)
    by_outcome: Mapping[str, int] = attrs.Factory(dict)


@attrs.frozen
class Work:
    """What a transaction is to do."""

    batch: Batch
    replica: str
    failures: int
    fleets: Mapping[str, Fleet]
    # Why tasks ended, by task.
    reasons: Mapping[str, str]
    # Restarts whose time is over, and those whose instance nobody has seen for so long; both by the
    # clock of this process.
    overdue: frozenset[str]
    silent: frozenset[str]
    now: float
    # The record as of the last transaction, and whether its figures are old enough to count anew.
    before: Snapshot = attrs.Factory(Snapshot)
    count_anew: bool = True


async def write(connection: AsyncConnection, work: Work) -> tuple[Snapshot, Sequence[Ended]]:
    """Write a batch, give restarts their outcomes, and read how things are."""
    await schema.require_current(connection)
    fleets = await _fleets(connection, work)
    await writing.write_instances(connection, work.batch.seen.values(), fleets)
    made = [
        rows.restart_row(new, writing.fleet_of(new.subject, fleets), work.replica, work.now)
        for new in work.batch.restarts.values()
    ]
    await writing.write_restarts(connection, made)
    await writing.withdraw(connection, work.batch.withdrawn)
    ended = await _prove(connection, work)
    snapshot = await read(connection, fleets)
    if work.count_anew:
        return await count(connection, snapshot), ended
    by_state, by_outcome = work.before.by_state, work.before.by_outcome
    return attrs.evolve(snapshot, by_state=by_state, by_outcome=by_outcome), ended


async def count(connection: AsyncConnection, snapshot: Snapshot) -> Snapshot:
    """Add the figures, for which all rows are read."""
    by_state = select(instances.c.state, func.count()).group_by(instances.c.state)
    by_outcome = (
        select(restarts.c.outcome, func.count())
        .where(restarts.c.outcome.is_not(None))
        .group_by(restarts.c.outcome)
    )
    return attrs.evolve(
        snapshot,
        by_state=rows.pairs(await connection.execute(by_state)),
        by_outcome=rows.pairs(await connection.execute(by_outcome)),
    )


async def read(connection: AsyncConnection, fleets: Mapping[str, Fleet]) -> Snapshot:
    """Read how the roll-out stands."""
    chosen = (await connection.execute(select(rollout.c.choice, rollout.c.choice_by))).one()
    last_seen = (
        select(restarts.c.id, instances.c.seen_at)
        .join(instances, instances.c.id == restarts.c.instance_id)
        .where(restarts.c.outcome.is_(None))
    )
    return Snapshot(
        state=await claiming.read_state(connection),
        choice=chosen.choice,
        choice_by=chosen.choice_by,
        fleets=fleets,
        last_seen=rows.pairs(await connection.execute(last_seen)),
    )


async def _fleets(connection: AsyncConnection, work: Work) -> Mapping[str, Fleet]:
    wanted = {writing.plain_id(s.subject.fleet_id) for s in work.batch.seen.values()} - {""}
    if wanted <= work.fleets.keys():
        return work.fleets
    # Fleets that are not found are remembered as nameless: not asked for again at every check.
    return {**dict.fromkeys(wanted, Fleet()), **await writing.fleet_names(connection)}


async def _prove(connection: AsyncConnection, work: Work) -> Sequence[Ended]:
    ended = []
    for row in await writing.open_restarts(connection):
        judged = _judge(row, work)
        if judged is None:
            continue
        restart, found, reasons = judged
        written = await writing.note_progress(connection, row, found, reasons, work.now)
        if found.outcome is None or not written:
            continue
        stopped = await writing.stop_if_needed(connection, restart, found, work.failures, work.now)
        ended.append(Ended(restart, found, stopped))
    return ended


def _judge(row: Any, work: Work) -> Any:
    seen = work.batch.seen.get(row.instance_id)
    # Made in this very transaction: the check that asked for it says nothing about its result.
    if row.id in work.batch.restarts or row.id in work.batch.withdrawn:
        return None
    late, silent = row.id in work.overdue, row.id in work.silent
    return writing.examine(row, seen, work.reasons, overdue=late, silent=silent)
