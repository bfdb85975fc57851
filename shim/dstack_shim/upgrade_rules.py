"""What a replacement in place has come to: pure functions of what is remembered of it."""

from __future__ import annotations

import attrs
from dstack_shim_contracts.upgrade import Attempt, Outcome

PROBATION = 60.0
"""Seconds after a replacement in which the new file must not end by itself twice."""

UNDER_WAY = frozenset({Outcome.STOPPING, Outcome.TRYING, Outcome.SETTLING})
FAILED = frozenset({Outcome.REFUSED, Outcome.ROLLED_BACK, Outcome.DIED})


def seen_after_an_end(last: Attempt, *, in_place: bool, same_boot: bool, now: float) -> Attempt:
    """What an attempt has come to, as seen by a start to which nobody handed over.

    ``in_place`` tells that its new content lies at the path; ``now`` is in monotonic seconds.
    """
    if last.outcome is Outcome.STOPPING:
        return ended(last, Outcome.INTERRUPTED, "the old shim was stopped before it handed over")
    if last.outcome is Outcome.TRYING and in_place:
        return attrs.evolve(last, outcome=Outcome.SETTLING, ready_at=now, deaths=1)
    if last.outcome is Outcome.TRYING and not same_boot:
        return ended(last, Outcome.INTERRUPTED, "the host went down meanwhile")
    if last.outcome is Outcome.TRYING:
        return ended(last, Outcome.DIED, "it ended before it was ready")
    if last.outcome is not Outcome.SETTLING:
        return last
    if not in_place or not same_boot or now - last.ready_at >= PROBATION:
        return ended(last, Outcome.DONE, "")
    if last.deaths == 0:
        return attrs.evolve(last, deaths=1)
    return ended(last, Outcome.DIED, f"it ended twice within {PROBATION:g} s of being ready")


def ended(last: Attempt, outcome: Outcome, reason: str) -> Attempt:
    """The attempt with its end."""
    return attrs.evolve(last, outcome=outcome, reason=reason)
