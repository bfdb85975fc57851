"""
The gate's truth table as a running server sees it: which pairs of shim and file, which tasks, and
what dstack made of each.

The rows are those of the gate's own tests; what a server decides about them is found out here by
letting dstack's own instance check meet a shim of words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from tests.contracts.test_gate import SIDES, component, healthcheck
from tests.server.dstack_server import DstackServer
from tests.server.stub_shim import StubShim

# Each side runs where this is installed, and the other way round; all pairs in `./dev prove`.
GOOD = "0.22.5"
# … and is running where this is installed: it keeps nothing.
BAD = "0.21.2"

SHUTDOWN = ("POST", "/api/shutdown")

IDLE: tuple[str, ...] = ()
RUNNING = ("running", "terminated")
PULLING = ("running", "pulling")


@attrs.frozen
class Row:
    """What runs and what is installed, and whether the gate says both keep state."""

    running: str
    installed: str
    healthcheck: Mapping[str, object] = attrs.field(repr=False)
    component: Mapping[str, object] = attrs.field(repr=False)
    both_keep_state: bool

    @property
    def name(self) -> str:
        return f"{self.running}-to-{self.installed}"


@attrs.frozen
class Seen:
    """One check: what dstack made of it, everything it asked of the shim, and the one that counts."""

    result: Mapping[str, object]
    asked: tuple[tuple[str, str], ...]

    @property
    def restarted(self) -> bool:
        return SHUTDOWN in self.asked


Table = Mapping[tuple[str, tuple[str, ...]], Seen]


def rows(*, full: bool) -> list[Row]:
    """Each side against a few others, or all pairs."""
    return [
        Row(running, installed, healthcheck(rv, rf), component(iv, if_), rk and ik)
        for running, rv, rf, rk, _ in SIDES
        for installed, iv, if_, ik, _ in SIDES
        if full or running == GOOD or installed in {GOOD, BAD}
    ]


def decided(
    server: DstackServer, shim: StubShim, rows: Iterable[Row], *tasks: tuple[str, ...]
) -> Table:
    """Let the server check an instance for each row and list of tasks."""
    return {
        (row.name, statuses): check(
            server, shim, row.healthcheck, row.component, statuses, instance=row.name
        )
        for row in rows
        for statuses in tasks
    }


def check(
    server: DstackServer,
    shim: StubShim,
    healthcheck: Mapping[str, object],
    component: Mapping[str, object],
    statuses: Sequence[str],
    *,
    instance: str = "box",
    expected: object = "as installed",
    copy: int = -1,
) -> Seen:
    """
    One instance check; ``expected`` None is what the release expects by itself.

    ``copy`` says which instance check, oldest first, where a release has more than one.
    """
    listed = [{"id": f"job-{n}", "status": status} for n, status in enumerate(statuses)]
    shim.says(healthcheck, {"components": [component]}, {"tasks": listed})
    if expected == "as installed":
        # Up to 0.22.0 any other expectation leads to an install instead of a decision.
        expected = component.get("version") or ""
    result = server.ask(
        "/check",
        port=shim.server_port,
        expected=expected,
        jobs=[task["id"] for task in listed],
        instance=instance,
        copy=copy,
    )
    return Seen(result, tuple(shim.asked))
