from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstack_shim.errors import ResourceError
from dstack_shim.resources.instance_mounts import InstanceMounts, make_source
from tests.shim.resources.stage import at_once, others, wish


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077], autouse=True)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_a_missing_directory_is_made_for_everybody_its_parents_for_root(tmp_path: Path) -> None:
    make_source(f"{tmp_path}//a/./b/c/")
    assert mode(tmp_path / "a" / "b" / "c") == 0o777
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o755, 0o755)


def test_what_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory").chmod(0o700)
    (tmp_path / "file").write_bytes(b"theirs")
    for name in ("directory", "file"):
        make_source(str(tmp_path / name))
    make_source("/")
    assert mode(tmp_path / "directory") == 0o700
    assert (tmp_path / "file").read_bytes() == b"theirs"


def test_symlinks_are_followed_where_they_lead_somewhere(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    make_source(str(tmp_path / "data"))
    make_source(str(tmp_path / "data" / "new"))
    assert mode(tmp_path / "disk" / "new") == 0o777


@pytest.mark.parametrize(
    "below", ["nowhere", "nowhere/a", "file/a", "loop", "a\ud800b", "n" * 300]
)
def test_what_cannot_be_made_is_an_error_with_its_path(tmp_path: Path, below: str) -> None:
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ResourceError, match=r"instance_path: .* cannot be made: "):
        make_source(f"{tmp_path}/{below}")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "loop", "nowhere"]


@pytest.mark.parametrize("path", ["", "relative", "./a", "~/a", "/a/../b", "/..", "/a\0b"])
def test_only_absolute_plain_paths_are_taken(path: str) -> None:
    with pytest.raises(ResourceError, match=r"expected an absolute path without"):
        make_source(path)


def test_a_directory_another_task_makes_at_the_same_instant_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.mkdir

    def lose_the_race(name: str, mode: int, *, dir_fd: int) -> None:
        really(name, 0o750, dir_fd=dir_fd)
        really(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", lose_the_race)
    make_source(str(tmp_path / "a"))
    assert mode(tmp_path / "a") & 0o077 in {0o050, 0}


async def test_each_source_of_a_task_is_seen_to_and_none_is_ever_removed(tmp_path: Path) -> None:
    mounts = InstanceMounts(at_once)
    task = wish("t1", paths=[f"{tmp_path}/a", f"{tmp_path}/b"])
    await mounts.acquire(task, others())
    await mounts.release(task, others())
    await mounts.release(task, others())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b"]
