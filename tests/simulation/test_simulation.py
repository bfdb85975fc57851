"""The sample of seeds, and that a failing one can be found, shortened, told and seen again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.evidence import Evidence
from tests.simulation.faults import POSSIBLE
from tests.simulation.planted import PLANTS, Plant, forgets_tombstones
from tests.simulation.report import report
from tests.simulation.run import run
from tests.simulation.schedule import draw
from tests.simulation.shrink import kind, shortest
from tests.simulation.tally import run_chunk, run_many

ROOT = Path(__file__).parents[2]
FULL, SAMPLE = 100_000, 5_000
FOUND_WITHIN = 2_000
"""Seeds, well inside the sample, among which each planted bug must be found."""
FAILED_ONCE = {
    3711: (0, 1, 2, 3, 5, 9, 10),  # stopped while it wrote an end; a terminate came right behind
    43424: (0, 3, 6, 7, 13, 15, 18, 20, 21, 28, 30, 48, 49, 59, 62, 66),  # removed twice, anew
    18218: (44, 46, 49, 50),  # a container removed by hand while it was stopped with grace
}
"""Seeds and those of their events that are needed."""


@pytest.mark.slow
@pytest.mark.one_python
@pytest.mark.timeout(4 * 3600)
def test_no_seed_violates_anything(evidence: Evidence) -> None:
    """Slow, because what it looks for are interleavings that no test names."""
    seeds = evidence.share(range(FULL)) if evidence.full else range(SAMPLE)
    tally = run_many(seeds, jobs=os.cpu_count() or 1)
    evidence.write("simulation", **tally.document())
    assert not tally.failures, report(min(tally.failures))
    assert tally.seeds == len(seeds)
    assert tally.steps / tally.seeds >= 50
    if evidence.full and evidence.parts == 1:
        fault, times = tally.least_struck()
        assert times >= 20, f"{fault} struck {times} times"


def test_a_few_seeds_run_here_where_coverage_sees_them() -> None:
    tally = run_chunk(list(range(40)))
    assert not tally.failures
    assert tally.steps / tally.seeds >= 50
    assert set(tally.struck) <= set(POSSIBLE)


@pytest.mark.parametrize(("seed", "events"), FAILED_ONCE.items())
def test_a_seed_that_failed_once_fails_no_more(seed: int, events: tuple[int, ...]) -> None:
    assert run(draw(seed).only(events)).violations == ()


@pytest.fixture(scope="module")
def found_at(evidence: Evidence) -> Iterator[dict[str, int]]:
    """Planted bug → the first seed that finds it."""
    found_at: dict[str, int] = {}
    yield found_at
    evidence.write("planted", planted_bugs_found=len(found_at), found_at_seed=found_at)


@pytest.mark.slow
@pytest.mark.one_python
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_every_planted_bug_is_found(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, found_at: dict[str, int]
) -> None:
    """Slow for bugs that need several things to go wrong: each is looked for from seed 0 on."""
    plant(monkeypatch)
    found_at[plant.__name__] = next(
        seed for seed in range(FOUND_WITHIN) if run(draw(seed)).violations
    )


def test_a_seed_runs_the_same_way_every_time_and_in_every_process() -> None:
    code = (
        "from tests.simulation.run import run; from tests.simulation.schedule import draw;"
        "import hashlib; trace = '\\n'.join(run(draw(17), tells=True).trace);"
        "print(hashlib.sha256(trace.encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(digests) == 1


def test_a_failing_seed_is_shrunk_and_told_with_the_way_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgets_tombstones(monkeypatch)
    seed = next(seed for seed in range(100) if run(draw(seed)).violations)
    told = report(seed)
    assert "is accepted and unknown" in told
    last = told.splitlines()[-1]
    assert last.startswith(f"again: python -m tests.simulation {seed} --events ")
    kept = [int(number) for number in last.rpartition(" ")[2].split(",")]
    assert len(kept) < len(draw(seed).events) / 3
    assert run(draw(seed).only(kept)).violations


def test_shrinking_keeps_what_is_needed_and_nothing_else() -> None:
    def fails(kept: list[int]) -> bool:
        return {3, 17, 40} <= set(kept)

    assert shortest(list(range(60)), fails) == [3, 17, 40]


def test_violations_of_one_kind_are_told_apart_from_others() -> None:
    assert kind("t1 is accepted and unknown") == kind("t22 is accepted and unknown")
    assert kind("t1 is accepted and unknown") != kind("t1 goes from running to pending")
