from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.resources.mounts import Mount, parse_mountinfo, unfinished
from tests.eventually import eventually

# The example of proc(5), and what a kernel wrote here.
GOOD = rb"""36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
64 43 7:0 / /tmp/m rw,relatime - ext4 /dev/loop0 rw
65 43 259:1 / /mnt/with\040space\011tab\012line\134slash rw shared:1 master:2 - ext4 /dev/x\040y rw
66 43 0:44 / /mnt/b rw unbindable - btrfs /dev/sdb rw,subvol=/
"""


def test_every_mount_is_read_with_its_escapes() -> None:
    assert parse_mountinfo(GOOD) == (
        Mount("/mnt2", "/dev/root", (98, 0)),
        Mount("/tmp/m", "/dev/loop0", (7, 0)),
        Mount("/mnt/with space\ttab\nline\\slash", "/dev/x y", (259, 1)),
        Mount("/mnt/b", "/dev/sdb", (0, 44)),
    )


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"36 35 98:0 /mnt1 /mnt2 rw,noatime",
        b"36 35 98:0 /mnt1 /mnt2 rw,noatime -",
        b"36 35 98:0 /mnt1 /mnt2 rw,noatime - ext4",
        b"36 35 98 /mnt1 /mnt2 rw,noatime - ext4 /dev/x rw",
        b"36 35 a:b /mnt1 /mnt2 rw,noatime - ext4 /dev/x rw",
        b"36 35 1:2:3 /mnt1 /mnt2 rw,noatime - ext4 /dev/x rw",
    ],
)
def test_a_line_that_is_not_understood_costs_no_other(line: bytes) -> None:
    assert parse_mountinfo(line + b"\n" + GOOD) == parse_mountinfo(GOOD)


def test_a_directory_named_like_the_separator_is_read() -> None:
    assert parse_mountinfo(b"1 2 3:4 / - rw - ext4 /dev/x rw") == (Mount("-", "/dev/x", (3, 4)),)


@given(st.binary())
def test_no_content_is_ever_an_error(content: bytes) -> None:
    parse_mountinfo(content)


def escaped(text: str) -> bytes:
    special = b" \t\n\\"
    return b"".join(
        b"\\%03o" % byte if byte in special else bytes([byte]) for byte in os.fsencode(text)
    )


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_any_name_survives_the_kernels_escapes(name: str) -> None:
    line = b"1 2 3:4 / " + escaped(name) + b" rw - ext4 " + escaped(name) + b" rw"
    assert parse_mountinfo(line) == (Mount(name, name, (3, 4)),)


def process(proc: Path, number: int | str, *argv: str) -> None:
    (proc / str(number)).mkdir()
    (proc / str(number) / "cmdline").write_bytes(b"".join(os.fsencode(a) + b"\0" for a in argv))


def test_commands_left_by_a_killed_shim_are_found_by_their_mount_point(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "volumes"
    proc.mkdir()
    process(proc, 10, "mount", "/dev/x", f"{root}/data")
    process(proc, 11, "/usr/bin/umount", "-qf", f"{root}/data")
    process(proc, 12, "mount", "/dev/x", f"{root}-other/data")
    process(proc, 13, "vi", f"{root}/data/file")
    process(proc, 14)
    process(proc, "self", "mount", "/dev/x", f"{root}/data")
    (proc / "15").mkdir()  # ended between two looks
    assert sorted(unfinished(str(root), str(proc))) == [10, 11]
    assert unfinished(str(root)) == ()


def test_a_command_that_still_runs_is_seen_until_it_ends(tmp_path: Path) -> None:
    """A process that calls itself mount and waits for somebody to write into its mount point."""
    gate = tmp_path / "data"
    os.mkfifo(gate)
    command = subprocess.Popen(["mount", gate], executable=shutil.which("cat"))
    try:
        eventually(lambda: unfinished(str(tmp_path)) == (command.pid,))
        gate.write_bytes(b"")
    finally:
        command.wait(10)
    assert unfinished(str(tmp_path)) == ()
