"""Who is measured: this repository's file, and perhaps another shim beside it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import attrs

OURS, PEER = "ours", "peer"
HOST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where a host's shim finds its tools; a developer's may be slow wrappers."""


REAL_TIME = ("chrt", "--rr", "10")
"""Before a command: whatever else runs on the machine does not take its turn (util-linux)."""


@attrs.frozen
class Candidate:
    """One executable, what it says of itself, and what its command begins with."""

    name: str
    path: Path
    version: str
    size: int
    prefix: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """What starts it."""
        return (*self.prefix, str(self.path))


def candidate(name: str, path: Path, prefix: tuple[str, ...] = ()) -> Candidate:
    """The executable at ``path``.

    Raises ``OSError`` and ``CalledProcessError`` for what does not tell its version.
    """
    version = ask_version((str(path),)).rpartition(" ")[2]
    return Candidate(name, path, version, path.stat().st_size, prefix)


def ask_version(command: tuple[str, ...]) -> str:
    """What it answers to ``--version``."""
    return subprocess.run(
        [*command, "--version"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PATH": HOST_PATH},
    ).stdout.strip()
