"""Who is measured: this repository's file, and perhaps another shim beside it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import attrs

OURS, PEER = "ours", "peer"
HOST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where a host's shim finds its tools; a developer's may be slow wrappers."""


@attrs.frozen
class Candidate:
    """One executable, and what it says of itself."""

    name: str
    path: Path
    version: str
    size: int


def candidate(name: str, path: Path) -> Candidate:
    """The executable at ``path``.

    Raises ``OSError`` and ``CalledProcessError`` for what does not tell its version.
    """
    told = ask_version(path)
    return Candidate(name, path, told.rpartition(" ")[2], path.stat().st_size)


def ask_version(path: Path) -> str:
    """What it answers to ``--version``."""
    return subprocess.run(
        [str(path), "--version"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PATH": HOST_PATH},
    ).stdout.strip()
