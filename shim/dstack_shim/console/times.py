"""Times for people and for programs."""

from __future__ import annotations

from datetime import datetime, timezone
from math import isfinite

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def age(seconds: float) -> str:
    """How long ago, to the largest unit: ``3d``, ``5h``, ``12m``, ``0s``; a dash for no number."""
    if not isfinite(seconds):
        return "-"
    whole = max(int(seconds), 0)
    for length, letter in _UNITS:
        if whole >= length:
            return f"{whole // length}{letter}"
    return "0s"


def rfc3339(seconds: float | None) -> str | None:
    """The time in UTC to the second; None for none, or for one that no calendar has."""
    if seconds is None:
        return None
    try:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def told(seconds: float | None, now: float) -> str:
    """The time with how long ago that was."""
    moment = rfc3339(seconds)
    if seconds is None or moment is None:
        return "-"
    return f"{moment} ({age(now - seconds)} ago)"
