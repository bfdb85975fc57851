from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.errors import CommandTimedOut, ResourceError
from dstack_shim.host.commands import Finished
from dstack_shim.resources import filesystem
from dstack_shim.resources.devices import Device
from dstack_shim.resources.filesystem import FileSystems, complaint, judge, why_not_blank
from tests.shim.host.fake_commands import Answer, FakeCommands
from tests.shim.resources.stage import Clock

DISK = Device("/dev/sdf", (8, 80))
SILENT = Finished(2)
EXT4 = Finished(0, "ext4\n")


@given(st.integers(-64, 255), st.text(max_size=5), st.text(max_size=5))
def test_only_silence_with_exit_code_two_is_blank(code: int, out: str, err: str) -> None:
    assert judge(Finished(code, out, err)).blank == ((code, out, err) == (2, "", ""))


@pytest.mark.parametrize(
    ("answer", "words", "mountable"),
    [
        (Finished(0, "ext4\n"), "has a file system of type 'ext4'", True),
        (Finished(0, "xfs\n"), "has a file system of type 'xfs'", True),
        (Finished(0, ""), "has no file system but is not blank (a partition table?)", False),
        (Finished(2, "\n"), "could not be examined (blkid exited with 2", True),
        (Finished(2, "", "blkid: error"), "could not be examined (blkid exited with 2", True),
        (Finished(8, "", "ambivalent result"), "(blkid exited with 8: ambivalent result)", True),
        (Finished(4, "", "usage"), "(blkid exited with 4: usage)", True),
        (Finished(-9), "(blkid killed by SIGKILL)", True),
        (Finished(0, " \n"), "could not be examined", True),
    ],
)
def test_every_other_answer_is_not_blank(answer: Finished, words: str, mountable: bool) -> None:
    verdict = judge(answer)
    assert not verdict.blank
    assert words in verdict.words
    assert verdict.mountable is mountable


class Lab:
    def __init__(self, *answers: Answer, readable: str = "", mkfs: Answer = EXT4) -> None:
        self.clock = Clock()
        programs: dict[str, Any] = {"mkfs.ext4": mkfs}
        if answers:
            programs["blkid"] = list(answers)
        self.commands = FakeCommands(programs)
        self.readable = readable
        self.file_systems = FileSystems(self.commands, self.blocking, sleep=self.clock.sleep)

    async def blocking(self, call: Callable[..., Any], /, *args: object) -> Any:
        assert call is filesystem.why_not_blank
        assert args == (DISK.path,)
        return self.readable


async def test_a_blank_verdict_is_confirmed_by_three_more_probes_a_second_apart() -> None:
    lab = Lab(SILENT)
    assert (await lab.file_systems.examine(DISK)).blank
    assert lab.commands.asked == [("blkid", "-p", "-o", "value", "-s", "TYPE", "/dev/sdf")] * 4
    assert lab.clock.time == 3.0


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("other", [EXT4, Finished(8), CommandTimedOut("too long"), Finished(0)])
async def test_one_other_answer_among_the_four_is_enough_against_blank(
    at: int, other: Answer
) -> None:
    lab = Lab(*[SILENT] * at, other, SILENT)
    assert not (await lab.file_systems.examine(DISK)).blank
    assert len(lab.commands.asked) == at + 1


async def test_a_disk_with_a_file_system_needs_no_confirmation() -> None:
    lab = Lab(EXT4)
    assert not (await lab.file_systems.examine(DISK)).blank
    assert lab.clock.time == 0


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([], "blkid cannot be run"),
        ([CommandTimedOut("blkid took longer than 30 s")], "took longer"),
        ([Finished(-9)], "killed by SIGKILL"),
    ],
    ids=["missing", "timeout", "killed"],
)
async def test_without_an_answer_of_blkid_nothing_is_blank(
    answers: list[Answer], words: str
) -> None:
    verdict = await Lab(*answers).file_systems.examine(DISK)
    assert not verdict.blank
    assert words in verdict.words


async def test_silence_about_a_disk_that_cannot_be_read_is_not_blank() -> None:
    with pytest.raises(ResourceError, match=r"/dev/sdf looks blank but is in use; it is not form"):
        await Lab(SILENT, readable="is in use").file_systems.examine(DISK)


async def test_formatting_runs_mkfs_on_the_device_and_nothing_else() -> None:
    lab = Lab()
    await lab.file_systems.format(DISK)
    assert lab.commands.asked == [("mkfs.ext4", "-F", "/dev/sdf")]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            Finished(1, "", "mke2fs 1.47.0\n/dev/sdf is mounted;\nno!\n"),
            "/dev/sdf is mounted; no!",
        ),
        (CommandTimedOut("mkfs.ext4 took longer than 600 s"), "longer than 600 s"),
    ],
)
async def test_a_failure_of_mkfs_is_told_in_its_own_words(answer: Answer, words: str) -> None:
    with pytest.raises(ResourceError, match=rf"/dev/sdf cannot be formatted: .*{words}"):
        await Lab(mkfs=answer).file_systems.format(DISK)


def test_a_file_that_is_read_to_both_ends_speaks_not_against_blank(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(3 << 20))
    assert why_not_blank(str(disk)) == ""
    disk.write_bytes(bytes(100))
    assert why_not_blank(str(disk)) == ""
    disk.write_bytes(b"")
    assert why_not_blank(str(disk)) == "cannot be read to its end"
    assert "No such file" in why_not_blank(str(tmp_path / "gone"))


def test_a_disk_that_gives_less_than_its_size_is_not_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").write_bytes(bytes(100))
    monkeypatch.setattr(os, "pread", lambda *_: b"short")
    assert why_not_blank(str(tmp_path / "disk")) == "cannot be read to its end"


def test_a_complaint_has_all_that_was_said_on_one_line() -> None:
    said = "mount: /mnt: wrong fs type.\n       dmesg(1) may have more.\n"
    assert complaint(Finished(32, "", said)) == (
        "exited with 32: mount: /mnt: wrong fs type. dmesg(1) may have more."
    )
    assert complaint(Finished(1, "on stdout")) == "exited with 1: on stdout"
    assert complaint(Finished(-9)) == "killed by SIGKILL"
