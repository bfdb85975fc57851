"""``python -m tests.simulation SEED``: see the package."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.faults import table
from tests.simulation.report import report
from tests.simulation.run import run
from tests.simulation.schedule import draw
from tests.simulation.tally import run_many


def main() -> int:
    """Run one seed, or many; 1 if any fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="the seed, or the first of several")
    parser.add_argument("--count", type=int, help="run so many seeds and add them up")
    parser.add_argument("--jobs", type=int, default=1, help="processes for --count")
    parser.add_argument("--events", help="only these events of the schedule: 0,3,7")
    asked = parser.parse_args()
    if asked.count is not None:
        return _many(range(asked.seed, asked.seed + asked.count), asked.jobs)
    kept = (
        None if asked.events is None else [int(word) for word in asked.events.split(",") if word]
    )
    _say(report(asked.seed, kept))
    schedule = draw(asked.seed)
    return bool(run(schedule if kept is None else schedule.only(kept)).violations)


def _many(seeds: range, jobs: int) -> int:
    tally = run_many(seeds, jobs)
    for line in table(tally.struck):
        _say(line)
    document = tally.document()
    for name, count in document.items():
        if not isinstance(count, dict):
            _say(f"{name}: {count}")
    _say(f"{tally.steps / tally.seeds:.1f} steps a seed")
    _say(f"{tally.seeds / max(tally.cpu_seconds, 0.001):.0f} seeds a second of one core")
    if tally.failures:
        _say(report(min(tally.failures)))
    return bool(tally.failures)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
