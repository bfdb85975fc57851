"""Killed while a tool of the system works for the shim: the tool goes on alone, quick or slow."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress

import attrs

from tests.crash.kill_points import LIVES, Outcome, Trials
from tests.crash.server import Gone, Server

_CALL_OF = {"mount": "mount", "umount": "umount2"}
_MOMENTS = {
    "before": 'kill -9 $PPID; exec {real} "$@"',
    "meanwhile": (
        "kill -9 $PPID; exec strace -qq -o /dev/null -e trace={call} "
        '-e inject={call}:delay_enter=1500000 {real} "$@"'
    ),
    "after": '{real} "$@"; kill -9 $PPID',
}
"""When the shim is killed → what is in the tool's place; meanwhile takes the tool 1.5 s."""


@attrs.frozen
class ToolPoint:
    """The shim is killed at this moment of this tool's work."""

    life: str
    tool: str
    moment: str

    def __str__(self) -> str:
        return f"{self.life}-{self.moment}-{self.tool}"


POINTS = tuple(
    ToolPoint(life, tool, moment)
    for life, tool in (("terminated", "mount"), ("terminated", "umount"), ("ended", "umount"))
    for moment in _MOMENTS
)


def kill(trials: Trials, point: ToolPoint) -> Outcome:
    """Kill the shim there, start it again, and see the task through."""
    began = time.monotonic()
    server = trials.new_server(*LIVES[point.life])
    leave_killed(trials, server, point)
    return trials.see_through(server, str(point), f"{point.moment} {point.tool}", began)


def leave_killed(trials: Trials, server: Server, point: ToolPoint) -> None:
    """Live until the shim is killed there, and leave everything as it is then."""
    real = shutil.which(point.tool, path="/usr/bin:/bin:/usr/sbin:/sbin")
    words = _MOMENTS[point.moment].format(real=real, call=_CALL_OF[point.tool])
    trials.stage.host.tool(point.tool, words)
    try:
        with suppress(Gone):
            server.live()
        trials.await_kill(server)
    finally:
        (trials.stage.host.tools / point.tool).unlink()
