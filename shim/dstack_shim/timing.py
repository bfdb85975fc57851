"""How long things take, summed up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs


@attrs.define
class Timing:
    """How often something was done to its end, and how long it took, in seconds."""

    count: int = 0
    total: float = 0.0
    latest: float = 0.0

    @contextmanager
    def measured(self, now: Callable[[], float]) -> Iterator[None]:
        """Count what is done within, by the clock ``now``; what raises does not count."""
        began = now()
        yield
        self.latest = now() - began
        self.total += self.latest
        self.count += 1
