"""Reading a program file: its version by running it, its features without running it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dstack_shim import installed
from dstack_shim.errors import CommandError, CommandMissing, CommandTimedOut, ComponentError
from dstack_shim.host.commands import Finished, run
from dstack_shim.installed import (
    FileIdentity,
    ProgramFile,
    ProgramReader,
    read_features,
    read_version,
)
from tests.shim.host.fake_commands import FakeCommands

SHIM = "dstack-shim"
DOCUMENT = {
    "name": SHIM,
    "version": "0.22.5.post1",
    "features": ["persisted-state", "something-newer"],
    "implementation": {"name": "ours", "version": "1"},
}


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def shim_zip(path: Path, document: object = DOCUMENT, script: str = "exit 9") -> Path:
    """Write our single-file build in small: a script, then a zip with the document."""
    raw = document if isinstance(document, (bytes, str)) else json.dumps(document)
    with path.open("wb") as file:
        file.write(f"#!/bin/sh\n{script}\nexit\n".encode())
        with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("dstack-shim.json", raw)
    path.chmod(0o755)
    return path


# --- version


async def test_version_is_the_third_word_on_stdout(tmp_path: Path) -> None:
    file = program(
        tmp_path / "x",
        'echo "warning: old config" >&2; echo "$0 version 1.2" >&2;'
        'echo "dstack-shim version 0.21.2rc1"',
    )

    assert await read_version(run, file, SHIM, timeout=20) == "0.21.2rc1"


async def test_only_the_version_is_asked_for() -> None:
    commands = FakeCommands({"/x": Finished(0, "dstack-shim version 1\n")})

    await read_version(commands, Path("/x"), SHIM, timeout=7.5)

    assert (commands.asked, commands.timeouts) == ([("/x", "--version")], [7.5])


@pytest.mark.parametrize(
    "finished",
    [
        Finished(0, ""),
        Finished(0, "dstack-shim version"),
        Finished(0, "dstack-shim version 1 beta"),
        Finished(0, "dstack-runner version 1"),
        Finished(0, "0.22.5"),
        Finished(0, "", "dstack-shim version 1"),
        Finished(0, f"dstack-shim version {'9' * 200}"),
        Finished(0, "dstack-shim version 1\x00\x1b[31m"),
        Finished(1, "dstack-shim version 1"),
        Finished(-9),
        Finished(0, "<html><body>Access Denied</body></html>"),
        CommandTimedOut("/x took longer than 5 s"),
        CommandMissing("/x cannot be run: Exec format error"),
        CommandError("/x could not be started"),
    ],
)
async def test_anything_else_is_an_error_that_names_the_component(
    finished: Finished | Exception,
) -> None:
    with pytest.raises(ComponentError, match=r"^dstack-shim: "):
        await read_version(FakeCommands({"/x": finished}), Path("/x"), SHIM, timeout=5)


async def test_error_page_in_place_of_a_binary_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>")
    file.chmod(0o755)

    with pytest.raises(ComponentError, match="cannot be run"):
        await read_version(run, file, SHIM, timeout=20)


# --- features


def test_features_are_read_without_executing_the_file(tmp_path: Path) -> None:
    file = shim_zip(tmp_path / "x", script="touch executed")
    file.chmod(0o600)

    assert read_features(file, "0.22.5.post1") == ("persisted-state", "something-newer")


def test_document_of_another_version_says_nothing(tmp_path: Path) -> None:
    assert read_features(shim_zip(tmp_path / "x"), "0.22.5") is None


@pytest.mark.parametrize(
    "document",
    [
        "",
        "null",
        "[]",
        "{",
        b"\xff\xfe",
        "[" * 60_000,
        {**DOCUMENT, "name": "dstack-runner"},
        {**DOCUMENT, "features": None, "version": 5},
        {**DOCUMENT, "features": "persisted-state"},
        {**DOCUMENT, "features": [1]},
        json.dumps(DOCUMENT) + " " * 70_000,
    ],
)
def test_malformed_document_says_nothing(tmp_path: Path, document: object) -> None:
    assert read_features(shim_zip(tmp_path / "x", document), "0.22.5.post1") is None


def test_huge_document_is_not_unpacked(tmp_path: Path) -> None:
    file = shim_zip(tmp_path / "x", b" " * 20_000_000)

    assert file.stat().st_size < 100_000
    assert read_features(file, "0.22.5.post1") is None


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + b"\0" * 5000, b"#!/bin/sh\nexit\n"])
def test_file_that_is_no_zip_says_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x"
    file.write_bytes(content)

    assert read_features(file, "1") is None


def test_zip_without_document_and_missing_file_say_nothing(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        archive.writestr("other", "{}")

    assert read_features(tmp_path / "x", "1") is None
    assert read_features(tmp_path / "none", "1") is None


@given(st.integers(0, 2**32), st.integers(1, 8))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_zip_never_breaks_the_reader(tmp_path: Path, seed: int, changes: int) -> None:
    chance = random.Random(seed)
    raw = bytearray(shim_zip(tmp_path / "x").read_bytes())
    for _ in range(changes):
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    file = tmp_path / "damaged"
    file.write_bytes(raw[: chance.randrange(len(raw)) + 1] if seed % 3 == 0 else raw)

    features = read_features(file, "0.22.5.post1")

    assert features is None or all(isinstance(feature, str) for feature in features)


# --- reading again


class CountedRuns:
    """Runs for real, and counts."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, *args: object, **kwargs: object) -> Finished:
        self.count += 1
        return await run(*args, **kwargs)  # type: ignore[arg-type]  # as given


async def test_unchanged_file_is_run_once(tmp_path: Path) -> None:
    file = shim_zip(tmp_path / "x", script="echo dstack-shim version 0.22.5.post1; exit")
    runs = CountedRuns()
    reader = ProgramReader(SHIM, runs)
    expected = ProgramFile("0.22.5.post1", ("persisted-state", "something-newer"))

    readings = await asyncio.gather(*(reader.read(file) for _ in range(5)))

    assert readings == [expected] * 5
    assert runs.count == 1


async def test_replaced_file_is_read_again_even_with_its_old_times(tmp_path: Path) -> None:
    file = program(tmp_path / "x", "echo dstack-runner version 1")
    reader = ProgramReader("dstack-runner", run)
    assert await reader.read(file) == ProgramFile("1")
    times = file.stat()

    program(tmp_path / "y", "echo dstack-runner version 2").rename(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert await reader.read(file) == ProgramFile("2")


async def test_missing_file_is_none_and_found_when_it_comes(tmp_path: Path) -> None:
    reader = ProgramReader("dstack-runner", run)
    assert await reader.read(tmp_path / "x") is None

    program(tmp_path / "x", "echo dstack-runner version 1")

    assert await reader.read(tmp_path / "x") == ProgramFile("1")


async def test_file_that_fails_is_run_again_only_after_a_while(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.touch()
    now = [0.0]
    commands = FakeCommands(
        {str(file): [CommandTimedOut("slow"), Finished(0, "dstack-runner version 1")]}
    )
    reader = ProgramReader("dstack-runner", commands, monotonic=lambda: now[0])

    first = await reader.read(file)
    assert first is not None
    assert (first.version, first.problem) == ("", "dstack-runner: slow")
    assert await reader.read(file) == first
    now[0] += installed._REMEMBER_FAILURE
    assert await reader.read(file) == ProgramFile("1")
    assert len(commands.asked) == 2


async def test_file_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("first")
    answers = ["1", "2"]

    async def replace_meanwhile(*_: object, **__: object) -> Finished:
        if len(answers) == 2:
            (tmp_path / "y").write_text("second")
            (tmp_path / "y").rename(file)
        return Finished(0, f"dstack-runner version {answers.pop(0)}")

    assert await ProgramReader("dstack-runner", replace_meanwhile).read(file) == ProgramFile("2")


async def test_file_that_keeps_changing_is_a_problem_not_a_loop(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("")

    async def grow(*_: object, **__: object) -> Finished:
        with file.open("a") as growing:
            growing.write("more")
        return Finished(0, "dstack-runner version 1")

    reading = await ProgramReader("dstack-runner", grow).read(file)

    assert reading is not None
    assert "keeps changing" in reading.problem


def test_identity_of_a_missing_file_is_none(tmp_path: Path) -> None:
    assert FileIdentity.of(tmp_path / "none") is None
