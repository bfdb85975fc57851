"""What was counted, for the table in ``docs/testing.md``."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "evidence"


def write(name: str, *, full: bool, **counts: object) -> None:
    """Put the counts of one kind of test in ``build/evidence/<name>.json``."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    document = {"counts": "full" if full else "sample", **counts}
    (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
