"""
May this instance's shim be restarted now, as far as the roll-out is concerned: a pure function.

Whether its tasks survive is the gate's question and was answered before. Here counts what the
operator wants, what is under way elsewhere, and what earlier restarts into this version did.
"""

from collections.abc import Mapping
from datetime import datetime

import attrs

from dstack_shim_server.hours import Hours


@attrs.frozen
class Policy:
    """What the operator chose; the defaults are what an empty environment means."""

    # Instances that must be confirmed before all others; 0 for none.
    canaries: int = 1
    # Restarts at the same time; 0 for no limit.
    max_under_way: int = 0
    paused: bool = False
    hours: Hours | None = None
    hold_instances: frozenset[str] = frozenset()
    # By name or `project/name`.
    hold_fleets: frozenset[str] = frozenset()


@attrs.frozen
class Request:
    """One instance that could be restarted, and into what."""

    instance_id: str
    instance: str
    project: str
    fleet: str
    target: str


@attrs.frozen
class UnderWay:
    """A restart that is neither confirmed nor failed."""

    restart_id: str
    instance_id: str
    target: str


@attrs.frozen
class RolloutState:
    """What the record says about the whole roll-out."""

    # By whom it was paused from the command line, "" if it was not.
    paused_by: str = ""
    # Stopped versions and why.
    stops: Mapping[str, str] = attrs.Factory(dict)
    under_way: tuple[UnderWay, ...] = ()
    # Instances confirmed, by version.
    confirmed: Mapping[str, int] = attrs.Factory(dict)
    # What became of instances that did not take a version, by instance and version.
    failed: Mapping[tuple[str, str], str] = attrs.Factory(dict)


@attrs.frozen
class Ruling:
    """The answer, and the reason in words for a log."""

    allowed: bool
    reason: str


def rule(policy: Policy, state: RolloutState, request: Request, now: datetime) -> Ruling:
    """Judge one restart. Whatever forbids it is said; the operator's own wishes come first."""
    for forbids in (_held, _stopped, _failed_here, _under_way_here, _full, _before_canaries):
        reason = forbids(policy, state, request)
        if reason:
            return Ruling(False, reason)
    if policy.hours is not None and not policy.hours.allow(now):
        return Ruling(False, f"outside the allowed hours {policy.hours}")
    return Ruling(True, "allowed")


def _held(policy: Policy, state: RolloutState, request: Request) -> str:
    if policy.paused:
        return "the roll-out is paused by DSTACK_SHIM_RESTART_PAUSE"
    if state.paused_by:
        return f"the roll-out is paused by {state.paused_by}"
    if request.instance in policy.hold_instances:
        return f"instance {request.instance} is held"
    if {request.fleet, f"{request.project}/{request.fleet}"} & policy.hold_fleets:
        return f"fleet {request.fleet} is held"
    return ""


def _stopped(_: Policy, state: RolloutState, request: Request) -> str:
    why = state.stops.get(request.target)
    return "" if why is None else f"version {request.target} is stopped: {why}"


def _failed_here(_: Policy, state: RolloutState, request: Request) -> str:
    # What it did not take once it would not take again, every half a minute.
    outcome = state.failed.get((request.instance_id, request.target))
    return "" if outcome is None else f"it did not take {request.target} before: {outcome}"


def _under_way_here(_: Policy, state: RolloutState, request: Request) -> str:
    if any(restart.instance_id == request.instance_id for restart in state.under_way):
        return "a restart of this instance is under way"
    return ""


def _full(policy: Policy, state: RolloutState, _: Request) -> str:
    if not policy.max_under_way or len(state.under_way) < policy.max_under_way:
        return ""
    return f"{len(state.under_way)} restarts are under way, at most {policy.max_under_way} may be"


def _before_canaries(policy: Policy, state: RolloutState, request: Request) -> str:
    confirmed = state.confirmed.get(request.target, 0)
    if confirmed >= policy.canaries:
        return ""
    trying = sum(1 for restart in state.under_way if restart.target == request.target)
    if confirmed + trying < policy.canaries:
        return ""
    return f"waits for canaries: {confirmed} of {policy.canaries} confirmed in {request.target}"
