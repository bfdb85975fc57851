"""Lines of an engine's event stream, as engines write them and as nobody should."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.engine.events import EventLines
from dstack_shim.engine.protocol import ContainerEvent
from dstack_shim.errors import EngineUnreachable

DIED: dict[str, Any] = {
    "status": "die",
    "id": "c1",
    "from": "job:1",
    "Type": "container",
    "Action": "die",
    "Actor": {"ID": "c1", "Attributes": {"exitCode": "7", "name": "job-1"}},
    "scope": "local",
    "time": 1700000000,
    "timeNano": 1700000000250000000,
}
TOLD = ContainerEvent("c1", "die", 1700000000.25)


def line(told: object) -> bytes:
    return json.dumps(told).encode() + b"\n"


def test_an_event_says_what_became_of_whom_and_when() -> None:
    assert EventLines().feed(line(DIED)) == [TOLD]


@given(st.lists(st.integers(0, 3 * len(line(DIED))), max_size=6))
def test_events_do_not_care_where_their_bytes_are_cut(cuts: list[int]) -> None:
    stream, lines = line(DIED) * 3, EventLines()
    ends = [0, *sorted(cuts), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(ends)]
    assert [event for piece in pieces for event in lines.feed(piece)] == [TOLD] * 3


def test_half_a_line_is_no_event_yet() -> None:
    assert EventLines().feed(line(DIED)[:-1]) == []


def test_empty_lines_keep_a_connection_warm() -> None:
    assert EventLines().feed(b"\r\n\n" + line(DIED) + b"\n") == [TOLD]


@pytest.mark.parametrize(
    "change",
    [
        {"Actor": None},
        {"Actor": {}},
        {"Actor": {"ID": ""}},
    ],
    ids=["no actor", "actor without id", "empty id"],
)
def test_the_older_way_to_name_a_container_is_read_too(change: dict[str, Any]) -> None:
    assert EventLines().feed(line({**DIED, **change})) == [TOLD]


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"Actor": 7, "id": None, "Action": [], "timeNano": "soon"},
        {"timeNano": -1},
        {"timeNano": 1 << 80},
        {"timeNano": 1.5},
    ],
)
def test_an_event_in_odd_words_still_says_that_something_happened(odd: dict[str, Any]) -> None:
    assert EventLines().feed(line(odd)) == [ContainerEvent("", "", 0.0)]


@pytest.mark.parametrize(
    "garbage", [b"garbage\n", b"[]\n", b"7\n", b"\xff\n", b"[" * 100_000 + b"\n", b"{}{}\n"]
)
def test_what_is_no_event_breaks_the_stream(garbage: bytes) -> None:
    with pytest.raises(EngineUnreachable, match="no JSON object"):
        EventLines().feed(garbage)


def test_a_line_without_end_breaks_the_stream() -> None:
    lines = EventLines()
    lines.feed(b"x" * 1_000_000)
    with pytest.raises(EngineUnreachable, match="does not end"):
        lines.feed(b"x" * 100_000)
