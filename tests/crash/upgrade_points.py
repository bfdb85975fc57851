"""The shim killed while it is replaced: during install, check, hand-over, rename and roll-back.

The supervisor starts what lies at the path, as hosts do. Calls are counted for each thread by
itself, and commands the shim runs count too: a check that is killed is an instant as well.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import docker
from dstack_shim_contracts.errors import ClientError

from tests.crash.strace import read
from tests.eventually import eventually
from tests.lab.census import Census, asker
from tests.lab.images import Images
from tests.lab.shim import PORT
from tests.lab.shim_files import variant
from tests.lab.site import Site

CALLS = ("fsync", "rename", "link", "unlink", "execve", "flock", "ftruncate", "listen", "connect")
FORWARD, BACK = "replaced", "rolled back"
WAYS = (FORWARD, BACK)

OLD_WAITS_LESS = "takeover.READY_WITHIN = 5.0"  # enough for a sound one on a busy machine
_NEVER_READY = "import asyncio\ndaemon.Daemon._check_components = lambda self: asyncio.sleep(600)"
_PATIENCE = 40.0  # s for an attempt to come to its end, whichever


@attrs.frozen
class UpgradePoint:
    """The ``number``-th call of this kind of whichever thread comes to it first."""

    way: str
    call: str
    number: int

    def __str__(self) -> str:
        return f"{self.way}: {self.call} {self.number}"


class Upgrading:
    """One site that is upgraded again and again, whatever became of the time before."""

    def __init__(self, site: Site, built: Path, client: docker.APIClient, folder: Path) -> None:
        self._site = site
        self._built = built
        self._client = client
        self._output = folder / "calls"
        self._version = 0
        site.run_task("t1", Images(client))
        self._boxes = self._running()
        self._census = Census(site.home, client, asker(PORT))

    def points(self, way: str) -> list[UpgradePoint]:
        """The instants of an undisturbed attempt, each kind and number once."""
        with self._strace(self._site.pid):
            self._attempt(way)
        found = read(self._output.read_text(errors="replace"))
        self._recover()
        return [
            UpgradePoint(way, name, number)
            for name, number in dict.fromkeys((call.name, call.number) for call in found)
        ]

    def kill(self, point: UpgradePoint) -> list[str]:
        """Kill there; what is wrong afterwards, in sentences."""
        ends = len(self._site.supervisor.runs)
        inject = f"inject={point.call}:signal=KILL:when={point.number}"
        with self._strace(self._site.pid, "-e", inject):
            self._attempt(point.way, ends)
        problems = [f"{point}: {problem}" for problem in self._look_at_rest()]
        self._recover()
        return problems

    def _attempt(self, way: str, ends: int | None = None) -> None:
        """Install and shut down; return when that came to an end, by a death or otherwise."""
        self._version += 1
        version = f"0.22.5.post{self._version}"
        content = variant(self._built, version, patch=_NEVER_READY if way == BACK else "pass")

        def over() -> bool:
            if ends is not None and len(self._site.supervisor.runs) > ends:
                return True
            last = self._site.state().get("last") or {}
            ended = last.get("outcome") not in (None, "stopping", "trying")
            return bool(ended and last["new"]["version"] == version)

        with suppress(ClientError):  # it was killed
            self._site.install(content)
            if ends is None or len(self._site.supervisor.runs) == ends:
                self._site.client.shutdown()
        with suppress(AssertionError):  # a kill of a thread's call that never came
            eventually(over, within=_PATIENCE)

    def _look_at_rest(self) -> list[str]:
        """Look while one process serves: a shutdown may have reached the one that was started
        after the kill, which then exits once more.
        """
        while True:
            ends = len(self._site.supervisor.runs)
            try:
                problems = self._look()
            except (ClientError, OSError):
                runs = self._site.supervisor.runs
                eventually(lambda: len(runs) > ends, saying="who was asked has ended")  # noqa: B023
                continue
            if len(self._site.supervisor.runs) == ends:
                return problems

    def _look(self) -> list[str]:
        """What is wrong once the supervisor has done its part."""
        self._site.wait_until_it_answers()
        at_path = subprocess.run(
            [self._site.path, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
        serving = self._site.client.healthcheck().version
        problems = self._census.take()
        if at_path.stdout != f"dstack-shim version {serving}\n":
            problems.append(f"{serving} serves, and at the path is {at_path.stdout!r}")
        if self._running() != self._boxes:
            problems.append(f"containers were {self._boxes} and are {self._running()}")
        names = {path.name.removeprefix(".dstack-shim.") for path in self._beside()}
        if names - {"next", "previous", "running"}:
            problems.append(f"beside the path is {names}")
        return problems

    def _recover(self) -> None:
        """Upgrade once more, to a content that nobody has tried."""
        self._version += 1
        version = f"0.22.5.post{self._version}"
        self._site.wait_until_it_answers()
        self._site.upgrade(variant(self._built, version, patch=OLD_WAITS_LESS))
        self._site.wait_for_version(version)

    def _beside(self) -> Iterator[Path]:
        return (path for path in self._site.path.parent.iterdir() if path != self._site.path)

    def _running(self) -> dict[str, int]:
        return {
            box["Id"]: self._client.inspect_container(box["Id"])["State"]["Pid"]
            for box in self._client.containers()
        }

    @contextmanager
    def _strace(self, pid: int, *more: str) -> Iterator[None]:
        self._output.unlink(missing_ok=True)
        command = ["strace", "-f", "-p", str(pid), "-s", "160", "-o", str(self._output)]
        command += ["-e", "signal=none", "-e", f"trace={','.join(CALLS)}", *more]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        process.stderr.readline()  # attached
        try:
            yield
        finally:
            process.terminate()
            try:
                process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                # It waits for one that waits in vfork for one it has stopped; the kernel does not.
                process.kill()
                process.communicate(timeout=60)
