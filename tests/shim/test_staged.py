"""A file written beside its destination: gone unless placed, and told from a crash's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dstack_shim import staged
from dstack_shim.staged import StagedFile, file_digest, sweep


def test_file_that_is_not_placed_is_gone(tmp_path: Path) -> None:
    with StagedFile(tmp_path / "tool") as new:
        assert new.path.parent == tmp_path
        assert new.path.name.startswith(".tool.")
        assert new.path.exists()

    assert list(tmp_path.iterdir()) == []


def test_file_is_gone_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), StagedFile(tmp_path / "tool"):
        raise RuntimeError

    assert list(tmp_path.iterdir()) == []


def test_placed_file_replaces_what_had_the_name_and_leaves_it_to_those_who_have_it_open(
    tmp_path: Path,
) -> None:
    tool = tmp_path / "tool"
    tool.write_text("old")
    with tool.open() as running, StagedFile(tool) as new:
        new.path.write_text("new")
        new.place()
        assert running.read() == "old"

    assert tool.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["tool"]


def test_directory_is_flushed_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []

    def flush(directory: Path) -> None:
        assert (tmp_path / "tool").exists()
        flushed.append(directory)

    monkeypatch.setattr(staged, "flush_directory", flush)

    with StagedFile(tmp_path / "tool") as new:
        new.place()

    assert flushed == [tmp_path]


def test_staged_file_can_be_executed_while_it_is_locked(tmp_path: Path) -> None:
    with StagedFile(tmp_path / "tool") as new:
        new.path.write_text("#!/bin/sh\necho ran\n")
        new.path.chmod(0o755)
        assert subprocess.check_output([str(new.path)], timeout=20) == b"ran\n"


def test_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), StagedFile(tmp_path / "none/tool"):
        pass


def test_sweep_removes_what_a_crash_left_but_nothing_that_is_being_written(
    tmp_path: Path,
) -> None:
    tool = tmp_path / "tool"
    script = (
        "import sys, pathlib, dstack_shim.staged as s\n"
        "with s.StagedFile(pathlib.Path(sys.argv[1])):\n"
        "    print('ready', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tool)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with StagedFile(tool) as new:
            (tmp_path / ".other.0123456789abcdef.new").touch()
            left = [path for path in tmp_path.iterdir() if path.name.startswith(".tool.")]
            assert len(left) == 2
            assert sweep(tool) == []
            process.send_signal(signal.SIGKILL)
            process.wait(20)

            assert sweep(tool) == [path for path in left if path != new.path]
            assert new.path.exists()

    assert [path.name for path in tmp_path.iterdir()] == [".other.0123456789abcdef.new"]


def test_sweep_follows_no_link_and_forgives_a_missing_directory(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    link = tmp_path / ".tool.0.new"
    link.symlink_to(victim)

    assert sweep(tmp_path / "tool") == []
    assert sweep(tmp_path / "none/tool") == []
    assert victim.exists()


def test_sweep_takes_the_name_literally(tmp_path: Path) -> None:
    (tmp_path / ".tool.1.new").touch()

    assert sweep(tmp_path / "t*l") == []


def test_digest_is_of_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")

    assert file_digest(file) == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
