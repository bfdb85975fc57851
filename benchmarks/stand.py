"""Where shims are measured: one private engine, a proxy that counts, homes with tasks on them.

Candidates take turns on the same host. A home with running tasks is made once and is then handed
from one candidate to the other: both read the same records.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dstack_shim_contracts.statuses import TaskStatus

from benchmarks.candidates import HOST_PATH, Candidate
from tests.lab.engine import PrivateEngine
from tests.lab.images import RUNS_ON, Images, write_runner
from tests.lab.proxy import CountingProxy
from tests.lab.shim import ShimProcess

RUNNER = Path("/usr/local/bin/dstack-runner")
ENDS_ON_DEMAND = "mkfifo /tmp/runner/end; read line < /tmp/runner/end"
"""Ends when somebody writes to its pipe, and costs nothing until then."""


class Stand:
    """One host for all measurements of a run; to be closed."""

    def __init__(self) -> None:
        write_runner(RUNNER)
        self.engine = PrivateEngine()
        self.engine.start()
        self.client = self.engine.client()
        self.images = Images(self.client)
        self.folder = self.engine.directory / "homes"
        self.folder.mkdir()
        self._count = 0

    def close(self) -> None:
        """Leave nothing running."""
        self.client.close()
        self.engine.close()

    @contextmanager
    def home(self) -> Iterator[Path]:
        """An empty home; its containers go with it."""
        self._count += 1
        home = self.folder / f"h{self._count}"
        home.mkdir()
        try:
            yield home
        finally:
            for container in self.client.containers(all=True):
                self.client.remove_container(container["Id"], force=True, v=True)
            shutil.rmtree(home, ignore_errors=True)

    @contextmanager
    def populated(self, by: Candidate, tasks: int) -> Iterator[Path]:
        """A home with so many tasks that run on."""
        with self.home() as home:
            if tasks:
                with self.shim(by, home) as shim:
                    run_tasks(shim, self.images.job(RUNS_ON), tasks)
            yield home

    @contextmanager
    def shim(
        self, candidate: Candidate, home: Path, *flags: str, address: str = ""
    ) -> Iterator[ShimProcess]:
        """One that answers; it is stopped in the end, its tasks run on."""
        shim = self.unstarted(candidate, home, *flags, address=address)
        try:
            shim.start(within=60)
            yield shim
            shim.terminate(within=30)
        finally:
            shim.close()

    def unstarted(
        self,
        candidate: Candidate,
        home: Path,
        *flags: str,
        address: str = "",
        python: Path | None = None,
    ) -> ShimProcess:
        """One that is not started; ``python`` runs the file instead of what its header finds."""
        words = [*candidate.prefix, *([str(python)] if python else []), str(candidate.path)]
        environ = {
            "DOCKER_HOST": address or self.engine.address,
            "HOME": str(home),
            "PATH": HOST_PATH,
        }
        return ShimProcess(home, environ, *flags, command=words)

    @contextmanager
    def proxy(self) -> Iterator[CountingProxy]:
        """One before the engine."""
        with CountingProxy(self.engine.socket, self.engine.directory / "p") as proxy:
            yield proxy


def run_tasks(shim: ShimProcess, image: str, tasks: int, *, first: int = 0) -> Sequence[str]:
    """Submit so many tasks and wait until they run; their ids."""
    names = [f"t{first + number}" for number in range(tasks)]
    for name in names:
        shim.submit(name, image)
        # One after the other: what a measurement begins with is the same each time.
        shim.wait_for(name, TaskStatus.RUNNING, within=120)
    return names
