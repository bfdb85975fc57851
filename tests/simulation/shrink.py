"""Makes a failing schedule as short as it can be and still fail in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.simulation.run import run
from tests.simulation.schedule import Schedule

MOST_RUNS = 600
"""Runs after which a schedule is short enough."""


def kind(violation: str) -> str:
    """What a violation says, whichever task and GPU it says it of."""
    words = re.sub(r"\bt\d+\b|\bjob\d+\S*|GPU-\d", "…", violation)
    return re.sub(r"\[.*|\{.*|\(.*|'.*", "", words)[:60]


def shrink(schedule: Schedule, first: str) -> tuple[int, ...]:
    """The numbers of the events that are needed for a violation like ``first``."""

    def fails(kept: list[int]) -> bool:
        violations = run(schedule.only(kept)).violations
        return bool(violations) and kind(violations[0]) == kind(first)

    return tuple(shortest(list(range(len(schedule.events))), fails))


def shortest(kept: list[int], fails: Callable[[list[int]], bool]) -> list[int]:
    """Drop halves, then quarters, then single events, for as long as it still fails."""
    size, runs = max(1, len(kept) // 2), 0
    while True:
        start, dropped = 0, False
        while start < len(kept) and runs < MOST_RUNS:
            trial = kept[:start] + kept[start + size :]
            runs += 1
            if fails(trial):
                kept, dropped = trial, True
            else:
                start += size
        if runs >= MOST_RUNS or (size == 1 and not dropped):
            return kept
        if size > 1:
            size //= 2
