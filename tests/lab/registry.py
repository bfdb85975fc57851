"""An image registry on loopback, from Debian's ``docker-registry``, and a slow way to it."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import subprocess
import threading
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import docker

from dstack_shim.engine.protocol import Credentials
from tests.eventually import eventually

PROGRAM = "docker-registry"

T = TypeVar("T")


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
    """A TCP relay to a registry that passes on so many bytes a second; 0 is silence.

    What is small (manifests, the first 16 KiB of a connection) passes at once.
    """

    def __init__(self, target_port: int, port: int, bytes_per_second: int) -> None:
        self.host = f"127.0.0.1:{port}"
        self.bytes_per_second = bytes_per_second
        self.open_connections = 0
        self._port = port
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def open(self) -> None:
        """Listen from now on."""
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._connected, "127.0.0.1", self._port))

    def close(self) -> None:
        """Stop listening and close every connection."""
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports let go of their sockets in the next turn

    async def _connected(
        self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter
    ) -> None:
        target_reader, target = await asyncio.open_connection("127.0.0.1", self._target_port)
        self.open_connections += 1
        ways = {
            asyncio.ensure_future(self._relay(client_reader, target, is_slow=False)),
            asyncio.ensure_future(self._relay(target_reader, client, is_slow=True)),
        }
        try:
            with suppress(asyncio.CancelledError):  # the streams' own callback logs it as a fault
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # All of it before the first wait: a close of the whole may cut any wait short.
            for way in ways:
                way.cancel()
            for writer in (client, target):
                writer.close()
            await asyncio.gather(*ways, return_exceptions=True)
            for writer in (client, target):
                with suppress(OSError):
                    await writer.wait_closed()
            self.open_connections -= 1

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_slow: bool
    ) -> None:
        passed = 0
        while data := await reader.read(4096):
            if is_slow and passed > 16384:
                while self.bytes_per_second == 0:  # noqa: ASYNC110 - set from another thread
                    await asyncio.sleep(0.02)
                await asyncio.sleep(len(data) / self.bytes_per_second)
            writer.write(data)
            await writer.drain()
            passed += len(data)
