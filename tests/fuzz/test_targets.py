"""The fuzzed readers over their seeds, every find so far, and a little noise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.__main__ import TARGETS as NAMES
from tests.fuzz.targets import TARGETS, seeds


def test_the_command_knows_every_target() -> None:
    assert tuple(TARGETS) == NAMES


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_finds_hold(name: str) -> None:
    for seed in seeds(name):
        TARGETS[name](seed)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
def test_a_changed_seed_holds(name: str, data: st.DataObject) -> None:
    seed = bytearray(data.draw(st.sampled_from(list(seeds(name)))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(seed)))
        width = data.draw(st.integers(0, 8))
        seed[at : at + width] = data.draw(st.binary(max_size=8))
    TARGETS[name](bytes(seed))
