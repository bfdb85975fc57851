"""What was measured: numbers by what they are of and whose they are, kept from run to run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest of the values that at least ``part`` of them do not exceed.

    Raises ``ValueError`` without values.
    """
    if not values:
        raise ValueError("nothing was measured")
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def median(values: Sequence[float]) -> float:
    """The value in the middle."""
    return quantile(values, 0.5)


class Samples:
    """Measured values by source and candidate."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {}

    def add(self, source: str, candidate: str, values: Iterable[float]) -> None:
        """Put more values beside those there are."""
        self._values.setdefault(source, {}).setdefault(candidate, []).extend(values)

    def of(self, source: str, candidate: str) -> tuple[float, ...]:
        """All values of it, in the order in which they were measured."""
        return tuple(self._values.get(source, {}).get(candidate, ()))

    def replace(self, newer: Samples) -> None:
        """Take over what was measured anew; a source is replaced whole, for every candidate."""
        self._values.update(newer._values)

    def sources(self) -> tuple[str, ...]:
        """What was measured."""
        return tuple(self._values)

    def document(self) -> dict[str, dict[str, list[float]]]:
        """All of it, for JSON."""
        return {source: dict(values) for source, values in self._values.items()}


def read(document: dict[str, Any]) -> Samples:
    """The samples of a document."""
    samples = Samples()
    for source, by_candidate in document.items():
        for name, values in by_candidate.items():
            samples.add(source, name, values)
    return samples


def load(path: Path) -> dict[str, Any]:
    """The document of earlier runs, empty without any."""
    if not path.exists():
        return {}
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
