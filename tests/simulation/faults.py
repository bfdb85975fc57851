"""What can go wrong at a call, how it is armed, and the table of how often it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product

import attrs

ENGINE_CALLS = (
    "list_task_containers",
    "inspect",
    "create",
    "start",
    "stop",
    "remove",
    "last_lines",
    "has_image",
    "pull",
)
ENGINE_MODES = (
    "refused",
    "refused after",
    "unreachable",
    "answer lost",
    "hangs",
    "crash before",
    "crash during",
    "crash after",
)
CHANGES = ("records.create", "records.write", "records.forget", "records.set_aside")
READS = ("records.scan", "records.discard_output", "records.open_pull_log")
CHANGE_MODES = (
    "refused",
    "flush fails",
    "crash before",
    "crash half",
    "crash after",
    "power cut half",
    "power cut after",
)
READ_MODES = ("refused", "crash before", "crash after")
RESOURCE_CALLS = (
    "keys.acquire",
    "keys.release",
    "volumes.acquire",
    "volumes.release",
    "instance_mounts.acquire",
)
RESOURCE_MODES = ("refused", "refused after", "slow", "crash before", "crash after")

POSSIBLE: tuple[tuple[str, str], ...] = (
    *product(ENGINE_CALLS, ENGINE_MODES),
    *product(CHANGES, CHANGE_MODES),
    *product(READS, READ_MODES),
    *product(RESOURCE_CALLS, RESOURCE_MODES),
    ("keys.confirm", "refused"),
)
"""Every (call, mode) there is."""


@attrs.define
class _Armed:
    call: str
    mode: str
    in_calls: int


class Faults:
    """Faults waiting for their call."""

    def __init__(self) -> None:
        self.struck: Counter[tuple[str, str]] = Counter()
        self._armed: list[_Armed] = []

    def arm(self, call: str, mode: str, in_calls: int) -> None:
        """Strike the ``in_calls``-th call from now on."""
        self._armed.append(_Armed(call, mode, in_calls))

    def disarm(self) -> None:
        """Nothing goes wrong any more."""
        self._armed.clear()

    def strike(self, call: str) -> str:
        """The mode in which this call goes wrong, "" if it does not. Counts as a call."""
        struck = ""
        if self._armed:
            for armed in self._armed:
                if armed.call == call:
                    armed.in_calls -= 1
                    if armed.in_calls <= 0 and not struck:
                        struck = armed.mode
            if struck:
                self.struck[call, struck] += 1
                self._armed = [armed for armed in self._armed if armed.in_calls > 0]
        return struck


def table(struck: Mapping[tuple[str, str], int]) -> Iterable[str]:
    """The counts in words, a line for each call."""
    for call in dict.fromkeys(call for call, _ in POSSIBLE):
        modes = [mode for other, mode in POSSIBLE if other == call]
        counts = ", ".join(f"{mode} {struck.get((call, mode), 0)}" for mode in modes)
        yield f"{call:24} {counts}"
