"""`./dev test` and `./dev prove`: every check once, and one closing line.

    N passed, N failed, N skipped

counts the tests of all pytest runs. What is no test and failed (lint, a run that crashed, a changed
machine) is named above the line and counted as one failure each, so that the line never looks
better than the exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tools import host_state

ROOT = Path(__file__).resolve().parent.parent
COUNTS = ROOT / "build" / "counts"
REPORT = ROOT / "build" / "nox.json"
SESSIONS = [
    *("lint", "types", "build", "fast", "package", "releases", "engine", "server"),
    *("conformance", "demo", "coverage"),
]


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
    parser.add_argument("sessions", nargs="*", default=SESSIONS, help="only these sessions")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    for leftover in (COUNTS, ROOT / "build" / "coverage"):
        shutil.rmtree(leftover, ignore_errors=True)
    COUNTS.mkdir(parents=True)
    (ROOT / "build" / "coverage").mkdir()
    REPORT.unlink(missing_ok=True)

    host_state.adopt_orphans()
    before = host_state.take()
    run_nox(options.sessions, full=options.command == "prove")
    outcome = add_up(read_counts(COUNTS), read_report(REPORT))
    outcome.failures += changes_to_the_machine(before)
    for line in describe(outcome):
        print(line)
    print(f"{time.monotonic() - began:.0f} s")
    print(outcome.closing_line(), flush=True)
    return 0 if outcome.failed == 0 and any(run.passed for run in outcome.runs) else 1


def run_nox(sessions: list[str], *, full: bool) -> None:
    """Every session, also after one failed; what became of each stands in the report."""
    environment = {**os.environ, "DSTACK_SHIM_COUNTS": str(COUNTS)}
    if full:
        environment["DSTACK_SHIM_FULL"] = "1"
    command = [sys.executable, "-m", "nox", "--report", str(REPORT), "--session", *sessions]
    subprocess.run(command, env=environment, cwd=ROOT, check=False)


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


def read_report(file: Path) -> list[dict[str, str]] | None:
    """Nox's sessions with name, result and reason; None if nox left no report."""
    try:
        sessions = json.loads(file.read_text(encoding="utf-8"))["sessions"]
    except (OSError, ValueError):
        return None
    return [
        {key: session.get(key) or "" for key in ("name", "result", "reason")}
        for session in sessions
    ]


def add_up(runs: list[Run], sessions: list[dict[str, str]] | None) -> Outcome:
    """Tests from the counts; a session that failed without a failed test is a failure itself."""
    outcome = Outcome(runs=runs)
    for run in runs:
        outcome.skips += run.skips.items()
        if not run.finished:
            outcome.failures.append(f"{run.name}: the run died before its end")
    if sessions is None:
        outcome.failures.append("nox did not finish")
    for session in sessions or []:
        name, result = session["name"], session["result"]
        if result == "skipped":
            outcome.skips.append((name, session["reason"]))
        elif result != "success" and not _is_told(name, runs):
            outcome.failures.append(f"{name}: {result} {session['reason']}".strip())
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
    return changes + [
        f"changed on this machine: {line}"
        for line in host_state.differences(before, host_state.take())
    ]


def describe(outcome: Outcome) -> Iterable[str]:
    """A table of the runs, the reasons of skips, the failures that are no tests."""
    yield f"\n{'run':<16}{'passed':>8}{'failed':>8}{'skipped':>9}"
    for run in outcome.runs:
        yield f"{run.name:<16}{run.passed:>8}{run.failed:>8}{run.skipped:>9}"
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in outcome.skips:
        by_reason[reason].append(name)
    for reason, names in by_reason.items():
        yield f"skipped: {reason}: {', '.join(names)}"
    for failure in outcome.failures:
        yield f"FAILED {failure}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
