"""Adds up what `./dev prove` has counted and writes it into ``docs/testing.md``.

    .venv/bin/python -m tools.evidence

Counts are in ``build/evidence/*.json``: one file for each kind of test, or one for each part it
was run in. Only what is complete is told: of something run in parts, all parts must be there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "evidence"
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- {}: begin -->\n", "<!-- {}: end -->\n"

Counts = Mapping[str, Any]


class Incomplete(Exception):
    """Some of the counts are missing."""


ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "kill_points",
        "kill_points",
        "instants of a task's life at which a shim was killed",
        "crash",
    ),
    ("start_points", "start_points", "instants of a start at which one was killed", "crash"),
    ("refusals", "refusals", "system calls refused (no space, I/O error)", "crash"),
    (
        "upgrades",
        "upgrade_kill_points",
        "instants of a replacement at which one was killed",
        "crash",
    ),
    ("power_cuts", "power_cuts", "power cuts at an acknowledgement", "crash"),
    ("soak", "soak_seconds", "seconds of churn under kills at random instants", "crash"),
    ("soak", "soak_kills", "kills in it", "crash"),
    ("soak", "soak_tasks", "tasks seen through in it", "crash"),
    ("kill9", "kill9_rounds", "rounds of `kill -9` with eight tasks, five untouched", "engine"),
    ("matrix", "matrix_cells", "cells of the restore matrix on the fake engine", "simulation"),
    ("matrix_real", "matrix_cells_real", "cells of it on a real engine", "engine"),
    ("outages", "outages", "engine outages with a shim at work", "engine"),
    ("simulation", "simulated_seeds", "simulated seeds", "simulation"),
    ("simulation", "simulated_steps", "events in them", "simulation"),
    ("simulation", "generations", "shims that lived in them", "simulation"),
    ("planted", "planted_bugs_found", "bugs planted, and found by a seed", "simulation"),
    ("mutants", "mutants", "rules turned off, one at a time", "mutants"),
)
"""File, key, what is counted, and the session that counts it again."""
BAD = (
    ("census_violations", "census violations in all of these together"),
    ("falsely_ended", "times a task was told ended while its engine was away and it ran"),
    ("doubles", "second containers of a task after an outage"),
    ("unknown", "times an accepted task was unknown in one"),
    ("mutants_missed", "rules turned off that no test missed"),
)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Name → its counts, parts added up.

    Raises :class:`Incomplete` naming what is missing of a name.
    """
    documents: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        documents.setdefault(file.name.partition(".")[0], []).append(
            json.loads(file.read_text("utf-8"))
        )
    return {name: _whole(name, parts) for name, parts in documents.items()}


def _whole(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The latest division into parts of which all are there."""
    divisions: dict[int, dict[int, dict[str, Any]]] = {}
    for document in found:
        divisions.setdefault(document.pop("parts"), {})[document.pop("part")] = document
    for parts, by_part in sorted(divisions.items()):
        if len(by_part) == parts:
            return dict(add_up(by_part[part] for part in sorted(by_part)))
    told = "; ".join(
        f"{sorted(set(range(1, parts + 1)) - set(by_part))} of {parts}"
        for parts, by_part in divisions.items()
    )
    raise Incomplete(f"{name}: parts are missing: {told}")


def add_up(documents: Iterable[Counts]) -> Counts:
    """Numbers are added, tables key by key, lists put together; words stay as they are."""
    total: dict[str, Any] = {}
    for document in documents:
        for name, value in document.items():
            total[name] = _sum(total[name], value) if name in total else value
    return total


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return add_up((one, other))
    return one if isinstance(one, str) else one + other


def counts_table(evidence: Mapping[str, Counts]) -> Iterable[str]:
    """What was counted, a row each; what was not counted has none."""
    yield "| how many | of what | again |"
    yield "|---:|---|---|"
    for name, key, what, session in ROWS:
        if key in evidence.get(name, {}):
            yield f"| {evidence[name][key]:,} | {what} | `./dev prove {session}` |"
    for key, what in BAD:
        if not any(key in counts for counts in evidence.values()):
            continue
        number = sum(counts.get(key, 0) for counts in evidence.values())
        yield f"| **{number:,}** | **{what}** | |"


def kinds_table(evidence: Mapping[str, Counts]) -> Iterable[str]:
    """What the power was cut at."""
    yield "| acknowledged | power cuts |"
    yield "|---|---:|"
    for kind, number in evidence["power_cuts"]["kinds"].items():
        yield f"| {kind} | {number} |"


def faults_table(evidence: Mapping[str, Counts]) -> Iterable[str]:
    """How often each fault struck each call."""
    yield "| call | how it went wrong, and how often |"
    yield "|---|---|"
    for call, modes in evidence["simulation"]["faults"].items():
        told = ", ".join(f"{mode} {number:,}" for mode, number in modes.items())
        yield f"| `{call}` | {told} |"


def planted_table(evidence: Mapping[str, Counts]) -> Iterable[str]:
    """Which seed finds which planted bug first."""
    yield "| planted bug | found by seed |"
    yield "|---|---:|"
    for name, seed in evidence["planted"]["found_at_seed"].items():
        yield f"| {name.replace('_', ' ')} | {seed} |"


def mutants_table(evidence: Mapping[str, Counts]) -> Iterable[str]:
    """Which tests miss which rule."""
    yield "| turned off | the rule | tests that fail |"
    yield "|---|---|---|"
    for name, rule in evidence["mutants"]["off"].items():
        tests = evidence["mutants"]["caught_by"][name]
        told = "<br>".join(f"`{test.rpartition('/')[2]}`" for test in tests) or "**none**"
        yield f"| {name.replace('-', ' ')} | {rule} | {told} |"


TABLES = {
    "counts": (counts_table, ()),
    "power cuts": (kinds_table, ("power_cuts",)),
    "faults": (faults_table, ("simulation",)),
    "planted bugs": (planted_table, ("planted",)),
    "mutants": (mutants_table, ("mutants",)),
}
"""What stands between which marks, and which counts it cannot do without."""


def written(page: str, evidence: Mapping[str, Counts]) -> str:
    """The page with its tables made anew; one whose counts are not there stays as it is.

    Raises ``ValueError`` for a page without the marks.
    """
    for name, (table, needed) in TABLES.items():
        if not all(file in evidence for file in needed):
            continue
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = page.partition(begin)
        _, also_found, after = rest.partition(end)
        if not (found and also_found):
            raise ValueError(f"the page has no place for {name!r}")
        page = f"{before}{begin}\n" + "\n".join(table(evidence)) + f"\n\n{end}{after}"
    return page


def main() -> int:
    """Write the page; 1 if something is missing or was violated."""
    try:
        evidence = read(FOLDER)
    except Incomplete as why:
        print(why, file=sys.stderr)
        return 1
    PAGE.write_text(written(PAGE.read_text("utf-8"), evidence), encoding="utf-8")
    for line in counts_table(evidence):
        print(line)
    return int(any(counts.get(key) for counts in evidence.values() for key, _ in BAD))


if __name__ == "__main__":
    sys.exit(main())
