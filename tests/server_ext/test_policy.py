from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim_server.hours import read_hours
from dstack_shim_server.policy import Policy, Request, RolloutState, UnderWay, rule

NOON = datetime(2026, 2, 2, 12, 0, tzinfo=timezone.utc)
BOX = Request("id-1", "box", "main", "gpu", "2.0")


def others(count: int, target: str = "2.0") -> tuple[UnderWay, ...]:
    return tuple(UnderWay(f"r{n}", f"other-{n}", target) for n in range(count))


def ruled(state: RolloutState | None = None, **choices: Any) -> str:
    """Why not, "" if it is allowed."""
    ruling = rule(Policy(**choices), state or RolloutState(), BOX, NOON)
    assert ruling.allowed == (ruling.reason == "allowed")
    return "" if ruling.allowed else ruling.reason


def test_the_first_is_allowed() -> None:
    assert ruled() == ""


def test_canaries_come_first() -> None:
    assert ruled(RolloutState(under_way=others(1)), canaries=2) == ""
    waits = "waits for canaries: 0 of 2 confirmed in 2.0"
    assert ruled(RolloutState(under_way=others(2)), canaries=2) == waits
    one = RolloutState(under_way=others(1), confirmed={"2.0": 1})
    assert ruled(one, canaries=2) == "waits for canaries: 1 of 2 confirmed in 2.0"
    assert ruled(RolloutState(under_way=others(9), confirmed={"2.0": 2}), canaries=2) == ""


def test_canaries_of_another_version_prove_nothing() -> None:
    state = RolloutState(under_way=others(1), confirmed={"1.9": 50})
    assert ruled(state, canaries=1) == "waits for canaries: 0 of 1 confirmed in 2.0"
    assert ruled(RolloutState(under_way=others(5, "1.9")), canaries=1) == ""


def test_without_canaries_all_may_go() -> None:
    assert ruled(RolloutState(under_way=others(50)), canaries=0) == ""


def test_so_many_at_a_time_of_whatever_version() -> None:
    state = RolloutState(under_way=(*others(2), *others(1, "1.9")))
    words = "3 restarts are under way, at most 3 may be"
    assert ruled(state, canaries=0, max_under_way=3) == words
    assert ruled(state, canaries=0, max_under_way=4) == ""


def test_what_an_instance_did_not_take_it_is_not_given_again() -> None:
    state = RolloutState(failed={("id-1", "2.0"): "rolled back by the shim"})
    assert ruled(state) == "it did not take 2.0 before: rolled back by the shim"
    assert ruled(RolloutState(failed={("id-1", "1.9"): "x", ("id-2", "2.0"): "x"})) == ""


def test_an_instance_is_restarted_once_at_a_time() -> None:
    state = RolloutState(under_way=(UnderWay("r", "id-1", "1.9"),))
    assert ruled(state, canaries=0) == "a restart of this instance is under way"


def test_a_stopped_version_goes_no_further_and_others_do() -> None:
    words = "version 2.0 is stopped: instance a lost tasks"
    assert ruled(RolloutState(stops={"2.0": "instance a lost tasks"})) == words
    assert ruled(RolloutState(stops={"1.9": "instance a lost tasks"})) == ""


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"paused": True}, "the roll-out is paused by DSTACK_SHIM_RESTART_PAUSE"),
        ({"hold_instances": frozenset({"box"})}, "instance box is held"),
        ({"hold_instances": frozenset({"bo", "BOX"})}, ""),
        ({"hold_fleets": frozenset({"gpu"})}, "fleet gpu is held"),
        ({"hold_fleets": frozenset({"main/gpu"})}, "fleet gpu is held"),
        ({"hold_fleets": frozenset({"other/gpu", "cpu"})}, ""),
        ({"hours": read_hours("22:00-06:00")}, "outside the allowed hours 22:00-06:00 UTC"),
        ({"hours": read_hours("11:00-13:00")}, ""),
    ],
)
def test_the_operators_wishes(choices: dict[str, Any], words: str) -> None:
    assert ruled(**choices) == words


def test_paused_from_the_command_line() -> None:
    state = RolloutState(paused_by="root on host")
    assert ruled(state) == "the roll-out is paused by root on host"


@given(
    canaries=st.integers(0, 5),
    most=st.integers(0, 5),
    confirmed=st.integers(0, 6),
    under_way=st.integers(0, 6),
)
def test_never_more_than_may_be_and_never_past_the_canaries(
    canaries: int, most: int, confirmed: int, under_way: int
) -> None:
    state = RolloutState(under_way=others(under_way), confirmed={"2.0": confirmed})
    allowed = not ruled(state, canaries=canaries, max_under_way=most)
    assert not (allowed and most and under_way >= most)
    assert not (allowed and confirmed < canaries and confirmed + under_way >= canaries)
    # And somebody always may, or the roll-out would stand still for ever.
    if under_way == 0:
        assert allowed
