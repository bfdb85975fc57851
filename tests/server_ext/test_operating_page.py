"""The operator's page: its commands run, its examples are what comes out, its table is complete."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dstack_shim_server import settings
from dstack_shim_server.settings import PREFIX, Mode, read_settings
from tests.server_ext.databases import Database
from tests.server_ext.records import Clock
from tests.server_ext.test_fleet import Operator, clock, lost, operator

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text("utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```shell\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
FLEET = [shlex.split(line)[1:] for line in COMMANDS if line.startswith("dstack-shim-fleet ")]
EXPORTS = [shlex.split(line)[1] for line in COMMANDS if line.startswith("export ")]
PIP = [shlex.split(line) for line in COMMANDS if line.startswith("pip ")]

__all__ = ["clock", "operator"]  # fixtures


@pytest.fixture
def database(sqlite: Database) -> Database:
    return sqlite


def test_every_command_is_of_a_kind_that_is_run() -> None:
    assert len(FLEET) + len(EXPORTS) + len(PIP) == len(COMMANDS)
    used = {command[0] for command in FLEET}
    assert used == {"status", "why", "watch", "history", "pause", "resume", "release", "metrics"}


@pytest.mark.parametrize("command", FLEET, ids=" ".join)
def test_each_command_of_the_fleet_runs(
    command: list[str], database: Database, clock: Clock, operator: Operator
) -> None:
    lost(database, clock)
    if command[0] == "watch":
        command = [*command, "--interval", "0.1"]
    code, said = operator.runs(*command)
    assert code in {0, 1}
    assert said


@pytest.mark.parametrize("command", ["status", "why d"])
def test_the_examples_are_what_comes_out(
    command: str, database: Database, clock: Clock, operator: Operator
) -> None:
    lost(database, clock)
    shown = re.search(
        rf"```shell\ndstack-shim-fleet {command}\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL
    )
    assert shown is not None
    assert operator.runs(*command.split())[1] == shown[1]


def test_the_variables_that_are_exported_are_understood() -> None:
    environment = dict(export.split("=", 1) for export in EXPORTS)
    assert all(name.startswith(PREFIX) for name in environment)
    found = read_settings(environment)
    assert (found.mode, found.policy.canaries, found.policy.max_under_way) == (Mode.ENFORCE, 1, 5)
    assert found.choice.offer("main", "gpu").version == "0.22.5.post1"
    assert found.choice.allow_downgrade


def test_the_table_has_every_variable_once() -> None:
    named = re.findall(rf"^\| `{PREFIX}(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(settings._READ)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.one_python
def test_it_is_installed_and_uninstalled_as_the_page_says(tmp_path: Path) -> None:
    """Slow: an environment with pip, two wheels. What they need is there, as beside a server."""
    root = Path(__file__).parents[2]
    python = _environment(tmp_path / "env")
    for name in ("contracts", "server_ext"):
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
        subprocess.run(build, cwd=root / name, check=True, capture_output=True)
    install, uninstall = PIP
    _pip(python, install, tmp_path)
    script = python.with_name("dstack-shim-fleet")
    assert subprocess.run([script, "--help"], check=True, capture_output=True).stdout
    _pip(python, uninstall, tmp_path)
    assert not script.exists()


def _environment(folder: Path) -> Path:
    """A Python that has what ours has beside it, but not ours."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    theirs = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    for entry in theirs.iterdir():
        ours = entry.name.startswith(
            ("dstack", "_")
        )  # ours are links that an editable install left
        if not ours and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def _pip(python: Path, command: list[str], folder: Path) -> None:
    offline = ["--no-index"] if command[1] == "install" else []
    full = [str(python), "-m", *command[:2], *offline, *command[2:]]
    ran = subprocess.run(full, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
