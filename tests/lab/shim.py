"""A real shim process, started, asked, killed and started again by tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dstack_shim_contracts.api import TaskConfig, TaskInfo
from dstack_shim_contracts.client import ShimClient
from dstack_shim_contracts.errors import ShimUnreachable
from dstack_shim_contracts.statuses import TaskStatus

from tests.eventually import eventually

PORT = 10998
EXECUTABLE = "DSTACK_SHIM_FILE"
"""Names the single-file build to run; unset: the shim as installed beside the tests."""


def executable() -> list[str]:
    """The words that start the shim under test."""
    file = os.environ.get(EXECUTABLE)
    return [file] if file else [sys.executable, "-m", "dstack_shim"]


class ShimProcess:
    """One shim on one home. ``environ`` says which engine; flags are added to the command."""

    def __init__(
        self,
        home: Path,
        environ: dict[str, str],
        *flags: str,
        command: Sequence[str] = (),
        port: int = PORT,
    ) -> None:
        self.home = home
        self.port = port
        self.stderr = home.parent / f"{home.name}.stderr"
        self._command = [*(command or executable()), f"--shim-home={home}"]
        self._command += [f"--shim-http-port={port}", *flags]
        self._environ = {**os.environ, **environ}
        self._process: subprocess.Popen[bytes] | None = None
        self.client = ShimClient(port, timeout=60)

    @property
    def command(self) -> tuple[str, ...]:
        """What is started, with all its arguments."""
        return tuple(self._command)

    @property
    def environ(self) -> dict[str, str]:
        """All the environment it is started with."""
        return dict(self._environ)

    @property
    def pid(self) -> int:
        """The process id of the latest start."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """None while it runs, else its exit code, minus the signal's number if it was killed."""
        assert self._process is not None
        return self._process.poll()

    def start(self, *, within: float = 30.0) -> None:
        """Start it and return once it answers."""
        self.launch()
        eventually(self.answers, within=within, saying="the shim answers")

    def launch(self) -> None:
        """Start it and wait for nothing."""
        with self.stderr.open("ab") as stderr:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.DEVNULL, stderr=stderr
            )

    def answers(self) -> bool:
        """Whether it answers; that it ended instead is an error with its last words."""
        assert self._process is not None
        if self._process.poll() is not None:
            words = self.stderr.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the shim exited with {self._process.returncode}: {words}")
        try:
            self.client.healthcheck()
        except ShimUnreachable:
            return False
        return True

    def kill(self) -> None:
        """``kill -9``, and wait until it is gone."""
        self._end(signal.SIGKILL)

    def terminate(self, *, within: float = 15.0) -> int:
        """SIGTERM; return the exit code."""
        return self._end(signal.SIGTERM, within=within)

    def wait(self, *, within: float = 15.0) -> int:
        """Wait until it has gone by itself; return the exit code."""
        assert self._process is not None
        return self._process.wait(within)

    def close(self) -> None:
        """Leave nothing running."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self.client.close()

    @property
    def log_file(self) -> Path:
        """Where it logs."""
        return self.home / "shim.log"

    def log(self) -> str:
        """All it logged since the home was made."""
        return self.log_file.read_text()

    # What tests do all the time.

    def submit(self, task_id: str, image: str, **fields: object) -> None:
        """Submit a task that runs ``image``."""
        config = TaskConfig(id=task_id, name=f"{task_id}-0-0", image_name=image, **fields)  # type: ignore[arg-type]  # any of its fields
        self.client.submit(config)

    def statuses(self) -> dict[str, str]:
        """Task id → status, as the list tells."""
        return {task.id: task.status.value for task in self.client.tasks()}

    def wait_for(self, task_id: str, status: TaskStatus, *, within: float = 30.0) -> TaskInfo:
        """Wait until the task has this status; one that ended instead is shown."""

        def reached() -> TaskInfo | None:
            info = self.client.task(task_id)
            if info.status is TaskStatus.TERMINATED and status is not TaskStatus.TERMINATED:
                raise RuntimeError(f"the task ended: {info}")
            return info if info.status is status else None

        info = eventually(reached, within=within, saying=f"{task_id} is {status.value}")
        assert info is not None
        return info

    def remove_all(self) -> None:
        """Terminate and remove every task; what refuses is left to the engine's own cleanup."""
        for task in self.client.tasks():
            with suppress(Exception):
                self.client.terminate(task.id)
                self.client.remove(task.id)

    def _end(self, number: signal.Signals, *, within: float = 15.0) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(within)
