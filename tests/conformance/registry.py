"""A registry of the run's own, with a password."""

from __future__ import annotations

import subprocess
from pathlib import Path

import docker
import httpx

from tests.conformance.secrets import REGISTRY
from tests.eventually import eventually

PORT = 20990

_CONFIGURATION = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: 127.0.0.1:{port}}}
auth: {{htpasswd: {{realm: conformance, path: {folder}/htpasswd}}}}
"""


class Registry:
    """Serves what is pushed to it, to :data:`REGISTRY` only."""

    host = f"127.0.0.1:{PORT}"

    def __init__(self, folder: Path, engine: docker.DockerClient) -> None:
        self._engine = engine
        folder.mkdir()
        (folder / "htpasswd").write_text(_password_line())
        (folder / "config.yml").write_text(_CONFIGURATION.format(folder=folder, port=PORT))
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=log
            )
        eventually(self._answers, within=15, saying="the registry answers")

    def push(self, image: str, name: str) -> str:
        """Push a local image under a name; the whole reference. It is not kept locally."""
        reference = f"{self.host}/{name}"
        repository, _, tag = reference.rpartition(":")
        self._engine.images.get(image).tag(repository, tag)
        auth = {"username": REGISTRY.username, "password": REGISTRY.password}
        said = self._engine.images.push(repository, tag=tag, auth_config=auth)
        assert "errorDetail" not in said, said
        self._engine.images.remove(reference)
        return reference

    def close(self) -> None:
        """Stop serving."""
        self._process.terminate()
        self._process.wait(timeout=10)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://{self.host}/v2/", trust_env=False).status_code == 401
        except httpx.TransportError:
            return False


def _password_line() -> str:
    """Its user's line; neither of the two words in an argument, where the watch would find it."""
    made = subprocess.run(
        ["htpasswd", "-Bin", "user"],
        input=REGISTRY.password,
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return made.stdout.replace("user", REGISTRY.username, 1)
