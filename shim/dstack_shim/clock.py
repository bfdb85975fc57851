"""Wall-clock time as something that is passed in.

Waiting uses the event loop's own clock, which a simulation replaces as a whole; only the
time that is written down or compared with the engine's stamps comes from here.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time of day."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()
