"""What was counted, kept in ``build/evidence`` for the table in ``docs/testing.md``.

Full counts can be run in parts (``--part 3/10``), each by itself and in any order; each leaves
a file of its own, and ``tools/evidence.py`` adds them up. A sample never takes the place of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

FOLDER = Path(__file__).resolve().parents[1] / "build" / "evidence"


class Evidence:
    """What this run is to try of all there is, and where it writes down what came of that.

    ``part`` is 1 … ``parts``; samples have one part.
    """

    def __init__(self, *, full: bool, part: int = 1, parts: int = 1) -> None:
        self.full = full
        self.part = part
        self.parts = parts

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This part's share of them."""
        first, end = (number * len(items) // self.parts for number in (self.part - 1, self.part))
        return items[first:end]

    def write(self, name: str, **counts: object) -> Path:
        """Keep the counts of one kind of test; returns the file."""
        folder = FOLDER if self.full else FOLDER / "sample"
        folder.mkdir(parents=True, exist_ok=True)
        document = {"part": self.part, "parts": self.parts, **counts}
        suffix = f".{self.part}-of-{self.parts}" if self.parts > 1 else ""
        file = folder / f"{name}{suffix}.json"
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return file


def parse_part(text: str) -> tuple[int, int]:
    """``3/10`` as numbers.

    Raises ``ValueError`` naming what was expected.
    """
    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise ValueError(f"--part: {text!r} is no part; expected one like 3/10")
    return int(first), int(second)
