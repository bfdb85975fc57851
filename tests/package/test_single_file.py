"""The one file as a host meets it: built here, run with nothing of ours installed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from dstack_shim_contracts.features import TAKEOVER_PROTOCOL, read_feature_document

from tests.package.conftest import VERSION
from tools import build_shim, interpreters
from tools.bundle import STAND_INS

ROOT = Path(__file__).parents[2]
ANSWER = f"dstack-shim version {VERSION}\n"
DEBIAN = Path("/usr/bin/python3")
FOUND = sorted({*interpreters.interpreters().values(), *([DEBIAN] if DEBIAN.exists() else [])})


def call(
    *command: str | Path, path: Path | str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run with an empty environment but for PATH (where the file looks for its Python)."""
    return subprocess.run(
        command,
        env={"PATH": str(path or "/usr/bin:/bin"), **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def folder_with(tmp_path: Path, **programs: Path) -> Path:
    """A folder for PATH in which those names are those programs, and the shell's own ones work."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, program in programs.items():
        wrapper = folder / name.replace("_", ".")
        wrapper.write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
        wrapper.chmod(0o755)
    return folder


def old_pythons() -> list[Path]:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    return [found for minor in (6, 7, 8, 9) for found in root.glob(f"3.{minor}.*/bin/python3")]


@pytest.mark.parametrize("python", FOUND, ids=str)
def test_every_python_here_runs_it_with_nothing_installed(
    shim: Path, python: Path, tmp_path: Path
) -> None:
    answer = call(shim, "--version", path=folder_with(tmp_path, python3=python))
    assert (answer.stdout, answer.stderr, answer.returncode) == (ANSWER, "", 0)


@pytest.mark.parametrize("flag", ["-version", "-v", "--version=true"])
def test_every_spelling_of_version_gets_the_same_three_words(shim: Path, flag: str) -> None:
    assert call(shim, flag).stdout == ANSWER


def test_the_command_line_answers_from_the_file(shim: Path, tmp_path: Path) -> None:
    answer = call(shim, "--shim-home", tmp_path / "none")
    assert (answer.stdout, answer.returncode) == ("", 1)
    assert str(tmp_path / "none") in answer.stderr


@pytest.mark.timeout(600)  # two whole builds
def test_two_builds_in_two_places_are_the_same_bytes(shim: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "another place"
    for part in ("contracts", "shim", "tools"):
        shutil.copytree(
            ROOT / part, elsewhere / part, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "LICENSE", elsewhere)
    (elsewhere / "build").mkdir()
    (elsewhere / "build" / "wheels").symlink_to(ROOT / "build" / "wheels")
    output = str(elsewhere / "out")  # a relative one is meant from where ./dev was called
    build = [sys.executable, "-m", "tools.build_shim", "--version", VERSION, "--output", output]
    subprocess.run(build, cwd=elsewhere, check=True, timeout=500)
    again = elsewhere / "out" / "dstack-shim"
    assert (
        hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(shim.read_bytes()).digest()
    )


def test_it_says_what_it_is_without_being_run(shim: Path) -> None:
    with zipfile.ZipFile(shim) as archive:
        document = read_feature_document(archive.read("dstack-shim.json"))
    assert document.version == VERSION
    assert "persisted-state" in document.features
    assert document.takeover == TAKEOVER_PROTOCOL


def test_it_holds_nothing_native_and_no_path_of_this_machine(shim: Path) -> None:
    with zipfile.ZipFile(shim) as archive:
        names = archive.namelist()
        assert not [name for name in names if name.endswith((".so", ".pem"))]
        machine = str(ROOT).encode()
        assert not [name for name in names if machine in archive.read(name)]


def test_each_bundled_project_brings_its_licence(shim: Path) -> None:
    pinned = re.findall(r"^([a-z0-9-]+)==", (ROOT / "tools/bundle.txt").read_text(), re.MULTILINE)
    projects = {name.replace("-", "_") for name in pinned} - {
        name.split("/")[0] for name in STAND_INS if name.endswith("/__init__.py")
    }
    with zipfile.ZipFile(shim) as archive:
        held = {name.split("/")[1] for name in archive.namelist() if name.startswith("licences/")}
    assert projects <= held


def test_variables_of_a_fleet_cannot_reach_into_it(shim: Path, tmp_path: Path) -> None:
    (tmp_path / "docker.py").write_text("raise SystemExit('hijacked')")
    (tmp_path / "zlib.py").write_text("raise SystemExit('hijacked')")
    hostile = {"PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": "x", "PYTHONHOME": "/nowhere"}
    assert call(shim, "--version", env=hostile).stdout == ANSWER
    assert "usage" in call(shim, "--help", env=hostile).stdout


def test_it_leaves_no_temporary_file(shim: Path, tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    nowhere = {"TMPDIR": str(scratch), "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    answer = call(shim, "--shim-home", home, "--shim-http-port", "1", env=nowhere)
    assert answer.returncode == 1
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("python", FOUND, ids=str)
def test_what_is_for_people_works_from_the_file_with_nothing_installed(
    shim: Path, python: Path, tmp_path: Path
) -> None:
    path = folder_with(tmp_path, python3=python)
    home = tmp_path / "home"
    home.mkdir()
    nowhere = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock", "COLUMNS": "80"}
    flags = ("--shim-home", home, "--shim-http-port", "1")

    def answer(*words: str) -> subprocess.CompletedProcess[str]:
        return call(shim, *words, *flags, path=path, env=nowhere)

    assert json.loads(answer("ps", "--json").stdout)["tasks"] == []
    assert answer("ps").stdout.split()[:3] == ["TASK", "NAME", "STATUS"]
    assert answer("show", "t1").returncode == 4
    assert answer("status").returncode == 3
    assert answer("doctor").returncode == 2
    assert "usage: dstack-shim logs" in answer("logs", "--help").stdout
    assert "_dstack_shim" in answer("completion", "bash").stdout
    (home / "shim.log").write_text("2026-01-02T03:04:05.678Z INFO task.ended task=t1\n")
    assert "task.ended" in answer("events", "t1").stdout
    assert [found.name for found in home.iterdir()] == ["shim.log"]


class TestVersionFailsWhereTheDaemonCouldNotStart:
    """Servers restart into a file because it answers; nothing else is checked before."""

    def test_no_python_at_all(self, shim: Path, tmp_path: Path) -> None:
        answer = call(shim, "--version", path=folder_with(tmp_path))
        assert (answer.stdout, answer.returncode) == ("", 1)
        assert "no python3" in answer.stderr

    @pytest.mark.skipif(not old_pythons(), reason="this machine has no Python older than 3.10")
    def test_only_an_old_python(self, shim: Path, tmp_path: Path) -> None:
        for index, old in enumerate(old_pythons()):
            place = tmp_path / str(index)
            place.mkdir()
            answer = call(shim, "--version", path=folder_with(place, python3=old))
            assert (answer.stdout, answer.returncode) == ("", 1)
            assert "3.10 or newer is needed" in answer.stderr

    @pytest.mark.skipif(not old_pythons(), reason="this machine has no Python older than 3.10")
    def test_an_old_python3_beside_a_fit_one_is_no_hindrance(
        self, shim: Path, tmp_path: Path
    ) -> None:
        fit = interpreters.interpreters()[interpreters.RUNNING]
        names = {f"python{interpreters.RUNNING.replace('.', '_')}": fit}
        path = folder_with(tmp_path, python3=old_pythons()[-1], **names)
        assert call(shim, "--version", path=path).stdout == ANSWER

    def test_what_it_runs_itself_looks_for_a_fit_python_again(self, shim: Path) -> None:
        """The daemon asks files for their version: beside an old python3 each has to look."""
        code = (
            "import os, runpy, sys; sys.argv = [sys.argv[1], '--version']\n"
            "try: runpy.run_path(sys.argv[0])\n"
            "except SystemExit: print(os.environ.get('DSTACK_SHIM_NO_OTHER_PYTHON'))"
        )
        env = {"DSTACK_SHIM_NO_OTHER_PYTHON": "1"}
        assert call(sys.executable, "-c", code, shim, env=env).stdout == f"{ANSWER}None\n"

    @pytest.mark.skipif(not old_pythons(), reason="this machine has no Python older than 3.10")
    def test_a_name_that_lies_about_its_version_ends(self, shim: Path, tmp_path: Path) -> None:
        old = old_pythons()[-1]
        answer = call(shim, "--version", path=folder_with(tmp_path, python3=old, python3_12=old))
        assert (answer.stdout, answer.returncode) == ("", 1)

    @pytest.mark.parametrize("lacking", ["http", "ssl.py", "lib-dynload/_ssl"])
    def test_a_standard_library_cut_down(self, shim: Path, tmp_path: Path, lacking: str) -> None:
        python = cut_down_python(tmp_path, lacking)
        answer = call(shim, "--version", path=folder_with(tmp_path, python3=python))
        assert (answer.stdout, answer.returncode) == ("", 1)
        assert "this host's Python cannot run it" in answer.stderr

    def test_a_python_moved_but_whole_is_fine(self, shim: Path, tmp_path: Path) -> None:
        python = cut_down_python(tmp_path, "nothing that exists")
        answer = call(shim, "--version", path=folder_with(tmp_path, python3=python))
        assert (answer.stdout, answer.stderr) == (ANSWER, "")

    @pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.9, 0.999999])
    def test_a_truncated_file(self, shim: Path, tmp_path: Path, share: float) -> None:
        cut = tmp_path / "cut"
        whole = shim.read_bytes()
        cut.write_bytes(whole[: int(len(whole) * share)])
        cut.chmod(0o755)
        answer = call(cut, "--version")
        assert answer.stdout == ""
        assert answer.returncode != 0


def cut_down_python(tmp_path: Path, lacking: str) -> Path:
    """A copy of this Python in a prefix of its own whose library lacks what starts so."""
    real = Path(sys._base_executable)  # type: ignore[attr-defined] # not of the environment
    version = f"python{interpreters.RUNNING}"
    library = Path(os.__file__).parent
    prefix = tmp_path / "prefix"
    (prefix / "bin").mkdir(parents=True)
    python = prefix / "bin" / version
    shutil.copy(real.resolve(), python)
    (prefix / "lib" / version / "lib-dynload").mkdir(parents=True)
    for source in (*library.iterdir(), *(library / "lib-dynload").iterdir()):
        name = str(source.relative_to(library))
        if name not in ("lib-dynload", "site-packages") and not name.startswith(lacking):
            (prefix / "lib" / version / name).symlink_to(source)
    return python


@pytest.mark.parametrize("text", ["0.22.5", "0.22.5.post1", "0.21.2rc1", "1!2.0+local.3"])
def test_any_comparable_version_can_be_reported(text: str) -> None:
    assert build_shim.reported_version(text) == text


@pytest.mark.parametrize("text", ["", "latest", "0.22.5 ", "0.22.x", "0.0.0", "0.0", "0.0.0rc1"])
def test_a_version_no_server_could_compare_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        build_shim.reported_version(text)
