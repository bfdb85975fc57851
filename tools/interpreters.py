"""Which Pythons this machine has, and an environment of each with everything we test with.

Environments live in ``build/env/<version>``, are made with uv from ``constraints.txt`` and made
again only when that or one of the three ``pyproject.toml`` changes: a second run needs no network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
PACKAGES = ("contracts", "shim", "server_ext")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


@lru_cache(maxsize=1)
def interpreters() -> dict[str, Path]:
    """The supported versions found here, oldest first, each with its executable."""
    found = {version: _find(version) for version in SUPPORTED}
    return {version: path for version, path in found.items() if path}


def environment(version: str, name: str = "", *more: str) -> Path:
    """The Python of an environment of ``version``, made if need be; with ``more`` requirements
    in it, an environment of its own that is called ``name``.

    Raises ``KeyError`` if this machine has no such interpreter, ``CalledProcessError`` if the
    environment cannot be made (no network, for one).
    """
    if version == RUNNING and not more:
        return Path(sys.executable)
    interpreter = interpreters()[version]
    folder = ROOT / "build" / "env" / (name or version)
    python = folder / "bin" / "python"
    stamp = folder / "made-from"
    wanted = _made_from(interpreter) + "".join(f"{item}\n" for item in more)
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    uv("venv", "--python", interpreter, folder)
    uv("pip", "install", "--python", python, "--require-hashes", "-r", "constraints.txt")
    editable = [word for package in PACKAGES for word in ("-e", package)]
    uv("pip", "install", "--python", python, "--no-deps", "--no-build-isolation", *editable)
    if more:
        uv("pip", "install", "--python", python, *more)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def uv(*arguments: str | Path) -> None:
    """Run uv quietly from the root of the repository; its own words are shown if it fails."""
    subprocess.run(
        [sys.executable, "-m", "uv", "--quiet", *arguments], check=True, cwd=ROOT, timeout=600
    )


def _made_from(interpreter: Path) -> str:
    files = [ROOT / "constraints.txt", *(ROOT / name / "pyproject.toml" for name in PACKAGES)]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return f"{ROOT}\n{interpreter}\n{digest}\n"


def _find(version: str) -> Path | None:
    candidates = [Path(sys.executable)] if version == RUNNING else []
    folders = os.environ.get("PATH", "").split(os.pathsep)
    candidates.extend(Path(folder) / f"python{version}" for folder in folders)
    candidates.extend(_pyenv(version))
    return next((path for path in candidates if _is_fit(path, version)), None)


def _pyenv(version: str) -> list[Path]:
    """Those of pyenv, newest first: its shims on PATH refuse versions that are not selected."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [
        path
        for path in (root / "versions").glob(f"{version}.*")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.name)
    ]
    newest_first = sorted(folders, key=lambda path: int(path.name.split(".")[2]), reverse=True)
    return [path / "bin" / f"python{version}" for path in newest_first]


def _is_fit(path: Path, version: str) -> bool:
    """Whether it runs, is what its name says, and is not the environment of somebody else."""
    if not path.exists():
        return False
    code = "import sys, ssl, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [path, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return answer.stdout.strip() == version
