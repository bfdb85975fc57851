"""Every instant of a task's life at which its shim can be killed or refused something.

The instants are the system calls of an undisturbed life in the two threads that do all the work:
the main one answers and logs, the worker (one, by ``DSTACK_SHIM_ONE_WORKER``) changes the disk and
talks to the engine. A thread that is killed at a call does not make it any more, so the instant is
the one before it, which is the one after the call before.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import attrs
from dstack_shim_contracts.errors import ShimUnreachable

from tests.crash.server import Gone, Job, Server
from tests.crash.stage import NEWCOMER, OWNER, PATIENCE, Stage
from tests.crash.strace import Call, Strace, threads_of
from tests.eventually import eventually
from tests.evidence import Evidence

T = TypeVar("T")

LIVES = {"terminated": (NEWCOMER, Job.RUNS_ON), "ended": (OWNER, Job.ENDS)}
"""How a life ends → whose key the task has, and what its job does."""
MAIN, WORKER = "main", "worker"
CALLS = {
    MAIN: ("write", "pwrite64", "sendto", "clone3", "clone"),
    WORKER: (
        *("write", "pwrite64", "fsync", "fdatasync", "ftruncate", "/rename.*", "/unlink.*"),
        *("rmdir", "/mkdir.*", "/.*chmod.*", "/.*chown.*", "connect", "sendto", "sendmsg"),
        "recvfrom",
    ),
}
"""What changes the disk, talks to the engine or a client, or begins a command (``clone``);
``recvfrom`` is the instant at which the engine was asked and its answer is not read."""


@attrs.frozen
class Point:
    """One instant: the ``call`` at ``position`` among all of the undisturbed life."""

    life: str
    thread: str
    call: Call
    position: int

    def __str__(self) -> str:
        return (
            f"{self.life} {self.thread} {self.call.name} {self.call.number} "
            f"({self.position} of the trace: {self.call})"
        )


@attrs.frozen
class Outcome:
    """What came of one trial; no ``problems`` means that everything held."""

    point: str
    hit: str
    problems: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.seconds:5.2f} s  {self.point}", f"hit {self.hit}"]
        return "\n         ".join([*lines, *(f"!! {problem}" for problem in self.problems)])


def choose(points: Sequence[T], sample: int, evidence: Evidence) -> list[T]:
    """All of them (or this part's share), or so many from all along for a sample."""
    if evidence.full:
        chosen = list(evidence.share(points))
    else:
        number = min(sample, len(points))
        chosen = [points[index * len(points) // number] for index in range(number)]
    print(f"{len(chosen)} of {len(points)} points", flush=True)  # noqa: T201 - shown with -s
    return chosen


class Trials:
    """Lives on one stage, one after the other; each finds what the one before has left."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.output = stage.folder / "strace"
        self._count = 0

    def points(self, life: str) -> list[Point]:
        """The instants of an undisturbed life, in the order of time."""
        self._undisturbed(life)  # the first one in a process also looks up this and that
        threads = self._threads()
        with Strace(tuple(threads.values()), CALLS[MAIN] + CALLS[WORKER], self.output) as strace:
            self._undisturbed(life)
            calls = strace.calls()
        name_of = {number: name for name, number in threads.items()}
        return [
            Point(life, name_of[call.thread], call, position)
            for position, call in enumerate(calls, start=1)
            # How the main thread learns that there is something to do is no instant of its own.
            if not (name_of[call.thread] == MAIN and call.name == "recvfrom")
        ]

    def kill(self, point: Point) -> Outcome:
        """Kill the shim there, start it again, and see the task through."""
        began = time.monotonic()
        server = self.new_server(*LIVES[point.life])
        with self._strace(point, "signal=KILL") as strace:
            with suppress(Gone):
                server.live()
                self._go_on(point)
            self.await_kill(server)
            calls = strace.calls()
        hit = f"number {calls[-1].number}: {calls[-1]}" if calls else "nothing"
        return self.see_through(server, str(point), hit, began)

    def refuse(self, point: Point, error: str) -> Outcome:
        """Let that one call fail; then kill the shim, start it again, and see what it knows."""
        began = time.monotonic()
        server = self.new_server(*LIVES[point.life])
        with self._strace(point, f"error={error}") as strace:
            try:
                server.live()
            except Gone:
                server.problems.append(f"the shim ended with {self.stage.shim.exit_status}")
            calls = strace.calls()
        injected = [call for call in calls if "(INJECTED)" in call.text]
        if not injected:
            server.problems.append(f"no call was refused among {len(calls)}")
        if self.stage.shim.is_running:
            server.check()
            self.stage.shim.kill()
        hit = "; ".join([str(call) for call in injected] + server.refused)
        return self.see_through(server, f"{error} {point}", hit, began)

    def new_server(self, user: str, job: Job) -> Server:
        """A server with a new task, for a shim that runs."""
        if not self.stage.shim.is_running:
            self.stage.start()
        self.stage.reset()
        self._count += 1
        return Server(self.stage, f"t{self._count}", user, job)

    def await_kill(self, server: Server) -> None:
        """Wait for the shim's end, which must be SIGKILL."""
        eventually(lambda: not self.stage.shim.is_running, within=PATIENCE, saying="it ended")
        status = self.stage.shim.exit_status
        if status != -signal.SIGKILL:
            server.problems.append(f"the shim ended with {status}, not by SIGKILL")

    def see_through(self, server: Server, point: str, hit: str, began: float) -> Outcome:
        """Start the shim again, check what is known, and do the rest of the task's life."""
        if not server.problems:
            self.stage.start()
            server.check()
            server.finish()
        problems = tuple(server.problems)
        if problems:
            self.stage.sweep()
        outcome = Outcome(point, hit, problems, time.monotonic() - began)
        print(outcome, flush=True)  # noqa: T201 - shown with -s, and where a test fails
        return outcome

    def _undisturbed(self, life: str) -> None:
        server = self.new_server(*LIVES[life])
        server.live()
        server.finish()
        assert server.problems == []
        assert server.refused == []

    def _threads(self) -> dict[str, int]:
        main, worker, *_ = threads_of(self.stage.shim.pid)
        return {MAIN: main, WORKER: worker}

    def _strace(self, point: Point, what: str) -> Strace:
        name, number = point.call.name, point.call.number
        inject = f"{name}:{what}:when={number}"
        return Strace((self._threads()[point.thread],), (name,), self.output, inject)

    def _go_on(self, point: Point) -> None:
        """Its life had fewer of these calls this time; the shim goes on making some."""

        def over() -> bool:
            if point.thread == MAIN:
                with suppress(ShimUnreachable):
                    self.stage.shim.client.healthcheck()
            return not self.stage.shim.is_running

        with suppress(AssertionError):
            eventually(over, within=10)
        if self.stage.shim.is_running:
            self.stage.shim.terminate()
