"""Images made without a registry, and a stand-in for the runner that lets an image say what a job does.

Every image here is Debian's static busybox, about 2 MB. What a task's job does is its image's
name: a test (or the demo) makes the image it needs and submits an ordinary body with it.

    images = Images(engine.client())
    body["image_name"] = images.job("sleep 2; exit 7")          # any shell
    body["image_name"] = images.job("exit 7", tag="exit7")      # job:exit7

The job is shell, kept in the image's variable ``LAB_JOB``. It runs inside what a real task runs:
the entry point built by the shim, which calls the stand-in runner mounted from the host
(:func:`write_runner`), which checks its flags like the real one, leaves its arguments in
``/tmp/runner/argv``, and runs the job. ``serve`` in a job answers the runner's port.

A shell that is process 1 takes no TERM it has no trap for, and the entry point's does not hand it
on: as with real runners, a graceful stop of a task ends with the KILL. Jobs that need TERM are
containers made directly, see :meth:`Images.plain`.
"""

from __future__ import annotations

import hashlib
import io
import random
import re
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path

import docker

RUNNER = Path(__file__).parent / "bin" / "dstack-runner"
BASE = "lab/busybox:1"
_DIRECTORIES = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "etc", "proc", "sys")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1000::/home/worker:/bin/sh\n",
    "etc/group": "root:x:0:\nworker:x:1000:\n",
    "etc/os-release": 'NAME="Lab Linux"\nPRETTY_NAME="Lab Linux 1"\n',
}
_SSHD = "#!/bin/sh\nexit 0\n"
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Images:
    """Makes images on one engine; each content is imported once."""

    def __init__(self, client: docker.APIClient) -> None:
        self._client = client
        self._made: set[str] = set()

    def job(self, script: str, *, tag: str = "") -> str:
        """An image whose task runs ``script``; returns its name ``job:TAG``."""
        return self.plain(f"job:{tag or _tag(script)}", environment={"LAB_JOB": script})

    def plain(
        self,
        name: str = BASE,
        *,
        environment: dict[str, str] | None = None,
        changes: tuple[str, ...] = (),
        has_sshd: bool = True,
        padding: int = 0,
    ) -> str:
        """An image as wanted; ``padding`` adds that many bytes that neither compress nor repeat.

        With padding no two images share a layer. ``changes`` are Dockerfile instructions (``VOLUME /data``).
        """
        if name not in self._made:
            told = [f"ENV {_PATH}", 'CMD ["/bin/sh"]', *changes]
            told += [f"ENV {key}={_quoted(value)}" for key, value in (environment or {}).items()]
            repository, _, tag = name.rpartition(":")
            self._client.import_image_from_data(
                _root(has_sshd, _noise(name, padding)),
                repository=repository,
                tag=tag,
                changes=told,
            )
            self._made.add(name)
        return name

    def forget(self, name: str) -> None:
        """The image was removed: make it again when it is asked for."""
        self._made.discard(name)


def write_runner(path: Path, version: str = "0.22.5") -> Path:
    """Put the stand-in runner at ``path``, saying it is of ``version``."""
    text = RUNNER.read_text(encoding="utf-8")
    path.write_text(text.replace("VERSION=0.0.0", f"VERSION={version}", 1), encoding="utf-8")
    path.chmod(0o755)
    return path


def exits(code: int, *, after: float = 0, saying: str = "") -> str:
    """A job that prints ``saying``, then ends with ``code`` after so many seconds."""
    words = f"echo '{saying}'; " if saying else ""
    return f"{words}sleep {after}; exit {code}"


RUNS_ON = "while true; do sleep 3600; done"
"""A job that has to be stopped."""


def _tag(script: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9]+", "-", script).strip("-").lower()[:40] or "job"
    return f"{plain}-{hashlib.sha256(script.encode()).hexdigest()[:6]}"


def _quoted(value: str) -> str:
    if "\n" in value:
        raise ValueError("an image's variable is one line: join commands with ';'")
    return '"' + re.sub(r'(["\\$])', r"\\\1", value) + '"'


@cache
def _root(has_sshd: bool, padding: bytes) -> bytes:
    """The file system of an image as a tar archive; the same bytes for the same wish."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError("busybox-static is not installed")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in (*_DIRECTORIES, "dev", "home/worker", "root"):
            _add(tar, name, tarfile.DIRTYPE, 0o755)
        for name in ("tmp", "var/tmp"):
            _add(tar, name, tarfile.DIRTYPE, 0o1777)
        _add(tar, "bin/busybox", tarfile.REGTYPE, 0o755, Path(busybox).read_bytes())
        for applet in _applets(busybox):
            _add(tar, applet, tarfile.SYMTYPE, 0o777, link="/bin/busybox")
        for name, text in _FILES.items():
            _add(tar, name, tarfile.REGTYPE, 0o644, text.encode())
        if has_sshd:
            _add(tar, "usr/sbin/sshd", tarfile.REGTYPE, 0o755, _SSHD.encode())
        if padding:
            _add(tar, "padding", tarfile.REGTYPE, 0o644, padding)
    return archive.getvalue()


def _applets(busybox: str) -> list[str]:
    listed = subprocess.run(
        [busybox, "--list-full"], check=True, capture_output=True, text=True, timeout=10
    )
    return [name for name in listed.stdout.split() if name not in ("bin/busybox", "linuxrc")]


def _add(
    tar: tarfile.TarFile, name: str, kind: bytes, mode: int, data: bytes = b"", link: str = ""
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, len(data), link
    tar.addfile(entry, io.BytesIO(data))


def _noise(seed: str, size: int) -> bytes:
    return random.Random(seed).randbytes(size)
