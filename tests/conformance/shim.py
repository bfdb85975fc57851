"""The shim under test: one process, its home, its HTTP API, and tasks submitted to it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tests.conformance.secrets import USUAL
from tests.eventually import eventually

# Where a run's own ports begin: a run inside a run must not meet the shims around it.
FIRST_PORT = "DSTACK_CONFORMANCE_FIRST_PORT"
_ports = itertools.count(int(os.environ.get(FIRST_PORT, "21000")))

# The server gives every call 9 seconds; a shim that needs longer has failed.
PATIENCE = 9.0


def free_port() -> int:
    """A port nobody else in this run was given: the network namespace is ours alone."""
    return next(_ports)


@dataclass
class Setting:
    """How to run a shim: everything but its arguments and its home."""

    executable: Path
    path: str
    engine: str
    runner: Path
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self, home: Path) -> dict[str, str]:
        """As a supervisor gives it: little, and nothing of the test run's own."""
        return {
            "PATH": self.path,
            "HOME": str(home.parent),
            "LANG": "C.UTF-8",
            "DOCKER_HOST": self.engine,
            **self.variables,
        }


class Shim:
    """A shim process on a home of its own; started and ended as often as a case likes."""

    def __init__(
        self,
        setting: Setting,
        home: Path,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.setting = setting
        self.home = home
        self.port = port or free_port()
        self.runner_ports = (free_port(), free_port())
        self.executable = setting.executable
        self.arguments = list(arguments)
        self._not_given: list[str] = []
        self.variables = dict(variables or {})
        self.errors = home.parent / f"{home.name}.stderr"
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(
            base_url=f"http://localhost:{self.port}", timeout=PATIENCE, trust_env=False
        )
        self.tasks: list[Task] = []
        home.mkdir(parents=True, exist_ok=True)

    # -- the process ------------------------------------------------------------------------

    def command_line(self) -> list[str]:
        usual = [
            f"--shim-home={self.home}",
            f"--shim-http-port={self.port}",
            f"--runner-http-port={self.runner_ports[0]}",
            f"--runner-ssh-port={self.runner_ports[1]}",
            f"--runner-binary-path={self.setting.runner}",
        ]
        given = [word for word in usual if not word.startswith(tuple(self._not_given))]
        return [str(self.executable), *given, *self.arguments]

    def without_argument(self, flag: str) -> None:
        """Do not give this flag, which otherwise is always given."""
        self._not_given.append(flag)

    def start(self, *, within: float = 20.0) -> Shim:
        """Start it and wait until it answers."""
        self.launch()
        eventually(self._answers, within=within, saying=f"the shim answers\n{self.last_words()}")
        return self

    def launch(self) -> None:
        """Start it and do not wait."""
        environment = self.setting.environment(self.home) | self.variables
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                self.command_line(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd="/",
            )

    def kill(self) -> None:
        """End it as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; its exit code."""
        return self._end(sign)

    def restart(self) -> Shim:
        self.kill()
        return self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For a while it does not run: what happens meanwhile it sees all at once, afterwards."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def last_words(self) -> str:
        """The end of what it wrote to standard error, for a failure's message."""
        text = self.errors.read_text(errors="replace") if self.errors.exists() else ""
        return "\n".join(text.splitlines()[-15:])

    def close(self) -> None:
        self.kill()
        self.http.close()

    def _end(self, sign: signal.Signals) -> int:
        # A fresh connection each: nothing of the old process must look like the new one's.
        self.http.close()
        self.http = httpx.Client(
            base_url=f"http://localhost:{self.port}", timeout=PATIENCE, trust_env=False
        )
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(sign)
        code = self.process.wait(timeout=15)
        self.process = None
        return code

    def _answers(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            raise RuntimeError(f"the shim ended ({self.process.returncode}):\n{self.last_words()}")
        try:
            return self.http.get("/api/healthcheck").status_code == 200
        except httpx.TransportError:
            return False

    # -- the API ----------------------------------------------------------------------------

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """POST a body as JSON (None: no body at all)."""
        if body is not None:
            options["json"] = body
        return self.http.post(path, **options)

    def task_list(self) -> dict[str, str]:
        """Id → status of every task it knows."""
        return {task["id"]: task["status"] for task in self.get("/api/tasks").json()["tasks"]}

    def task(self, image: str, **fields: Any) -> Task:
        """A task not submitted yet, with what most cases need."""
        task = Task(self, image, fields)
        self.tasks.append(task)
        return task

    def submit(self, image: str, **fields: Any) -> Task:
        """Submit a task; the answer must be 200."""
        return self.task(image, **fields).submit()

    def run(self, image: str, **fields: Any) -> Task:
        """Submit a task and wait until it runs, as its server does: with its ports."""
        task = self.submit(image, **fields).reach("running")
        eventually(lambda: task.info()["ports"] is not None, within=5, saying="ports are known")
        return task

    def raw(self, data: bytes, *, within: float = PATIENCE) -> bytes:
        """Send bytes as they are and return everything that comes back before the end."""
        with socket.create_connection(("localhost", self.port), timeout=within) as connection:
            connection.sendall(data)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        return answer


class Task:
    """A task of one case, as its server would know it."""

    def __init__(self, shim: Shim, image: str, fields: Mapping[str, Any]) -> None:
        self.shim = shim
        self.body: dict[str, Any] = {
            "id": str(uuid.uuid4()),
            "name": "conf-0-0",
            "image_name": image,
            **USUAL.fields,
            "container_user": "root",
            "network_mode": "host",
            **fields,
        }

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def path(self) -> str:
        """Where the API has it."""
        return f"/api/tasks/{quote(self.id, safe='')}"

    @property
    def container_name(self) -> str:
        """The name the page prescribes."""
        digest = hashlib.sha256(f"{self.body['name']}/{self.id}".encode()).hexdigest()
        return f"{self.body['name']}-{digest[:8]}"

    @property
    def dir(self) -> Path:
        return self.shim.home / "runners" / self.container_name

    @property
    def record(self) -> dict[str, Any]:
        """What the shim keeps of it on disk."""
        found: dict[str, Any] = json.loads((self.dir / "task.json").read_bytes())
        return found

    def submit(self) -> Task:
        answer = self.shim.post("/api/tasks", self.body)
        assert answer.status_code == 200, answer.text
        return self

    def get(self) -> httpx.Response:
        return self.shim.get(self.path)

    def info(self) -> dict[str, Any]:
        answer = self.get()
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    @property
    def status(self) -> str:
        return str(self.info()["status"])

    def reach(self, *statuses: str, within: float = 10.0) -> Task:
        """Wait for one of these statuses; a task that ended instead says why."""

        def there() -> bool:
            info = self.info()
            if info["status"] == "terminated" and "terminated" not in statuses:
                raise RuntimeError(
                    f"ended: {info['termination_reason']} {info['termination_message']}"
                )
            return info["status"] in statuses

        eventually(there, within=within, saying=f"task is {' or '.join(statuses)}")
        return self

    def end(self, within: float = 10.0) -> dict[str, Any]:
        """Wait until it is terminated; its info."""
        return self.reach("terminated", within=within).info()

    def outcome(self, within: float = 10.0) -> tuple[str, str]:
        """Wait until it is terminated; reason and message."""
        info = self.end(within)
        return info["termination_reason"], info["termination_message"]

    def terminate(
        self,
        reason: str = "terminated_by_server",
        message: str = "",
        timeout: int = 0,
        **options: Any,
    ) -> httpx.Response:
        body = {"termination_reason": reason, "termination_message": message, "timeout": timeout}
        return self.shim.post(f"{self.path}/terminate", body, **options)

    def remove(self) -> httpx.Response:
        return self.shim.post(f"{self.path}/remove")


def run_to_end(
    setting: Setting,
    home: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
    within: float = 20.0,
) -> subprocess.CompletedProcess[str]:
    """Run the executable with exactly these arguments until it ends; SIGKILL after ``within``."""
    return subprocess.run(
        [str(setting.executable), *arguments],
        env=setting.environment(home) | dict(variables or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within,
        check=False,
        cwd="/",
    )
