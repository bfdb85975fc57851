"""The byte code of modules by one Python, kept in ``build/byte-code`` for the next build.

Compiling is most of the time of a build, and what changes between two builds is often nothing but
the version they report.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.bundle import BundleError, Files

HERE = Path(__file__).parent
COMPILE = HERE / "compile_tree.py"
DESCRIBE = HERE / "single_file" / "describe.py"
KEPT = HERE.parent / "build" / "byte-code"


@dataclass(frozen=True)
class Tree:
    """``name`` tells for which Python; ``imports`` are the standard modules the daemon needs."""

    name: str
    code: Files
    imports: dict[str, list[str]]


def tree(python: Path, *parts: Files) -> Tree:
    """All modules of all parts compiled by ``python``; a part that did not change is not compiled
    again. Raises ``BundleError`` if a module does not compile.
    """
    name = json.loads(ask(python, DESCRIBE, "tree"))
    code: Files = {}
    for part in parts:
        code.update(_read(_kept(python, f"{name}-code", part, _compile)))
    whole = {path: content for part in parts for path, content in part.items()}
    imports = _kept(python, f"{name}-imports", whole, _list_imports) / "imports.json"
    return Tree(name, code, json.loads(imports.read_text(encoding="utf-8")))


def compile_one(python: Path, name: str, source: bytes) -> Files:
    """One more module, which is not kept."""
    with tempfile.TemporaryDirectory() as scratch:
        _write({name: source}, Path(scratch) / "source")
        _compile(python, Path(scratch), "code")
        return _read(Path(scratch) / "code")


def ask(python: Path, *arguments: str | Path, cwd: Path | None = None) -> str:
    """What that Python prints, isolated from variables and packages of this machine.

    Raises ``BundleError`` if it fails; its own words went to standard error.
    """
    answer = subprocess.run(
        [python, "-B", "-S", "-s", *arguments],
        env={"PATH": os.defpath, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
        cwd=cwd,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=300,
    )
    if answer.returncode:
        raise BundleError(f"{python} failed with exit code {answer.returncode}, see above")
    return answer.stdout


def _kept(
    python: Path, kind: str, modules: Files, make: Callable[[Path, Path, str], None]
) -> Path:
    """The folder ``make`` fills from the modules, made once for the same modules and Python.

    Aside first, then under its name: two builds at once, or a killed one, do no harm.
    """
    folder = KEPT / f"{kind}-{_digest(python, modules)}"
    if folder.exists():
        return folder
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT, prefix=".") as scratch:
        _write(modules, Path(scratch) / "source")
        make(python, Path(scratch), "made")
        try:
            (Path(scratch) / "made").rename(folder)
        except OSError:
            if not folder.exists():  # else another build was quicker
                raise
    _forget(older_than=time.time() - 86_400)
    return folder


def _compile(python: Path, scratch: Path, target: str) -> None:
    """By relative paths: pathlib interns the parts of a path, and a name in the code that is
    interned elsewhere too is marked in the byte code. So "work" in a path can change a module.
    """
    ask(python, COMPILE, "source", target, cwd=scratch)


def _list_imports(python: Path, scratch: Path, target: str) -> None:
    (scratch / target).mkdir()
    text = ask(python, DESCRIBE, "imports", scratch / "source")
    (scratch / target / "imports.json").write_text(text)


def _forget(older_than: float) -> None:
    """Drop the code of earlier sources, but none that a build of now may be reading."""
    for folder in KEPT.iterdir():
        with suppress(FileNotFoundError):  # another build forgets it too
            if folder.stat().st_mtime < older_than:
                shutil.rmtree(folder, ignore_errors=True)


def _digest(python: Path, modules: Files) -> str:
    real = python.resolve()
    digest = hashlib.sha256(f"{real} {real.stat().st_mtime_ns}\n".encode())
    for script in (COMPILE, DESCRIBE):
        digest.update(script.read_bytes())
    for name, content in sorted(modules.items()):
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _write(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _read(folder: Path) -> Files:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.pyc")}
