"""No instant at which a crash or a power cut empties or half-writes an ``authorized_keys``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstack_shim.resources.authorized_keys import update
from dstack_shim.resources.ssh_keys import merge, parse_key
from tests.shim.resources import killed_writer
from tests.shim.resources.stage import key, me

OLD = "ssh-rsa AAAA theirs\r\n# last line"
NEW = parse_key(key(1, "one")).line.decode() + "\n"


@pytest.mark.parametrize("old", ["-", OLD], ids=["no file", "a file of theirs"])
def test_killed_at_any_call_the_file_is_the_old_or_the_new_one(tmp_path: Path, old: str) -> None:
    argv = [sys.executable, killed_writer.__file__, str(tmp_path), old, key(1, "one")]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=100)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    new = NEW if old == "-" else f"{OLD}\n{NEW}"
    for row in rows:
        left = row["left"].get("authorized_keys")
        assert left in {None if old == "-" else OLD, new}, row
        assert len(row["left"]) <= 2, row
        assert row["then"] == {"authorized_keys": new}, row
    killed = [row for row in rows if row["killed"]]
    assert {row["call"] for row in killed} >= {"open", "write", "fsync", "rename", "close"}
    assert len(killed) == len(rows) - 2
    assert any("authorized_keys" in row["left"] for row in killed)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted ext4 image ``disk.img`` beside its mount point."""
    image, point = tmp_path / "disk.img", tmp_path / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, timeout=60)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True, timeout=60)
    yield point
    subprocess.run(["umount", str(point)], check=True, timeout=60)


def after_power_cut(disk: Path) -> bytes:
    """What a host finds whose power was cut now: the image as it is, without what only memory has."""
    copy, point = disk.with_name("copy.img"), disk.with_name("copy")
    shutil.copyfile(disk.with_name("disk.img"), copy)
    point.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(copy), str(point)], check=True, timeout=60)
    try:
        return (point / "home" / ".ssh" / "authorized_keys").read_bytes()
    finally:
        subprocess.run(["umount", str(point)], check=True, timeout=60)


@pytest.mark.sandbox
def test_a_change_that_was_reported_survives_a_power_cut(disk: Path) -> None:
    home = disk / "home"
    home.mkdir()
    one, two = parse_key(key(1, "one")), parse_key(key(2))
    for wanted in ([one], [one, two], [two], []):
        content = update(me(home), lambda old, keys=wanted: merge(old, keys)).content  # type: ignore[misc]  # the default binds the loop's value
        assert after_power_cut(disk) == content
