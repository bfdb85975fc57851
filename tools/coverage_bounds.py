"""Combines the coverage of all runs and fails if a part that must be covered is not.

Both figures must hold: lines and branches together as coverage counts them, and branches alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import coverage

BOUND = 95.0
# What is told: the contracts, and the core of the shim (rules, record, restore).
PARTS = {
    "contracts": ["contracts/dstack_shim_contracts/*"],
    "shim core": ["shim/dstack_shim/tasks/*", "shim/dstack_shim/store.py"],
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
    below = [name for name, files in PARTS.items() if not _holds(measured, name, files)]
    if below:
        print(f"below {BOUND:g} %: {', '.join(below)}")
    return 1 if below else 0


def _holds(measured: coverage.Coverage, name: str, files: list[str]) -> bool:
    target = FOLDER / f"{name.replace(' ', '-')}.json"
    measured.json_report(outfile=str(target), include=files)
    totals = json.loads(target.read_text(encoding="utf-8"))["totals"]
    whole = float(totals["percent_covered"])
    branches = _percent(totals["covered_branches"], totals["num_branches"])
    print(
        f"coverage of {name}: {whole:.1f} %, branches {totals['covered_branches']} of "
        f"{totals['num_branches']} ({branches:.1f} %)"
    )
    if min(whole, branches) >= BOUND:
        return True
    measured.report(file=sys.stdout, include=files, show_missing=True, skip_covered=True)
    return False


def _percent(covered: int, total: int) -> float:
    return 100.0 * covered / total if total else 100.0


if __name__ == "__main__":
    sys.exit(main())
