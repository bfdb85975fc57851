"""
What the operator reads: each instance's decision, once per change.

A check comes every 15 s or so for each instance, and most say the same as before.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping

import attrs

from dstack_shim_server.guard import logger as server_log

# Instances remembered; the one not heard of for longest is forgotten and would be logged again.
REMEMBERED = 10_000
# Characters of one sentence; ids and versions in it are the shim's words and may be anything.
LONGEST = 400


@attrs.define
class Journal:
    """Logs a sentence about an instance unless it was the last one said about it. Thread-safe."""

    logger: logging.Logger = server_log
    remembered: int = REMEMBERED
    _last: OrderedDict[str, str] = attrs.Factory(OrderedDict)
    _lock: threading.Lock = attrs.Factory(threading.Lock)

    def note(self, instance: tuple[str, str] | None, sentence: str) -> None:
        """Log `sentence` about an instance (id, name); None: the caller is not an instance check."""
        key, name = instance or ("", "(unknown)")
        sentence = printable(sentence)
        with self._lock:
            changed = self._last.get(key) != sentence
            self._last[key] = sentence
            self._last.move_to_end(key)
            while len(self._last) > self.remembered:
                self._last.popitem(last=False)
        if changed:
            self.logger.info("shim_restart: instance %s: %s", printable(name), sentence)


@attrs.define
class Tally:
    """Counts decisions by their word. Thread-safe."""

    _counts: Counter[str] = attrs.Factory(Counter)
    _lock: threading.Lock = attrs.Factory(threading.Lock)

    def add(self, word: str) -> None:
        """Count one."""
        with self._lock:
            self._counts[word] += 1

    def counts(self) -> Mapping[str, int]:
        """Return all counts."""
        with self._lock:
            return dict(self._counts)


def printable(text: str) -> str:
    """Make a shim's words fit for one log line: no control characters, not endless."""
    line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:LONGEST])
    return line if len(text) <= LONGEST else f"{line}…"
