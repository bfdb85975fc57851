"""What a scan of the store returns is certain to outlive a power cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.record import TaskRecord

from dstack_shim.errors import StoreError
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


@pytest.mark.parametrize("nth", [1, 2])
def test_a_task_that_could_not_be_made_durable_in_an_old_directory_leaves_that_as_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    directory = store.path("job-2")
    (directory / "logs").mkdir(parents=True)
    left = nth
    fsync = os.fsync

    def refuse(fd: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(28, "No space left on device")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StoreError, match="No space left"):
            store.create("job-2", RECORD)
    assert not (directory / "task.json").exists()
    assert not (directory / "task.json.tmp").exists()
    assert (directory / "logs").exists()
    store.create("job-2", RECORD)
    assert store.scan()[1].record == RECORD


def test_a_record_that_nobody_could_use_is_not_written_over_by_a_new_task(store: Store) -> None:
    newer = store.path("job-1") / "task.json"
    newer.write_bytes(newer.read_bytes().replace(b'"min_reader":1', b'"min_reader":9'))
    before = newer.read_bytes()
    with pytest.raises(StoreError, match="a record that this shim cannot use is there"):
        store.create("job-1", RECORD)
    assert newer.read_bytes() == before
