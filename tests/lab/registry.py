"""An image registry on loopback, from Debian's ``docker-registry``, and a slow way to it."""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import docker

from dstack_shim.engine.protocol import Credentials
from tests.eventually import eventually

PROGRAM = "docker-registry"


class Registry:
    """A registry with its data in ``directory``; with ``logins`` it asks for a password."""

    def __init__(self, directory: Path, port: int, login: Credentials | None = None) -> None:
        self.host = f"127.0.0.1:{port}"
        self._port = port
        self._directory = directory
        self._login = login
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return shutil.which(PROGRAM) is not None

    def start(self) -> None:
        """Start it and return once it answers."""
        self._directory.mkdir(parents=True, exist_ok=True)
        settings = self._directory / "config.yml"
        settings.write_text(self._settings(), encoding="utf-8")
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "serve", str(settings)], stdout=log, stderr=log
            )
        eventually(self._answers, within=15, saying="the registry answers")

    def stop(self) -> None:
        """Kill it; its data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def push(
        self, client: docker.APIClient, image: str, name: str, login: Credentials | None = None
    ) -> str:
        """Put a local image here as ``name`` and forget that name locally; returns its reference."""
        reference = f"{self.host}/{name}"
        client.tag(image, reference)
        auth = {"username": login.username, "password": login.password} if login else None
        answer = client.push(reference, auth_config=auth)
        if "errorDetail" in answer:
            raise RuntimeError(answer)
        client.remove_image(reference)
        return reference

    def _settings(self) -> str:
        lines = [
            "version: 0.1",
            "log: {level: warn, accesslog: {disabled: true}}",
            f"storage: {{filesystem: {{rootdirectory: {self._directory}/data}}}}",
            f"http: {{addr: '{self.host}'}}",
        ]
        if self._login is not None:
            words = ["htpasswd", "-Bbn", self._login.username, self._login.password]
            made = subprocess.run(words, check=True, capture_output=True, text=True, timeout=10)
            passwords = self._directory / "htpasswd"
            passwords.write_text(made.stdout, encoding="ascii")
            lines.append(f"auth: {{htpasswd: {{realm: lab, path: '{passwords}'}}}}")
        return "\n".join(lines) + "\n"

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self.host, timeout=2)
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status in (200, 401)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class SlowWay:
    """A TCP relay to a registry that passes on so many bytes a second; 0 is silence."""

    def __init__(self, target_port: int, port: int, bytes_per_second: int) -> None:
        self.host = f"127.0.0.1:{port}"
        self.bytes_per_second = bytes_per_second
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", port))
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            target = socket.create_connection(("127.0.0.1", self._target_port))
            self.connections += 1
            pace = {client: None, target: self}
            for source, sink in ((client, target), (target, client)):
                words = (source, sink, pace[source] is not None)
                threading.Thread(target=self._relay, args=words, daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, is_slow: bool) -> None:
        sent = 0
        with suppress(OSError), source:
            while data := source.recv(4096):
                # Small answers (manifests) pass at once, blobs are slowed down.
                while is_slow and sent > 16384 and self.bytes_per_second == 0:
                    time.sleep(0.05)
                if is_slow and sent > 16384:
                    time.sleep(len(data) / self.bytes_per_second)
                sink.sendall(data)
                sent += len(data)
            sink.shutdown(socket.SHUT_WR)
