"""Being cancelled without leaving something half done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """The result of ``work``; a caller that is cancelled meanwhile waits for its end first.

    For what must not be cut short, and under locks that must not open before it is over: a file
    system half made, a file that a thread is still writing.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):  # of another cancel: the first one counts
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen: nobody is there any more to be told
        raise
