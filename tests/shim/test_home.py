"""One shim a home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dstack_shim.errors import HomeLocked, StartupError
from dstack_shim.home import LOCK, check_home, lock_home


def test_a_second_shim_is_told_who_runs_there(tmp_path: Path) -> None:
    first = lock_home(tmp_path)
    with pytest.raises(HomeLocked, match=f"pid {os.getpid()}"):
        lock_home(tmp_path)
    os.close(first)
    os.close(lock_home(tmp_path))


def test_a_copy_of_the_descriptor_keeps_the_lock(tmp_path: Path) -> None:
    first = lock_home(tmp_path)
    heir = os.dup(first)
    os.close(first)
    with pytest.raises(HomeLocked):
        lock_home(tmp_path)
    os.close(heir)


def test_the_lock_follows_no_symlink(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="cannot open"):
        lock_home(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_home_that_is_missing_is_named_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="nowhere is not a directory"):
        check_home(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
