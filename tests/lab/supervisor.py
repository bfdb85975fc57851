"""Whoever starts the shim again when it ends, as hosts have it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from tests.eventually import eventually

CLOUD_LOOP = 'while true; do "$@"; sleep 3; done'
"""What cloud VMs run, without systemd: ``nohup sh -c 'while true; do dstack-shim; sleep 3; done'``."""


@attrs.frozen
class Run:
    """One life of the shim: ``status`` is its exit code, minus the signal's number if killed."""

    pid: int
    status: int


class Supervisor:
    """Runs ``command`` again and again with a pause between; everything it prints goes to ``log``.

    Cloud VMs and systemd pause for 3 s; tests that do not measure that take less.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        log: Path,
        pause: float = 0.05,
    ) -> None:
        self.runs: list[Run] = []
        self._command = list(command)
        self._environ = dict(environ)
        self._log = log
        self._pause = pause
        self._process: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="supervisor", daemon=True)

    @property
    def pid(self) -> int | None:
        """The shim that runs now; None during the pause."""
        with self._changed:
            return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the loop; returns when the first shim was started."""
        self._thread.start()
        eventually(lambda: self.pid is not None or self.runs, saying="the shim was started")

    def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        """Send the running shim a signal (wait for one to run first) and return its pid."""
        pid = eventually(lambda: self.pid, saying="a shim runs")
        assert pid is not None
        with suppress(ProcessLookupError):
            os.kill(pid, how)
        return pid

    def wait_for_end(self, pid: int, *, within: float = 15.0) -> Run:
        """The life of that shim, once it is over."""

        def over() -> Run | None:
            with self._changed:
                return next((run for run in self.runs if run.pid == pid), None)

        run = eventually(over, within=within, saying=f"process {pid} ended")
        assert run is not None
        return run

    def stop(self, *, within: float = 15.0) -> None:
        """TERM the shim, don't start it again; KILL it if it does not go."""
        self._stopping.set()
        for how, patience in ((signal.SIGTERM, within), (signal.SIGKILL, 15.0)):
            if (pid := self.pid) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
            self._thread.join(patience)
            if not self._thread.is_alive():
                return
        raise AssertionError("the supervisor does not end")

    def output(self) -> str:
        """All that was printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _loop(self) -> None:
        while not self._stopping.is_set():
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    self._command,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            with self._changed:
                self._process = process
            status = process.wait()
            with self._changed:
                self._process = None
                self.runs.append(Run(process.pid, status))
            self._stopping.wait(self._pause)
