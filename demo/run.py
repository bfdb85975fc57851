"""./dev demo: a job outlives the replacement of its shim, decided by dstack's own code.

Shows what changes: with stock dstack 0.21.2 a busy instance keeps its old shim for ever; with
the extension, and shims that keep their state on disk, the same code restarts the shim while the
jobs run on. Everything happens on a private Docker Engine in namespaces of its own, which are
gone afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import docker  # noqa: E402 - the checkout must be on the path for what follows

from tests.eventually import eventually  # noqa: E402
from tests.lab import sandbox  # noqa: E402
from tests.lab.engine import PrivateEngine  # noqa: E402
from tests.lab.images import RUNS_ON, Images, write_runner  # noqa: E402
from tests.lab.supervisor import Supervisor  # noqa: E402
from tests.releases import environments  # noqa: E402
from tools import build_shim  # noqa: E402

DSTACK = "0.21.2"
OLD, NEW = "0.21.1", "0.21.2"
PORT = 10998
ENDS, RUNS = "11111111-aaaa-4aaa-8aaa-111111111111", "22222222-bbbb-4bbb-8bbb-222222222222"
JOB_SECONDS = 25
SUPERVISOR_PAUSE = 3.0  # seconds, as hosts have it
TASK_LABEL = "ai.dstack.shim.is-task=true"


class Failed(Exception):
    """The demo saw something other than it promises."""


class Timeline:
    """Prints what happens and when."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        """One line of the story."""
        print(f"  {time.monotonic() - self._begin:6.1f} s  {text}", flush=True)

    def check(self, holds: bool, text: str) -> None:
        """One line that has to be true.

        Raises ``Failed``.
        """
        self.say(f"{'ok  ' if holds else 'NO  '}{text}")
        if not holds:
            raise Failed(text)


class Dstack:
    """A process of a stock dstack environment; see ``dstack_side.py``."""

    def __init__(self, python: Path, port: int, scratch: Path, *, extension: bool) -> None:
        script = str(ROOT / "demo" / "dstack_side.py")
        command = [str(python), script, f"--port={port}", *(["--extension"] if extension else [])]
        self.log = scratch / f"dstack-{'with' if extension else 'without'}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(scratch),
                    "DSTACK_SERVER_DIR": str(scratch / "server"),
                    "DSTACK_SERVER_LOG_FORMAT": "standard",
                    # No server, so no database of one; the gate decides alone.
                    "DSTACK_SHIM_RESTART_RECORD": "off",
                },
            )

    def ask(self, name: str, *arguments: object) -> Any:
        """Ask one thing.

        Raises ``Failed`` with dstack's own words.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"dstack's process ended: {self.log.read_text()[-2000:]}")
        answer = json.loads(line)
        if "raised" in answer:
            raise Failed(f"dstack: {answer['raised']}")
        return answer["answer"]

    def said(self) -> list[str]:
        """What the extension has logged."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if line.startswith("shim_restart: ")]

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(15)


def main() -> int:
    """Run the demo; 0 only if all of it holds."""
    parser = argparse.ArgumentParser(prog="./dev demo", description=__doc__)
    parser.add_argument("--engine", metavar="URL", help="use this engine instead of a private one")
    options = parser.parse_args()
    if options.engine is None and not sandbox.inside():
        if os.geteuid() != 0:
            print("./dev demo needs root: it starts a Docker Engine of its own", file=sys.stderr)
            return 1
        command = [str(ROOT / "tests/lab/sandbox"), sys.executable, __file__, *sys.argv[1:]]
        return subprocess.run(command, check=False).returncode
    with tempfile.TemporaryDirectory(prefix="shim-demo-") as scratch:
        try:
            with _engine(options.engine) as address:
                tell(address, Path(scratch))
        except Failed as failure:
            print(f"\nThe demo did not hold: {failure}", file=sys.stderr)
            return 1
    return 0


@contextmanager
def _engine(url: str | None) -> Iterator[str]:
    """An engine without tasks: a private one, or the given one if it has none.

    Raises ``Failed``: a shim adopts every task container of its engine.
    """
    if url is not None:
        client = docker.APIClient(url, version="auto")
        if client.containers(all=True, filters={"label": TASK_LABEL}):
            raise Failed(f"{url} has containers of dstack tasks; a shim would adopt them")
        client.close()
        yield url
        return
    engine = PrivateEngine()
    engine.start()
    try:
        yield engine.address
    finally:
        engine.close()


def tell(address: str, scratch: Path) -> None:
    """The whole story on one engine.

    Raises ``Failed`` at the first thing that does not hold.
    """
    line = Timeline()
    client = docker.APIClient(address, version="auto")
    print(f"dstack {DSTACK}, one instance, two jobs, one upgrade of its shim\n", flush=True)
    home, path = scratch / "home", scratch / "dstack-shim"
    home.mkdir()
    # They take seconds to import dstack: let them, while the shim is built.
    stock = Dstack(environments.pristine(DSTACK), PORT, scratch, extension=False)
    extended = Dstack(environments.with_plugin(DSTACK), PORT, scratch, extension=True)
    new = _build(line, scratch, path)
    shim = Supervisor(
        [str(path)],
        environ={
            **os.environ,
            "DOCKER_HOST": address,
            "DSTACK_SHIM_HOME": str(home),
            "DSTACK_SHIM_BINARY_PATH": str(path),
            "DSTACK_SHIM_HTTP_PORT": str(PORT),
            "DSTACK_RUNNER_BINARY_PATH": str(write_runner(scratch / "dstack-runner", DSTACK)),
        },
        log=scratch / "shim.out",
        pause=SUPERVISOR_PAUSE,
    )
    try:
        shim.start()
        line.say(f"shim {OLD} is started by a loop like the one on cloud VMs")
        before = _submit(line, stock, client)
        _upgrade(line, shim, stock, extended, path, new)
        _compare(line, client, before)
        _finish(line, extended, client, home)
    finally:
        for side in (stock, extended):
            side.close()
        shim.stop()
        for box in client.containers(all=True, filters={"label": TASK_LABEL}):
            client.remove_container(box["Id"], force=True, v=True)
        client.close()
    print("\nAll of it held: the shim was replaced, the jobs never noticed.", flush=True)


def _build(line: Timeline, scratch: Path, path: Path) -> Path:
    """Two builds of the shim, one a version newer; the old one is installed at ``path``."""
    for version in (OLD, NEW):
        build_shim.build_shim(version, scratch / version)
    shutil.copy2(scratch / OLD / "dstack-shim", path)
    line.say(f"built the shim twice, as {OLD} and {NEW}: one file each")
    return scratch / NEW / "dstack-shim"


def _submit(
    line: Timeline, dstack: Dstack, client: docker.APIClient
) -> dict[str, tuple[str, str]]:
    """Two jobs; returns what must not change while they run."""
    images = Images(client)
    ends = images.job(f"echo working; sleep {JOB_SECONDS}; echo gave up; exit 7", tag="ends")
    runs = images.job(RUNS_ON, tag="runs")
    eventually(lambda: _answers(dstack), within=20, saying="the shim answers")
    dstack.ask("submit", ENDS, "ends-0-0", ends)
    dstack.ask("submit", RUNS, "runs-0-0", runs)
    everybody = {ENDS: "running", RUNS: "running"}
    eventually(lambda: dstack.ask("tasks") == everybody, within=20, saying="both jobs run")
    line.check(True, f"dstack's client submitted two jobs: one exits with 7 in {JOB_SECONDS} s")
    return _started(client)


def _upgrade(
    line: Timeline, shim: Supervisor, stock: Dstack, extended: Dstack, path: Path, new: Path
) -> None:
    old_pid = shim.pid
    assert old_pid is not None
    aside = path.with_name("dstack-shim.new")
    shutil.copy2(new, aside)
    aside.rename(path)
    line.say(f"shim {NEW} is installed at the path; {OLD} still runs")
    for _ in range(2):
        stock.ask("decide")
    line.check(shim.pid == old_pid, "stock dstack refuses to restart the shim: jobs are running")
    extended.ask("decide")
    for words in extended.said():
        line.say(f"the extension says: {words}")
    shim.wait_for_end(old_pid)
    line.say("with the extension the same code restarts it: the old shim is gone")
    eventually(lambda: _answers(extended), within=20, saying="the new shim answers")
    line.check(shim.pid != old_pid, f"shim {NEW} answers and knows both jobs")
    line.check(set(extended.ask("tasks")) == {ENDS, RUNS}, "no job was forgotten")


def _compare(line: Timeline, client: docker.APIClient, before: dict[str, tuple[str, str]]) -> None:
    line.check(_started(client) == before, "both containers are the same, started when they were")


def _finish(line: Timeline, dstack: Dstack, client: docker.APIClient, home: Path) -> None:
    line.say("waiting for the first job to end")
    eventually(
        lambda: dstack.ask("task", ENDS)["status"] == "terminated",
        within=JOB_SECONDS + 20,
        saying="the job that exits with 7 is terminated",
    )
    outcome = dstack.ask("task", ENDS)
    told = outcome["message"].splitlines()
    reason = outcome["reason"]
    line.check(
        "container_exited_with_error" in reason.lower() and told == ["working", "gave up"],
        f"its outcome is the true one: {reason}, last words {told}",
    )
    line.check(dstack.ask("task", RUNS)["status"] == "running", "the other job runs on")
    for task_id in (ENDS, RUNS):
        dstack.ask("end", task_id)
    left = [str(path) for path in (home / "runners").iterdir()]
    left += [box["Id"] for box in client.containers(all=True, filters={"label": TASK_LABEL})]
    line.check(dstack.ask("tasks") == {}, "census: the shim knows no task any more")
    line.check(not left, f"census: containers and task directories left: {len(left)}")


def _answers(dstack: Dstack) -> bool:
    try:
        dstack.ask("tasks")
    except Failed:
        return False
    return True


def _started(client: docker.APIClient) -> dict[str, tuple[str, str]]:
    """Task id → its container's id and when that started."""
    boxes = client.containers(all=True, filters={"label": TASK_LABEL})
    details = [client.inspect_container(box["Id"]) for box in boxes]
    return {
        box["Config"]["Labels"]["ai.dstack.shim.task-id"]: (box["Id"], box["State"]["StartedAt"])
        for box in details
    }


if __name__ == "__main__":
    sys.exit(main())
