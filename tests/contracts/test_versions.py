"""What a reported version means."""

from __future__ import annotations

import pytest
from dstack_shim_contracts.versions import LONGEST_VERSION, parse_version, persists_state
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.strategies import JSON_VALUES, SAMPLE

BELOW = [
    "0.0.0",
    "0.18.34",
    "0.20.29",
    "0.21",
    "0.21.2",
    "0.21.2.post9",
    "0.21.2+local.1",
    "0.21.2rc1",
    "0.21.3.dev1",
    "0.21.3a1",
    "0.21.3rc1",
    "0.21.3rc1.post1",
    "0.21.3rc1+local",
]
FROM_THERE = [
    "0.21.3",
    "v0.21.3",
    "0.21.3.0",
    "0.21.3+local.1",
    "0.21.3.post1",
    "0.21.4.dev1",
    "0.21.4rc1",
    "0.21.5",
    "0.22",
    "0.22.5",
    "0.22.5.post2",
    "0.100.0",
    "1.0.0",
    "1!0.1",
]
NO_RELEASE = [
    "",
    " ",
    "latest",
    "21",
    "12345",
    "12345+dirty",
    "1rc1",
    "v1",
    "0.21.3 ",
    "\t0.21.3",
    "0.21.3\n",
    "0.21.x",
    "0..3",
    "dstack-shim version 0.21.3",
    "0.21.3-2-g1a2b3c4",
    "\u0660.\u0662\u0661.\u0663",
    "0." + "9" * LONGEST_VERSION,
    "0." * 1_000_000,
]


@pytest.mark.parametrize("text", BELOW)
def test_what_comes_before_0_21_3_keeps_no_state(text: str) -> None:
    version = parse_version(text)
    assert version is not None
    assert not persists_state(version)


@pytest.mark.parametrize("text", FROM_THERE)
def test_0_21_3_and_what_comes_after_it_keeps_state(text: str) -> None:
    version = parse_version(text)
    assert version is not None
    assert persists_state(version)


@pytest.mark.parametrize("text", NO_RELEASE, ids=lambda text: repr(text[:20]))
def test_what_has_no_place_in_the_order_of_releases_is_none(text: str) -> None:
    assert parse_version(text) is None


@SAMPLE
@given(JSON_VALUES | st.text())
def test_nothing_makes_it_fail(value: object) -> None:
    parse_version(value)
