"""Who still counts while several owners are given up at once."""

from __future__ import annotations

from dstack_shim.resources.protocol import Claim, Ending
from tests.shim.resources.stage import others, wish

A, B, C = wish("a"), wish("b"), wish("c")


def standing(ending: Ending, owner: Claim, *claims: Claim) -> list[str]:
    return [claim.id for claim in ending.standing(owner.id, others(*claims))]


def test_a_claim_counts_until_its_release_begins() -> None:
    ending = Ending()
    assert standing(ending, A, B, C) == ["b", "c"]
    ending.begin("b")
    assert standing(ending, A, B, C) == ["c"]


def test_an_owner_is_never_its_own_other() -> None:
    assert standing(Ending(), A, A, B) == ["b"]


def test_an_owner_that_comes_back_counts_again() -> None:
    ending = Ending()
    ending.begin("b")
    ending.revoke("b")
    assert standing(ending, A, B) == ["b"]


def test_a_release_that_failed_still_does_not_count() -> None:
    ending = Ending()
    ending.begin("b")
    for _ in range(3):
        assert standing(ending, A, B) == []


def test_who_is_released_completely_is_forgotten() -> None:
    ending = Ending()
    ending.begin("a")
    ending.begin("b")
    standing(ending, A)  # b has been released and is no other any more
    assert standing(ending, C, A, B) == ["b"]
