"""
Taking an instance for a restart, so that no two servers restart it, nor more than may be.

A claim is a row: of all restarts without an outcome an instance can have one. What the policy allows
is judged in the same transaction, under the lock of the one row that all claims take first.
"""

from datetime import datetime, timezone

import attrs
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from dstack_shim_server.policy import Policy, Request, RolloutState, Ruling, UnderWay, rule
from dstack_shim_server.proof import Outcome
from dstack_shim_server.record import rows
from dstack_shim_server.record.rows import Fleet, NewRestart
from dstack_shim_server.record.tables import restarts, rollout, stops
from dstack_shim_server.record.writing import failures, insert


@attrs.frozen
class Claimed:
    """The answer to a claim."""

    ruling: Ruling
    state: RolloutState


async def claim(
    connection: AsyncConnection,
    new: NewRestart,
    fleet: Fleet,
    policy: Policy,
    replica: str,
    now: float,
) -> Claimed:
    """Judge a restart by the policy and, if it is allowed, write it down as under way."""
    # First of all: the lock. Without it two claims would each see the other's place as free.
    await connection.execute(update(rollout).values(claims=rollout.c.claims + 1))
    state = await read_state(connection)
    ruling = rule(policy, state, request_for(new, fleet), moment(now))
    if not ruling.allowed:
        return Claimed(ruling, state)
    row = rows.restart_row(new, fleet, replica, now)
    done = await connection.execute(insert(connection, restarts).on_conflict_do_nothing(), row)
    if not done.rowcount:
        ruling = Ruling(False, "a restart of this instance is under way")
    return Claimed(ruling, state)


async def read_state(connection: AsyncConnection) -> RolloutState:
    """Read what the policy judges by."""
    stopped = await connection.execute(
        select(stops.c.version, stops.c.why).where(stops.c.lifted_at.is_(None))
    )
    under_way = await connection.execute(
        select(restarts.c.id, restarts.c.instance_id, restarts.c.to_version).where(
            restarts.c.outcome.is_(None)
        )
    )
    confirmed = await connection.execute(
        select(restarts.c.to_version, func.count(restarts.c.instance_id.distinct()))
        .where(restarts.c.outcome == Outcome.CONFIRMED.value)
        .group_by(restarts.c.to_version)
    )
    failed = await connection.execute(failures())
    paused = await connection.execute(select(rollout.c.paused_by))
    return RolloutState(
        paused_by=paused.scalar_one(),
        stops=rows.pairs(stopped),
        under_way=tuple(UnderWay(*row) for row in under_way),
        confirmed=rows.pairs(confirmed),
        failed={(row.instance_id, row.to_version): row.outcome for row in failed},
    )


def request_for(new: NewRestart, fleet: Fleet) -> Request:
    """Put a restart in the policy's words."""
    return Request(
        instance_id=new.subject.id,
        instance=new.subject.name,
        project=fleet.project,
        fleet=fleet.name,
        target=new.to_version,
    )


def moment(now: float) -> datetime:
    """Make an instant of seconds since the epoch."""
    return datetime.fromtimestamp(now, timezone.utc)
