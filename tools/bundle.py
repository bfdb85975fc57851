"""The modules that go into the single file: ours, and those of the wheels named in bundle.txt.

What is left out of them stands in left_out.py. Any other file that is no module is an error: what
reads it at run time would only be found missing on a host.

Run as a script, it only fetches the wheels: a later build needs no network.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tools.left_out import LEFT_OUT

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "tools" / "bundle.txt"
WHEELS = ROOT / "build" / "wheels"
OURS = (ROOT / "contracts" / "dstack_shim_contracts", ROOT / "shim" / "dstack_shim")

STAND_INS = {
    "certifi/__init__.py": "certifi_stand_in.py",
    "charset_normalizer/__init__.py": "charset_normalizer_stand_in.py",
    "uvicorn/main.py": "uvicorn_main_stand_in.py",
}
"""Modules of others that ours take the place of, each for the reason it tells."""

Files = dict[str, bytes]


class BundleError(Exception):
    """The single file cannot be put together as it should be; the text says what to mend."""


def modules() -> tuple[Files, Files]:
    """Every module of the single file by its path: those of others, and ours."""
    others = {
        name: (ROOT / "tools" / "single_file" / stand_in).read_bytes()
        for name, stand_in in STAND_INS.items()
    }
    for wheel in wheels():
        others.update(_of_wheel(wheel))
    ours: Files = {}
    for package in OURS:
        ours.update(_of_folder(package))
    return others, ours


def licences() -> Files:
    """What each bundled wheel says of its licence, as ``licences/<project>/<file>``."""
    files: Files = {"licences/dstack-shim/LICENSE": (ROOT / "LICENSE").read_bytes()}
    for wheel in wheels():
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path = PurePosixPath(name)
                if path.parent.suffix != ".dist-info" and "licenses" not in path.parts:
                    continue
                if path.name.upper().startswith(("LICEN", "COPYING", "NOTICE", "AUTHORS")):
                    project = path.parts[0].split("-")[0]
                    files[f"licences/{project}/{path.name}"] = archive.read(name)
    return files


def wheels() -> list[Path]:
    """The pinned wheels, fetched once; pure ones only."""
    pins = hashlib.sha256(PINS.read_bytes()).hexdigest()[:16]
    folder = WHEELS / pins
    if not folder.exists():
        _fetch(folder)
    found = sorted(folder.glob("*.whl"))
    impure = [wheel.name for wheel in found if not wheel.name.endswith("-none-any.whl")]
    if impure:
        raise BundleError(f"not pure Python: {', '.join(impure)}")
    return found


def _fetch(folder: Path) -> None:
    """Download by hash. Asking for no platform at all is what brings the pure wheel of a project
    that also has compiled ones (charset-normalizer).
    """
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    pins = partial / "pins.txt"
    pins.write_text("\n".join(_without_markers(PINS.read_text(encoding="utf-8"))) + "\n")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--require-hashes", "--no-deps", "--only-binary", ":all:", "--dest", str(partial)),
            *("--python-version", "3.10", "--implementation", "py", "--abi", "none"),
            *("--platform", "any", "--requirement", str(pins)),
        ],
        check=True,
        timeout=600,
    )
    partial.rename(folder)


def _without_markers(text: str) -> Iterator[str]:
    """The pins as they are meant for 3.10, whatever Python runs pip."""
    for line in text.splitlines():
        requirement, semicolon, _ = line.partition(" ; ")
        yield f"{requirement} \\" if semicolon else line


def _of_wheel(wheel: Path) -> Files:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        outside = (".dist-info", ".data")  # metadata; console scripts
        inside = [name for name in names if not name.split("/")[0].endswith(outside)]
        return {name: archive.read(name) for name in inside if _belongs(name, wheel.name)}


def _of_folder(package: Path) -> Files:
    files = {
        str(file.relative_to(package.parent)): file
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    return {
        name: file.read_bytes() for name, file in files.items() if _belongs(name, package.name)
    }


def _belongs(name: str, origin: str) -> bool:
    path = PurePosixPath(name)
    if any(_matches(path, pattern) for pattern in LEFT_OUT):
        return False
    if path.suffix != ".py":
        raise BundleError(f"{origin} has {name}, which is no module: bundle it or leave it out")
    return True


def _matches(path: PurePosixPath, pattern: str) -> bool:
    if pattern.startswith("*"):
        return path.match(pattern)
    folder = pattern.removesuffix("/*")
    return str(path) == pattern or (folder != pattern and path.is_relative_to(folder))


if __name__ == "__main__":
    wheels()
