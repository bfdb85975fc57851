"""The one way tests wait: ask again until it holds, with a deadline, never a bare sleep."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast, overload

T = TypeVar("T")


def eventually(
    check: Callable[[], T], *, within: float = 10.0, every: float = 0.02, saying: str = ""
) -> T:
    """Return the first truthy answer of ``check``.

    An ``AssertionError`` inside it means "not yet", so it may be a function full of asserts (which
    then returns something true). Any other exception is the test's own failure. After ``within``
    seconds the last answer or assertion is the failure.
    """
    deadline = time.monotonic() + within
    while True:
        answer, failure = _ask(check)
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(_too_late(within, saying, answer)) from failure
        time.sleep(every)


@overload
async def eventually_async(
    check: Callable[[], Awaitable[T]],
    *,
    within: float = ...,
    every: float = ...,
    saying: str = ...,
) -> T: ...
@overload
async def eventually_async(
    check: Callable[[], T], *, within: float = ..., every: float = ..., saying: str = ...
) -> T: ...
async def eventually_async(
    check: Callable[[], Awaitable[T]] | Callable[[], T],
    *,
    within: float = 10.0,
    every: float = 0.02,
    saying: str = "",
) -> T:
    """As :func:`eventually`, for a test inside an event loop; ``check`` may be async."""
    deadline = time.monotonic() + within
    while True:
        failure: AssertionError | None = None
        answer: T | None = None
        try:
            asked = check()
            answer = cast("T", await asked if inspect.isawaitable(asked) else asked)
        except AssertionError as error:
            failure = error
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(_too_late(within, saying, answer)) from failure
        await asyncio.sleep(every)


def _ask(check: Callable[[], T]) -> tuple[T | None, AssertionError | None]:
    try:
        return check(), None
    except AssertionError as error:
        return None, error


def _too_late(within: float, saying: str, answer: object) -> str:
    return f"not within {within:g} s: {saying or 'the condition'} (last answer: {answer!r})"
