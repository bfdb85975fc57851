"""Killed, or refused, at every instant of a task's life: nothing lost, nothing leaked."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest

from tests.crash import tool_points
from tests.crash.kill_points import LIVES, WORKER, Outcome, Point, Trials, choose
from tests.crash.stage import Stage
from tests.crash.start_points import SITUATIONS, Starts
from tests.evidence import Evidence

# Of each life, start and error in the sample.
KILLS, STARTS, REFUSALS = 21, 3, 2
CHANGES = {"write", "fsync", "rename", "renameat", "mkdir", "mkdirat"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * 3600)]


@attrs.define
class Tally:
    """What was tried of one kind."""

    tried: int = 0
    census_violations: int = 0

    def add(self, outcomes: list[Outcome]) -> None:
        bad = [outcome for outcome in outcomes if outcome.problems]
        self.tried += len(outcomes)
        self.census_violations += sum(len(outcome.problems) for outcome in bad)
        assert bad == []


def counted(kind: str, evidence: Evidence) -> Iterator[Tally]:
    tally = Tally()
    yield tally
    counts = {kind: tally.tried, "census_violations": tally.census_violations}
    evidence.write(kind, **counts)


@pytest.fixture(scope="module")
def kills(evidence: Evidence) -> Iterator[Tally]:
    yield from counted("kill_points", evidence)


@pytest.fixture(scope="module")
def starts(evidence: Evidence) -> Iterator[Tally]:
    yield from counted("start_points", evidence)


@pytest.fixture(scope="module")
def refusals(evidence: Evidence) -> Iterator[Tally]:
    yield from counted("refusals", evidence)


@pytest.fixture(scope="module")
def trials(stage: Stage) -> Trials:
    return Trials(stage)


@pytest.fixture(scope="module")
def points(trials: Trials) -> dict[str, list[Point]]:
    """The instants of each life."""
    return {life: trials.points(life) for life in LIVES}


@pytest.mark.parametrize("life", LIVES)
def test_a_kill_at_any_call_loses_and_leaks_nothing(
    trials: Trials, points: dict[str, list[Point]], life: str, kills: Tally, evidence: Evidence
) -> None:
    """What no fake can tell: that the real order of the real calls has no gap."""
    chosen = choose(points[life], KILLS, evidence)
    kills.add([trials.kill(point) for point in chosen])


def test_a_kill_while_a_tool_works_loses_and_leaks_nothing(
    trials: Trials, kills: Tally, evidence: Evidence
) -> None:
    """What the tool does after its shim is gone, only a real one does."""
    chosen = evidence.share(tool_points.POINTS)
    kills.add([tool_points.kill(trials, point) for point in chosen])


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_kill_at_any_call_of_a_start_loses_and_leaks_nothing(
    trials: Trials, situation: str, starts: Tally, evidence: Evidence
) -> None:
    """As the kills in a life, for the start that makes the one before good."""
    starting = Starts(trials)
    chosen = choose(starting.points(situation), STARTS, evidence)
    starts.add([starting.kill(point) for point in chosen])


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("life", LIVES)
def test_a_disk_that_refuses_any_call_costs_no_more_than_an_honest_error(
    trials: Trials,
    points: dict[str, list[Point]],
    life: str,
    error: str,
    refusals: Tally,
    evidence: Evidence,
) -> None:
    """As the kills, for what a full or broken disk does to the same calls."""
    able = [point for point in points[life] if point.call.name in CHANGES]
    few = [point for point in able if point.thread == WORKER]
    chosen = choose(able if evidence.full else few, REFUSALS, evidence)
    refusals.add([trials.refuse(point, error) for point in chosen])
