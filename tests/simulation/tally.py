"""Many seeds, on as many processes as are wanted, and what they add up to."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

import attrs

from tests.simulation.faults import POSSIBLE
from tests.simulation.run import Result, run
from tests.simulation.schedule import draw

_CHUNK = 100


@attrs.define
class Tally:
    """What runs add up to. ``failures`` are the violations of each failing seed."""

    seeds: int = 0
    steps: int = 0
    calls: int = 0
    generations: int = 0
    virtual_seconds: float = 0.0
    cpu_seconds: float = 0.0
    failures: dict[int, tuple[str, ...]] = attrs.Factory(dict)
    struck: Counter[tuple[str, str]] = attrs.Factory(Counter)
    happened: Counter[str] = attrs.Factory(Counter)

    def add(self, result: Result) -> None:
        """Count one run."""
        self.seeds += 1
        self.steps += result.steps
        self.calls += result.calls
        self.generations += result.generations
        self.virtual_seconds += result.seconds
        self.struck.update(result.struck)
        self.happened.update(result.happened)
        if result.violations:
            self.failures[result.seed] = result.violations

    def merge(self, other: Tally) -> None:
        """Count what another has counted."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures.update(other.failures)
        self.struck.update(other.struck)
        self.happened.update(other.happened)

    def least_struck(self) -> tuple[tuple[str, str], int]:
        """The fault that struck least often, and how often."""
        return min(((fault, self.struck[fault]) for fault in POSSIBLE), key=lambda item: item[1])

    def document(self) -> dict[str, object]:
        """The counts as they are kept as evidence."""
        faults: dict[str, dict[str, int]] = {}
        for call, mode in POSSIBLE:
            faults.setdefault(call, {})[mode] = self.struck[call, mode]
        return {
            "simulated_seeds": self.seeds,
            "simulated_steps": self.steps,
            "engine_calls": self.calls,
            "generations": self.generations,
            "virtual_hours": round(self.virtual_seconds / 3600),
            "cpu_seconds": round(self.cpu_seconds),
            "census_violations": sum(map(len, self.failures.values())),
            "failing_seeds": sorted(self.failures),
            "faults": faults,
            "happened": dict(sorted(self.happened.items())),
        }


_SUMS = ("seeds", "steps", "calls", "generations", "virtual_seconds", "cpu_seconds")


def run_chunk(seeds: list[int]) -> Tally:
    """Run some seeds here. The collector is held back: a run leaves its cycles all at once."""
    tally, begun = Tally(), time.process_time()
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # what is there before is not looked through again and again
    try:
        for number, seed in enumerate(seeds, start=1):
            tally.add(run(draw(seed)))
            if number % 25 == 0:
                gc.collect()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    tally.cpu_seconds = time.process_time() - begun
    return tally


def run_many(seeds: Iterable[int], jobs: int) -> Tally:
    """Run all seeds on ``jobs`` processes."""
    total = Tally()
    for tally in _tallies(seeds, jobs):
        total.merge(tally)
    return total


def _tallies(seeds: Iterable[int], jobs: int) -> Iterator[Tally]:
    if jobs == 1:
        yield from map(run_chunk, _chunks(seeds))
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_chunk, _chunks(seeds))


def _chunks(seeds: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(seeds)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk
