"""The hours in which shims may be restarted: when people are there, or when they are not."""

import re
from datetime import datetime, timezone
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import attrs

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EXPECTED = "spans like 22:00-06:00 or mon-fri 09:00-17:00, separated by commas"

_SPAN = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))?\s+)?"
    r"(?P<from_h>\d{1,2}):(?P<from_m>\d{2})-(?P<to_h>\d{1,2}):(?P<to_m>\d{2})"
)
_DAY = 24 * 60  # minutes


@attrs.frozen
class Span:
    """Minutes of a day on some days of the week; past midnight it belongs to the day it began."""

    days: frozenset[int]  # 0 is Monday
    start: int
    end: int

    def covers(self, day: int, minute: int) -> bool:
        """Say whether a minute of a day is within."""
        if self.start < self.end:
            return day in self.days and self.start <= minute < self.end
        if minute >= self.start:
            return day in self.days
        return minute < self.end and (day - 1) % 7 in self.days


@attrs.frozen
class Hours:
    """Allowed hours, in the words they were given in."""

    text: str
    spans: tuple[Span, ...]
    zone: str = "UTC"

    def allow(self, moment: datetime) -> bool:
        """Say whether an instant (with a time zone) is within."""
        # Where no zones are installed there is still UTC.
        zone = timezone.utc if self.zone == "UTC" else ZoneInfo(self.zone)
        local = moment.astimezone(zone)
        minute = local.hour * 60 + local.minute
        return any(span.covers(local.weekday(), minute) for span in self.spans)

    def __str__(self) -> str:
        return f"{self.text} {self.zone}"


def read_hours(text: str, zone: str = "UTC") -> Hours:
    """Read spans separated by commas. Raises ValueError for anything else."""
    words = " ".join(text.lower().split())
    return Hours(words, tuple(_read_span(part.strip()) for part in words.split(",")), zone)


def read_zone(text: str) -> str:
    """Check the name of a time zone. Raises ValueError if this machine does not know it."""
    try:
        return ZoneInfo(text).key
    except (ZoneInfoNotFoundError, OSError) as exception:
        raise ValueError(text) from exception


def _read_span(text: str) -> Span:
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ValueError(text)
    start = _minute(found["from_h"], found["from_m"])
    end = _minute(found["to_h"], found["to_m"])
    if start in {_DAY, end}:
        raise ValueError(text)
    return Span(_days(found["first"], found["last"]), start, end)


def _minute(hour: str, minute: str) -> int:
    total = int(hour) * 60 + int(minute)
    if int(minute) > 59 or total > _DAY:
        raise ValueError(f"{hour}:{minute}")
    return total


def _days(first: str | None, last: str | None) -> frozenset[int]:
    if first is None:
        return frozenset(range(7))
    start = DAYS.index(first)
    end = DAYS.index(last or first)
    return frozenset((start + n) % 7 for n in range((end - start) % 7 + 1))
