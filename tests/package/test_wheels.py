"""The three distributions as an installer meets them: wheels in an empty environment."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import interpreters

ROOT = Path(__file__).parents[2]
IMPORTS = {
    "contracts": "dstack_shim_contracts",
    "shim": "dstack_shim",
    "server_ext": "dstack_shim_server",
}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    for package in IMPORTS:
        interpreters.uv(
            *("build", "--wheel", "--no-build-isolation", "--python", sys.executable),
            *("--out-dir", folder, ROOT / package),
        )
    return {package: next(folder.glob(f"{name}-*.whl")) for package, name in IMPORTS.items()}


@pytest.mark.parametrize("package", IMPORTS)
def test_a_wheel_imports_in_an_empty_environment(
    wheels: dict[str, Path], package: str, tmp_path: Path
) -> None:
    python = empty_environment(tmp_path / "env")
    needed = [wheels[package], *([] if package == "contracts" else [wheels["contracts"]])]
    install(python, needed)
    run(python, "-c", f"import {IMPORTS[package]}")
    interpreters.uv("pip", "check", "--python", python)


def test_the_shim_of_a_wheel_is_a_command(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "env")
    install(python, [wheels["contracts"], wheels["shim"]])
    command = python.parent / "dstack-shim"
    assert run(command, "--version").startswith("dstack-shim version ")


@pytest.mark.parametrize("package", IMPORTS)
def test_a_wheel_says_its_licence_and_that_it_is_typed(
    wheels: dict[str, Path], package: str
) -> None:
    with zipfile.ZipFile(wheels[package]) as archive:
        names = archive.namelist()
        licence = next(name for name in names if name.endswith("licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        assert f"{IMPORTS[package]}/py.typed" in names


def empty_environment(folder: Path) -> Path:
    interpreters.uv("venv", "--python", sys.executable, folder)
    return folder / "bin" / "python"


def install(python: Path, wheels: Sequence[Path]) -> None:
    interpreters.uv(
        *("pip", "install", "--python", python, "--constraints", ROOT / "constraints.txt"),
        *wheels,
    )


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
