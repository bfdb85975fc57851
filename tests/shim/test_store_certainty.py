"""What a scan of the store returns is certain to outlive a power cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.record import TaskRecord

from dstack_shim.log import event_log
from dstack_shim.records import RecordKind
from dstack_shim.store import Store

RECORD = TaskRecord("t1", TaskConfig(id="t1", name="job"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path, event_log())
    made.open()
    made.create("job-1", RECORD)
    return made


def test_a_scan_flushes_what_a_crash_may_have_left_unflushed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    fsync = os.fsync

    def flush(fd: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{fd}").resolve())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", flush)
    assert store.scan()[0].record == RECORD
    directory = store.path("job-1")
    assert flushed == [directory / "task.json", directory, directory.parent]


def test_a_flush_that_fails_costs_no_task_its_record(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    (found,) = store.scan()
    assert (found.kind, found.record) == (RecordKind.GOOD, RECORD)
