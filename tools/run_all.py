"""`./dev test` and `./dev prove`: every check once, and one closing line.

    N passed, N failed, N skipped

counts the tests of all pytest runs. What is no test and failed (lint, a run that crashed, a changed
machine) is named above the line and counted as one failure each, so that the line never looks
better than the exit code.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tools import host_state, interpreters
from tools.lanes import ROOT, Lanes, Session

COUNTS = ROOT / "build" / "counts"
COVERAGE = ROOT / "build" / "coverage"
LOCK = ROOT / "build" / "run-all.lock"
# The one that measures coverage and tries most comes first.
FAST = sorted(
    (f"fast({version})" for version in interpreters.SUPPORTED),
    key=lambda name: interpreters.RUNNING not in name,
)
LIMIT = {"test": 900.0, "prove": 4 * 3600.0}  # seconds for one session
# In `prove` only: what would not fit in the 15 minutes of `test`. Each can be run by its name.
LONG = ("mutants",)


def steps(command: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """What runs after what. The lanes of a step run side by side; each step begins when the one
    before is done: the file must be built before anything runs it, coverage comes last.
    """
    long = LONG if command == "prove" else ()
    told = ((("evidence",),),) if command == "prove" else ()
    return (
        (("build",),),
        (
            # About as long as each other on two cores; the last two mostly wait for their engines.
            ("lint", "types", "docs", *FAST),
            ("releases", "engine", "package", *long),
            ("crash", "simulation", "upgrade", "conformance", "server", "demo"),
        ),
        (("coverage",),),
        *told,
    )


def chosen_steps(sessions: Sequence[str]) -> Sequence[Sequence[Sequence[str]]]:
    """These alone, one after the other, on a file that is built from what is there now."""
    return (("build",),), (tuple(sessions),)


@dataclass
class Run:
    """What one pytest run counted."""

    name: str
    finished: bool
    passed: int
    failed: int
    skipped: int
    skips: dict[str, str]


@dataclass
class Outcome:
    """What all of it came to; ``failures`` are those that no test stands for."""

    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skips: list[tuple[str, str]] = field(default_factory=list)

    def closing_line(self) -> str:
        """The one line that says it all."""
        passed = sum(run.passed for run in self.runs)
        return f"{passed} passed, {self.failed} failed, {len(self.skips)} skipped"

    @property
    def failed(self) -> int:
        """Failed tests and failed checks."""
        return sum(run.failed for run in self.runs) + len(self.failures)


def main(arguments: list[str]) -> int:
    """Run everything; 0 only if nothing failed and something passed."""
    parser = argparse.ArgumentParser(prog="./dev test")
    parser.add_argument("command", choices=["test", "prove"])
    parser.add_argument("sessions", nargs="*", help="only these, one after the other")
    parser.add_argument("--part", default="1/1", help="of prove's long sessions, as 3/10")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    lock = LOCK.open("w")  # held until the process ends: two runs would mix their counts
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another ./dev test or prove runs in this checkout", file=sys.stderr)
        return 1
    _empty(COUNTS, COVERAGE)
    signal.signal(signal.SIGTERM, _interrupted)

    host_state.adopt_orphans()
    before = host_state.take()
    sessions = run_sessions(
        options.command,
        chosen_steps(options.sessions) if options.sessions else steps(options.command),
        options.part,
    )
    outcome = add_up(read_counts(COUNTS), sessions)
    outcome.failures += changes_to_the_machine(before)
    for line in describe(outcome):
        print(line)
    print(f"{time.monotonic() - began:.0f} s")
    print(outcome.closing_line(), flush=True)
    return 0 if outcome.failed == 0 and any(run.passed for run in outcome.runs) else 1


def run_sessions(
    command: str, steps: Sequence[Sequence[Sequence[str]]], part: str = "1/1"
) -> list[Session]:
    """Every session of every step, also after one failed."""
    environment = {**os.environ, "DSTACK_SHIM_COUNTS": str(COUNTS)}
    if command == "prove":
        environment |= {"DSTACK_SHIM_FULL": "1", "DSTACK_SHIM_PART": part}
    lanes = Lanes(environment, LIMIT[command])
    for step in steps:
        lanes.run(step)
    return lanes.finished


def read_counts(folder: Path) -> list[Run]:
    """The runs that left counts, by name."""
    documents = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
    return [
        Run(
            name=document["run"],
            finished=document["finished"],
            passed=document["passed"],
            failed=document["failed"],
            skipped=document["skipped"],
            skips=document["skips"],
        )
        for document in documents
    ]


def add_up(runs: list[Run], sessions: list[Session]) -> Outcome:
    """Tests from the counts; a session that failed without a failed test is a failure itself."""
    outcome = Outcome(runs=runs)
    for run in runs:
        outcome.skips += run.skips.items()
        if not run.finished:
            outcome.failures.append(f"{run.name}: the run died before its end")
    for session in sessions:
        if session.result == "skipped":
            outcome.skips.append((session.name, session.reason))
        elif session.result != "success" and not _is_told(session.name, runs):
            outcome.failures.append(f"{session.name}: {session.result} {session.reason}".strip())
    return outcome


def _is_told(session: str, runs: list[Run]) -> bool:
    """Whether the counts show why this session failed; ``fast(3.10)`` counts as ``fast-3.10``."""
    prefix = session.replace("(", "-").replace(")", "")
    return any(run.failed or not run.finished for run in runs if run.name.startswith(prefix))


def changes_to_the_machine(before: host_state.State) -> list[str]:
    """What is not as it was, processes left running included (those are then ended)."""
    leftovers = host_state.leftover_processes()
    for process in leftovers:
        try:
            os.kill(int(process.split()[0]), signal.SIGKILL)
        except ProcessLookupError:
            continue
    changes = [f"left running: {process}" for process in leftovers]
    changed = lasting_differences(before, host_state.take)
    return changes + [f"changed on this machine: {line}" for line in changed]


def lasting_differences(
    before: host_state.State, take: Callable[[], host_state.State], within: float = 10.0
) -> list[str]:
    """The differences that do not vanish by themselves: the kernel frees a loop device or an
    interface of a dead namespace a moment after its last user.
    """
    deadline = time.monotonic() + within
    while True:
        changed = host_state.differences(before, take())
        if not changed or time.monotonic() >= deadline:
            return changed
        time.sleep(0.25)


def describe(outcome: Outcome) -> Iterable[str]:
    """A table of the runs, the reasons of skips, the failures that are no tests."""
    yield f"\n{'run':<24}{'passed':>8}{'failed':>8}{'skipped':>9}"
    for run in outcome.runs:
        yield f"{run.name:<24}{run.passed:>8}{run.failed:>8}{run.skipped:>9}"
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in outcome.skips:
        by_reason[reason].append(name)
    for reason, names in by_reason.items():
        yield f"skipped: {reason}: {', '.join(names)}"
    for failure in outcome.failures:
        yield f"FAILED {failure}"


def _empty(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def _interrupted(signal_number: int, _frame: object) -> NoReturn:
    sys.exit(128 + signal_number)  # unwinds through Lanes.run, which ends what is running


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
