"""
A real dstack server of some release, in a home of its own on a port of its own.

It runs in the environment of ``tests.releases.environments.with_plugin``: an unchanged release with
our plugin installed as an operator would.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from tests.eventually import eventually
from tests.releases import environments

PROBE = Path(__file__).with_name("probe")
PLUGINS = ("shim_restart", "shim_restart_probe")
TOKEN = "a-token-for-tests"

START = 180.0  # seconds: 7 to 17 on a new SQLite database, many times that on a busy machine
STOP = 30.0  # seconds: 3.3 as a rule


@attrs.frozen
class DstackServer:
    """A running server; its log is a file that can be read at any time."""

    version: str
    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8", errors="replace")

    def answers(self) -> bool:
        """Whether it is up; its death while starting is told with the end of its log."""
        if self.process.poll() is not None:
            raise RuntimeError(f"dstack server {self.version} ended:\n{self.log[-4000:]}")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/healthcheck")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def ask(self, path: str, **question: object) -> Any:
        """Ask the probe inside the server; what it raised is raised here."""
        port = int((self.folder / "probe").read_text("ascii"))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(question))
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if "raised" in answer:
            raise RuntimeError(answer["raised"])
        return answer["answer"]

    def stop(self) -> None:
        """SIGTERM, then wait; a server that does not go is killed, and that is an error."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP)
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def dstack_server(
    version: str,
    folder: Path,
    *,
    plugins: Sequence[str] = PLUGINS,
    environment: Mapping[str, str] | None = None,
) -> Iterator[DstackServer]:
    """A server that answers; ``folder`` holds its home, configuration and log."""
    python = environments.with_plugin(version)
    server = start(version, folder, python, plugins, environment or {})
    try:
        eventually(server.answers, within=START, every=0.1, saying="dstack server answers")
        yield server
    finally:
        server.stop()


def start(
    version: str,
    folder: Path,
    python: Path,
    plugins: Sequence[str],
    environment: Mapping[str, str],
) -> DstackServer:
    """Start a server without waiting for it."""
    home = folder / "home"
    (folder / "server").mkdir(parents=True, exist_ok=True)
    home.mkdir(exist_ok=True)
    # Without `projects:` the server refuses to start; without the file it loads no plugins.
    listed = "".join(f"\n  - {name}" for name in plugins)
    (folder / "server" / "config.yml").write_text(f"projects: []\nplugins:{listed or ' []'}\n")
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [python.with_name("dstack"), "server", "-y"],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "PYTHONPATH": str(PROBE),
                "PYTHONUNBUFFERED": "1",
                "SHIM_RESTART_PROBE_FILE": str(folder / "probe"),
                "DSTACK_SERVER_DIR": str(folder / "server"),
                "DSTACK_SERVER_ADMIN_TOKEN": TOKEN,
                "DSTACK_SERVER_HOST": "127.0.0.1",
                "DSTACK_SERVER_PORT": str(port),
                "DSTACK_SERVER_LOG_LEVEL": "DEBUG",
                "DSTACK_SERVER_LOG_FORMAT": "standard",
                "DSTACK_DEFAULT_CREDS_DISABLED": "1",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return DstackServer(version, folder, port, process)


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
