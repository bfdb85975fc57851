from __future__ import annotations

from datetime import datetime, timezone
from zoneinfo import ZoneInfoNotFoundError

import pytest

from dstack_shim_server import hours
from dstack_shim_server.hours import read_hours, read_zone


def at(text: str) -> datetime:
    """A moment in the week of Monday, 2 February 2026, in UTC: ``tue 23:30``."""
    day, time = text.split()
    number = ("mon", "tue", "wed", "thu", "fri", "sat", "sun").index(day)
    hour, minute = map(int, time.split(":"))
    return datetime(2026, 2, 2 + number, hour, minute, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "within", "outside"),
    [
        ("09:00-17:00", ["mon 09:00", "sun 16:59"], ["mon 08:59", "mon 17:00"]),
        ("22:00-06:00", ["mon 22:00", "mon 05:59", "sun 23:59"], ["mon 06:00", "mon 21:59"]),
        ("00:00-24:00", ["mon 00:00", "sun 23:59"], []),
        ("mon-fri 09:00-17:00", ["fri 10:00"], ["sat 10:00", "sun 10:00"]),
        ("sat 22:00-06:00", ["sat 23:00", "sun 05:00"], ["sat 05:00", "sun 23:00"]),
        ("sun 22:00-06:00", ["mon 05:00"], ["sun 05:00"]),
        ("fri-mon 10:00-11:00", ["fri 10:30", "sun 10:30", "mon 10:30"], ["tue 10:30"]),
        ("01:00-02:00, Sat 12:00-13:00", ["mon 01:30", "sat 12:30"], ["mon 12:30"]),
    ],
)
def test_spans_cover_what_they_say(text: str, within: list[str], outside: list[str]) -> None:
    hours = read_hours(text)
    assert all(hours.allow(at(moment)) for moment in within)
    assert not any(hours.allow(at(moment)) for moment in outside)


def test_a_zone_moves_them() -> None:
    hours = read_hours("09:00-10:00", "Europe/Berlin")  # one hour ahead in winter
    assert hours.allow(at("mon 08:30"))
    assert not hours.allow(at("mon 09:30"))
    assert str(hours) == "09:00-10:00 Europe/Berlin"


@pytest.mark.parametrize(
    "text",
    [
        *("", "9-17", "09:00", "25:00-26:00", "09:60-10:00", "24:00-06:00", "09:00-09:00"),
        *("xxx 09:00-10:00", "mon- 09:00-10:00", "09:00-10:00,", "monday 09:00-10:00"),
        "09:00–10:00",
    ],
)
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        read_hours(text)


def test_utc_needs_no_zones_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr(hours, "ZoneInfo", none)
    assert read_hours("09:00-10:00").allow(at("mon 09:30"))


def test_zones_are_those_the_machine_knows() -> None:
    assert read_zone("UTC") == "UTC"
    for text in ("Mars/Olympus", "../etc/passwd", "", "\0"):
        with pytest.raises(ValueError, match=r".*"):
            read_zone(text)
