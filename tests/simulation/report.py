"""Tells of a failing seed: its shortest schedule, what happened, and how to see it again."""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.run import run
from tests.simulation.schedule import draw
from tests.simulation.shrink import shrink

LONGEST_TRACE = 400
"""Lines of a trace that are told."""


def report(seed: int, kept: Sequence[int] | None = None) -> str:
    """Run a seed, or only these of its events, and tell of it; shrunk if it fails."""
    schedule = draw(seed)
    numbers = tuple(range(len(schedule.events))) if kept is None else tuple(kept)
    result = run(schedule.only(numbers), tells=True)
    if result.violations and kept is None:
        numbers = shrink(schedule, result.violations[0])
        result = run(schedule.only(numbers), tells=True)
    lines = [f"seed {seed}: {len(result.violations)} violation(s)"]
    lines += [f"  ! {violation}" for violation in result.violations]
    lines += ["schedule:", *(f"  {n:3} {schedule.events[n]}" for n in numbers)]
    lines += ["trace:", *(f"  {line}" for line in result.trace[:LONGEST_TRACE])]
    if len(result.trace) > LONGEST_TRACE:
        lines.append(f"  … and {len(result.trace) - LONGEST_TRACE} lines more")
    events = ",".join(map(str, numbers))
    lines.append(f"again: python -m tests.simulation {seed} --events {events}")
    return "\n".join(lines)
