"""The boots in which a shim was started are remembered, each once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dstack_shim.boots import FILE_NAME, KEPT, note_boot
from dstack_shim.log import event_log
from dstack_shim.tasks.outcomes import Boot

FIRST, SECOND, THIRD = Boot("a", 1.0), Boot("b", 2.0), Boot("c", 3.0)


def note(home: Path, boot: Boot) -> tuple[Boot, ...]:
    return note_boot(home, boot, event_log()).earlier


def test_each_boot_is_noted_once_and_told_to_those_after_it(tmp_path: Path) -> None:
    assert note(tmp_path, FIRST) == ()
    for _ in range(2):
        assert note(tmp_path, SECOND) == (FIRST,)
    assert note(tmp_path, THIRD) == (FIRST, SECOND)
    assert [item["id"] for item in json.loads((tmp_path / FILE_NAME).read_bytes())] == [*"abc"]


def test_a_boot_seen_before_is_not_written_again(tmp_path: Path) -> None:
    note(tmp_path, FIRST)
    before = (tmp_path / FILE_NAME).stat()
    note(tmp_path, FIRST)
    assert (tmp_path / FILE_NAME).stat() == before


def test_a_boot_without_an_id_is_not_noted(tmp_path: Path) -> None:
    note(tmp_path, FIRST)
    assert note(tmp_path, Boot(None, 5.0)) == (FIRST,)
    assert note(tmp_path, SECOND) == (FIRST,)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}{", b"[1]", b'[{"id": "a"}]', b"null", b"1", b"\xff", b"[" * 60_000]
)
def test_what_cannot_be_read_is_told_and_begun_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert note(tmp_path, FIRST) == ()
    assert note(tmp_path, SECOND) == (FIRST,)


def test_a_disk_that_is_full_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(tmp_path, FIRST)

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        assert note(tmp_path, SECOND) == (FIRST,)
    assert note(tmp_path, THIRD) == (FIRST,)


def test_what_a_crash_left_half_written_is_swept(tmp_path: Path) -> None:
    (tmp_path / f".{FILE_NAME}.0123456789abcdef.new").write_text("[")
    note(tmp_path, FIRST)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    for number in range(KEPT + 5):
        note(tmp_path, Boot(f"b{number}", float(number)))
    noted = [item["id"] for item in json.loads((tmp_path / FILE_NAME).read_bytes())]
    assert noted == [f"b{number}" for number in range(4, KEPT + 5)]
