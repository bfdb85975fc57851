"""
dstack's own releases, each in an environment of its own, pristine and with our plugin installed.

    python tests/releases/environments.py [--all] [VERSION …]   make what is missing
    python tests/releases/environments.py --pin VERSION …       write pins/VERSION.txt anew

Pristine environments are shared by all checkouts of a user (``$DSTACK_SHIM_CACHE``, else
``~/.cache/dstack-shim-restart``) and installed from the pins beside this file, so that a new release
of somebody's dependency does not change our tests. Those with the plugin are copies made of hard
links in ``build/releases``: only there is anything installed, from wheels of this checkout.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = Path(__file__).with_name("pins")
COPIES = ROOT / "build" / "releases"
OURS = ("contracts", "server_ext")

PYTHON = "3.11"  # the pins were resolved for it
TAG = "py311"

# Whose models and requests the contracts are held against.
CONTRACT = ("0.20.29", "0.21.2", "0.21.5", "0.22.5")
# Whose servers run with the plugin: in every test run, and one of each shape of the decision code
# beside all that are asked for by name.
SERVERS = ("0.21.2", "0.22.5")
ALL_SERVERS = (
    *("0.20.9", "0.20.12", "0.20.16"),
    *("0.20.29", "0.21.2", "0.21.3", "0.21.5", "0.22.0", "0.22.5"),
)
# The last release without a restart decision.
WITHOUT_DECISION = "0.20.0"

SAMPLE = tuple(dict.fromkeys((WITHOUT_DECISION, *CONTRACT, *SERVERS)))
EVERY = tuple(dict.fromkeys((WITHOUT_DECISION, *CONTRACT, *ALL_SERVERS)))


def pristine(version: str) -> Path:
    """Return the Python of a release's environment as dstack alone makes it; make it if need be."""
    folder = cache() / "releases" / f"{version}-{TAG}"
    pins = PINS / f"{version}.txt"
    wanted = _digest([pins])
    with _locked(folder):
        if _stamp(folder) != wanted:
            _replace(folder, lambda new: _install(new, ["-r", str(pins)], wanted))
    return _python(folder)


def with_plugin(version: str) -> Path:
    """Return the Python of a copy in which this checkout's plugin is installed, made if need be."""
    source = pristine(version).parents[1]
    folder = COPIES / version
    wanted = f"{source}\n{_stamp(source)}\n{_digest(_sources())}"
    with _locked(folder):
        if _stamp(folder) != wanted:
            _replace(folder, lambda new: _copy_and_install(source, new, wanted))
    return _python(folder)


def installed(python: Path) -> set[str]:
    """Return what is installed in an environment, as ``name==version`` lines."""
    return set(_uv("pip", "freeze", "--python", python).splitlines())


def complaints(python: Path) -> set[str]:
    """Return the lines about requirements that do not hold in an environment."""
    command = [sys.executable, "-m", "uv", "pip", "check", "--python", str(python)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = checked.stderr.splitlines()
    return {line for line in lines if line.startswith("The package ")}


def cache() -> Path:
    """Return the folder that outlives checkouts."""
    chosen = os.environ.get("DSTACK_SHIM_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "dstack-shim-restart"


# How they are made -----------------------------------------------------------------------------


def _install(folder: Path, requirements: list[str], stamp: str) -> None:
    # Relocatable: it is renamed into place and copied, and its scripts must follow.
    _uv("venv", "--relocatable", "--python", PYTHON, folder)
    # Compiled once here, not by each copy's first start, which would take half a minute.
    _uv("pip", "install", "--compile-bytecode", "--python", _python(folder), *requirements)
    (folder / "made-from").write_text(stamp, encoding="utf-8")


def _copy_and_install(source: Path, folder: Path, stamp: str) -> None:
    # uv and pip replace files, they never write into one, so the links are safe.
    shutil.copytree(source, folder, symlinks=True, copy_function=_link, dirs_exist_ok=True)
    with tempfile.TemporaryDirectory() as wheels:
        for name in OURS:
            build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", wheels]
            subprocess.run(build, cwd=ROOT / name, check=True, capture_output=True, timeout=120)
        ours = sorted(Path(wheels).glob("*.whl"))
        _uv("pip", "install", "--python", _python(folder), *ours)
    (folder / "made-from").unlink()  # a link to the other one's
    (folder / "made-from").write_text(stamp, encoding="utf-8")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the cache is on another file system
        shutil.copy2(source, target)


def _replace(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a folder aside and let it take the name only once it is whole."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as aside:
        new, old = Path(aside) / "new", Path(aside) / "old"
        make(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stamp(folder: Path) -> str:
    stamp = folder / "made-from"
    return stamp.read_text(encoding="utf-8") if stamp.exists() and _python(folder).exists() else ""


def _sources() -> list[Path]:
    files = [file for name in OURS for file in (ROOT / name).rglob("*") if file.is_file()]
    return sorted(file for file in files if "__pycache__" not in file.parts)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _uv(*arguments: str | Path) -> str:
    """Run uv and return what it printed; its complaint is part of the error."""
    command = [sys.executable, "-m", "uv", "--quiet", *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"uv {' '.join(command[4:])}: {finished.stderr.strip()}")
    return finished.stdout


def pin(version: str) -> None:
    """Install a release as pip would today and write down what came."""
    with tempfile.TemporaryDirectory() as folder:
        _install(Path(folder) / "env", [f"dstack[server]=={version}"], stamp="")
        frozen = _uv("pip", "freeze", "--python", _python(Path(folder) / "env"))
    (PINS / f"{version}.txt").write_text(frozen, encoding="utf-8")


def main() -> None:
    """Make the environments of a test run, or pins."""
    parser = argparse.ArgumentParser(description="environments of dstack's own releases")
    parser.add_argument("--all", action="store_true", help="those of ./dev prove")
    parser.add_argument("--pin", action="store_true", help="write pins instead")
    parser.add_argument("versions", nargs="*")
    options = parser.parse_args()
    full = options.all or "DSTACK_SHIM_FULL" in os.environ
    for version in options.versions or (EVERY if full else SAMPLE):
        if options.pin:
            pin(version)
        else:
            with_plugin(version)


if __name__ == "__main__":
    main()
