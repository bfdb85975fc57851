"""Images for the cases, made without a registry around the lab's stand-in runner."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import docker

from tests.lab import images as lab

# Ends with the code that is written into the pipe; nothing runs meanwhile but one blocked read.
UNTIL_TOLD = "mkfifo /tmp/end; read code </tmp/end; exit $code"


class Images:
    """Makes images on the engine when a case first asks for them."""

    def __init__(self, engine: docker.DockerClient) -> None:
        self._engine = engine
        self._lab = lab.Images(engine.api)

    def job(self, script: str, *, sshd: bool = True, volume: str = "") -> str:
        """An image whose task runs this one line of shell; ``volume`` is an anonymous one's path."""
        digest = hashlib.sha256(f"{script}|{sshd}|{volume}".encode()).hexdigest()[:12]
        return self._lab.plain(
            f"conformance/job:{digest}",
            environment={"LAB_JOB": script},
            changes=(f"VOLUME {volume}",) if volume else (),
            has_sshd=sshd,
        )

    @property
    def idle(self) -> str:
        """Runs until it is told to end: see :func:`tell`."""
        return self.job(UNTIL_TOLD)

    def exits(self, code: int, output: str = "") -> str:
        """Prints and ends at once."""
        return self.job(f"printf '{output}'; exit {code}")

    def built(self, tag: str, base: str, *lines: str, **files: str | bytes) -> str:
        """An image on top of another: Dockerfile lines, and files (executable) by name."""
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as archive:
            _add(archive, "Dockerfile", "\n".join([f"FROM {base}", *lines]).encode())
            for name, content in files.items():
                _add(archive, name, content.encode() if isinstance(content, str) else content)
        context.seek(0)
        self._engine.images.build(fileobj=context, custom_context=True, tag=tag, rm=True)
        return tag

    def tool(self, tag: str, script: str, output: str) -> str:
        """An image that runs a shell script with the words it is given; ``/output`` is a file."""
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as archive:
            _add(archive, "bin/sh", Path(shutil.which("busybox") or "").read_bytes())
            _add(archive, "script", script.encode())
            _add(archive, "output", output.encode())
        repository, _, name = tag.partition(":")
        changes = ['ENTRYPOINT ["/bin/sh", "/script"]']
        self._engine.api.import_image_from_data(
            context.getvalue(), repository=repository, tag=name, changes=changes
        )
        return tag

    def sized(self, tag: str, size: int) -> str:
        """A job image with a layer of about this many bytes that no compression makes smaller."""
        return self.built(tag, self.idle, "COPY noise /", noise=os.urandom(size))


def tell(container: Any, code: int) -> None:
    """Let a task of :attr:`Images.idle` end with this code."""
    container.exec_run(["sh", "-c", f"echo {code} >/tmp/end"], detach=True)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o755
    archive.addfile(entry, io.BytesIO(data))
