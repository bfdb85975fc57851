"""Combines the coverage of all runs and fails if a part that must be covered is not.

Both figures must hold: lines and branches together as coverage counts them, and branches alone.
What a crash is undone by is covered whole: there is no other place where a gap costs a job.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import attrs
import coverage

SHIM = "shim/dstack_shim"


@attrs.frozen
class Part:
    """Files told as one, and the percentage they must reach."""

    bound: float
    files: tuple[str, ...]


PARTS = {
    "contracts": Part(95, ("contracts/dstack_shim_contracts/*",)),
    "shim core": Part(95, (f"{SHIM}/tasks/*", f"{SHIM}/store.py")),
    "record": Part(
        100,
        ("contracts/dstack_shim_contracts/record.py", f"{SHIM}/store.py", f"{SHIM}/records.py"),
    ),
    "recovery": Part(
        100,
        tuple(f"{SHIM}/tasks/{name}.py" for name in ("recovery", "restore", "survey", "outcomes")),
    ),
    "resources": Part(100, (f"{SHIM}/resources/*",)),
}
FOLDER = Path("build/coverage")


def main() -> int:
    """Print a table of the parts; 0 if every part reaches the bound."""
    if not list(FOLDER.glob("data.*")) and not (FOLDER / "data").exists():
        print("no coverage was measured: run the whole of ./dev test")
        return 1
    measured = coverage.Coverage()
    measured.combine(keep=True)
    measured.save()
    below = [name for name, part in PARTS.items() if not _holds(measured, name, part)]
    if below:
        print(
            "below its bound: " + ", ".join(f"{name} ({PARTS[name].bound:g} %)" for name in below)
        )
    return 1 if below else 0


def _holds(measured: coverage.Coverage, name: str, part: Part) -> bool:
    target = FOLDER / f"{name.replace(' ', '-')}.json"
    measured.json_report(outfile=str(target), include=[*part.files])
    totals = json.loads(target.read_text(encoding="utf-8"))["totals"]
    whole = float(totals["percent_covered"])
    branches = _percent(totals["covered_branches"], totals["num_branches"])
    print(
        f"coverage of {name}: {whole:.1f} %, branches {totals['covered_branches']} of "
        f"{totals['num_branches']} ({branches:.1f} %)"
    )
    if min(whole, branches) >= part.bound:
        return True
    measured.report(file=sys.stdout, include=[*part.files], show_missing=True, skip_covered=True)
    return False


def _percent(covered: int, total: int) -> float:
    return 100.0 * covered / total if total else 100.0


if __name__ == "__main__":
    sys.exit(main())
