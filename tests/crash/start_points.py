"""Killed while it starts: on a new host, and where a shim before was killed too."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import attrs
from dstack_shim_contracts.naming import container_name

from tests.crash.kill_points import CALLS, LIVES, MAIN, WORKER, Outcome, Trials
from tests.crash.server import Job, Server
from tests.crash.stage import NEWCOMER, OWNER, PATIENCE
from tests.crash.strace import Call, read
from tests.crash.tool_points import ToolPoint, leave_killed
from tests.eventually import eventually

FIRST, ENDED, INTERRUPTED = "first start", "job ended meanwhile", "killed while preparing"
SITUATIONS = (FIRST, ENDED, INTERRUPTED)


@attrs.frozen
class StartPoint:
    """One call of a start in this situation; of the main thread, or of whichever is first."""

    situation: str
    thread: str
    call: Call
    position: int

    def __str__(self) -> str:
        return (
            f"{self.situation}: {self.thread} {self.call.name} {self.call.number} "
            f"({self.position} of the trace: {self.call})"
        )


class Starts:
    """Starts under strace, from the first instruction on."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._stage = trials.stage

    def points(self, situation: str) -> list[StartPoint]:
        """The instants of an undisturbed start, in the order of time."""
        server = self._prepare(situation)
        self._launch(WORKER)
        eventually(self._stage.shim.answers, within=PATIENCE, saying="it answers")
        calls = read(self._trials.output.read_text(errors="replace"))
        self._kill_traced()
        outcome = self._trials.see_through(server, situation, "", time.monotonic())
        assert outcome.problems == ()
        return _points(situation, calls)

    def kill(self, point: StartPoint) -> Outcome:
        """Kill the starting shim there, start it again, and see the task through."""
        began = time.monotonic()
        server = self._prepare(point.situation)
        name, number = point.call.name, point.call.number
        self._launch(point.thread, "-e", f"inject={name}:signal=KILL:when={number}")
        try:
            eventually(lambda: not self._stage.shim.is_running, within=PATIENCE)
        except AssertionError:
            self._kill_traced()
            server.problems.append("the start was not killed")
        self._trials.await_kill(server)
        calls = [
            c for c in read(self._trials.output.read_text(errors="replace")) if c.name == name
        ]
        self._stage.shim = self._stage.new_shim()
        return self._trials.see_through(server, str(point), str(calls[-1]), began)

    def _prepare(self, situation: str) -> Server:
        """A host without a running shim, in that situation."""
        if situation == FIRST:
            self._stage.sweep()
            server = Server(self._stage, "first", *LIVES["ended"])
        elif situation == ENDED:
            server = self._trials.new_server(OWNER, Job.ENDS_WHEN_TOLD)
            server.begin()
            self._stage.shim.kill()
            self._stage.tell(server.task_id)
            name = container_name(f"{server.task_id}-0-0", server.task_id)
            self._stage.client.wait(name)
        else:
            server = self._trials.new_server(NEWCOMER, Job.RUNS_ON)
            leave_killed(self._trials, server, ToolPoint("terminated", "mount", "after"))
        return server

    def _launch(self, thread: str, *more: str) -> None:
        trace = ",".join(CALLS[MAIN] + CALLS[WORKER])
        words = ["strace", "-s", "160", "-o", str(self._trials.output)]
        words += ["-e", "signal=none", "-e", f"trace={trace}", *more]
        if thread != MAIN:
            # All threads, but not the commands they start: those would count too.
            words += ["-f", "-b", "execve"]
        self._stage.shim = self._stage.new_shim(*words, sys.executable, "-I", "-S", "-X", "utf8")
        self._stage.shim.launch()

    def _kill_traced(self) -> None:
        lock = Path(self._stage.home, "dstack-shim.lock")
        with suppress(ProcessLookupError):
            os.kill(int(lock.read_text()), signal.SIGKILL)
        eventually(lambda: not self._stage.shim.is_running, within=PATIENCE)
        self._stage.shim = self._stage.new_shim()


def _points(situation: str, calls: list[Call]) -> list[StartPoint]:
    """Each call of the main thread, and of each other kind and number the first one in time.

    strace without ``-f`` sees the main thread only; with it, each thread counts for itself, and
    the first to come to a number is the one that is killed.
    """
    main = calls[0].thread
    points, reached = [], set()
    for position, call in enumerate(calls, start=1):
        if call.thread == main and call.name == "recvfrom":
            reached.add((call.name, call.number))
            continue
        if call.thread == main:
            points.append(StartPoint(situation, MAIN, call, position))
        elif (call.name, call.number) not in reached:
            points.append(StartPoint(situation, WORKER, call, position))
        reached.add((call.name, call.number))
    return points
