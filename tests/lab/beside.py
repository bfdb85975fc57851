"""Something done again and again beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(action: Callable[[], None], every: float) -> Iterator[None]:
    """Do it every so many seconds, in a thread, while the block runs."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every):
            action()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
