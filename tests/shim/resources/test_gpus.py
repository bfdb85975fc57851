from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.errors import NoCapacity, ResourceError
from dstack_shim.resources.gpus import GpuLocks, Reservation

FOUR = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


@pytest.mark.parametrize(
    ("count", "granted"),
    [(0, ()), (1, ("GPU-a",)), (3, ("GPU-a", "GPU-b", "GPU-c")), (4, FOUR), (-1, FOUR)],
)
def test_gives_out_in_the_order_of_the_inventory(count: int, granted: tuple[str, ...]) -> None:
    locks = GpuLocks(FOUR)
    assert locks.acquire("t1", count) == granted
    assert locks.held() == ({"t1": granted} if granted else {})


def test_minus_one_takes_what_is_idle_even_none() -> None:
    locks = GpuLocks(FOUR)
    locks.acquire("t1", 1)
    assert locks.acquire("t2", -1) == FOUR[1:]
    assert locks.acquire("t3", -1) == ()
    assert GpuLocks(()).acquire("t1", -1) == ()


def test_gives_all_or_nothing() -> None:
    locks = GpuLocks(FOUR)
    locks.acquire("t1", 2)
    with pytest.raises(NoCapacity, match=r"3 GPU\(s\) requested, 2 of this host's 4 idle"):
        locks.acquire("t2", 3)
    assert locks.held() == {"t1": FOUR[:2]}
    assert locks.acquire("t2", 2) == FOUR[2:]


def test_a_host_without_gpus_has_no_capacity() -> None:
    with pytest.raises(NoCapacity):
        GpuLocks(()).acquire("t1", 1)


def test_a_count_below_minus_one_is_an_error_of_its_own() -> None:
    with pytest.raises(ResourceError, match=r"gpu: -2") as caught:
        GpuLocks(FOUR).acquire("t1", -2)
    assert not isinstance(caught.value, NoCapacity)


def test_an_owner_that_holds_some_gets_the_same_again() -> None:
    locks = GpuLocks(FOUR)
    assert locks.acquire("t1", 2) == locks.acquire("t1", 2) == FOUR[:2]
    assert locks.idle == FOUR[2:]


def test_release_frees_the_owners_and_nobody_elses_and_may_be_repeated() -> None:
    locks = GpuLocks(FOUR)
    locks.acquire("t1", 2)
    locks.acquire("t2", 1)
    locks.release("t1")
    locks.release("t1")
    locks.release("never seen")
    assert locks.held() == {"t2": ("GPU-c",)}
    assert locks.idle == ("GPU-a", "GPU-b", "GPU-d")


def test_of_two_tasks_claiming_one_gpu_at_restore_the_first_keeps_it() -> None:
    locks = GpuLocks(FOUR)
    assert locks.reserve("t1", ["GPU-b", "GPU-b"]) == Reservation(("GPU-b",), (), {})
    second = locks.reserve("t2", ["GPU-a", "GPU-b"])
    assert second == Reservation(("GPU-a",), (), {"GPU-b": "t1"})
    locks.release("t2")
    assert locks.held() == {"t1": ("GPU-b",)}


def test_a_gpu_that_vanished_is_held_all_the_same() -> None:
    locks = GpuLocks(())
    assert locks.reserve("t1", ["GPU-z"]) == Reservation(("GPU-z",), ("GPU-z",), {})
    assert locks.reserve("t2", ["GPU-z"]).conflicts == {"GPU-z": "t1"}
    assert locks.held() == {"t1": ("GPU-z",)}


def test_reserving_again_changes_nothing() -> None:
    locks = GpuLocks(FOUR)
    assert locks.reserve("t1", FOUR[:2]) == locks.reserve("t1", FOUR[:2])


def test_an_inventory_that_names_a_gpu_twice_has_it_once() -> None:
    assert GpuLocks(["0", "1", "0"]).idle == ("0", "1")


OWNERS = st.sampled_from(["t1", "t2", "t3"])
STEPS = st.one_of(
    st.tuples(st.just("acquire"), OWNERS, st.integers(-1, 5)),
    st.tuples(st.just("reserve"), OWNERS, st.lists(st.sampled_from([*FOUR, "GPU-x"]))),
    st.tuples(st.just("release"), OWNERS, st.none()),
)


@given(st.lists(STEPS))
def test_no_gpu_is_ever_under_two_owners_and_none_gets_lost(
    steps: list[tuple[str, str, Any]],
) -> None:
    locks = GpuLocks(FOUR)
    for verb, owner, argument in steps:
        before = locks.held()
        try:
            getattr(locks, verb)(*([owner] if argument is None else [owner, argument]))
        except NoCapacity:
            assert locks.held() == before
        after = locks.held()
        everyone = [gpu for gpus in after.values() for gpu in gpus]
        assert len(everyone) == len(set(everyone))
        assert set(everyone) | set(locks.idle) >= set(FOUR)
        assert not set(everyone) & set(locks.idle)
        assert {o: g for o, g in after.items() if o != owner} == {
            o: g for o, g in before.items() if o != owner
        }
