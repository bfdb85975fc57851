from __future__ import annotations

import pytest

from tests.eventually import eventually, eventually_async


def test_the_first_true_answer_is_returned() -> None:
    answers = iter([0, "", 7])
    assert eventually(lambda: next(answers), every=0) == 7


def test_an_assertion_means_not_yet_and_explains_the_failure() -> None:
    def never() -> bool:
        wanted = 2
        assert wanted == 1
        return True

    with pytest.raises(AssertionError, match=r"not within 0 s: a miracle") as caught:
        eventually(never, within=0, saying="a miracle")
    assert isinstance(caught.value.__cause__, AssertionError)


def test_another_exception_is_not_waited_out() -> None:
    def broken() -> bool:
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        eventually(broken)


async def test_async_checks_are_awaited_and_plain_ones_taken() -> None:
    answers = iter([False, True])

    async def check() -> bool:
        return next(answers)

    assert await eventually_async(check, every=0)
    assert await eventually_async(lambda: 5) == 5


async def test_an_async_check_that_never_holds_fails_at_its_deadline() -> None:
    with pytest.raises(AssertionError, match="last answer: 0"):
        await eventually_async(lambda: 0, within=0)
