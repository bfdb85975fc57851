"""The disk in memory does what the real store does, and a power cut takes what may be taken."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import attrs
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.record import TaskRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from dstack_shim.errors import StoreError
from dstack_shim.log import event_log
from dstack_shim.records import RecordKind, Records
from dstack_shim.store import Store
from tests.simulation.disk import Disk, MemoryRecords

DIRS = ("job-1", "job-2")
CALL = st.tuples(
    st.sampled_from(("create", "write", "forget", "discard_output", "set_aside")),
    st.sampled_from(DIRS),
    st.sampled_from(("", "terminated_by_user")),
)


def record(dir: str, reason: str = "") -> TaskRecord:
    return TaskRecord(f"t-{dir}", TaskConfig(id=f"t-{dir}", name="job"), termination_reason=reason)


def made(records: Records, call: str, dir: str, reason: str) -> str:
    """Make a call; the kind of its error, if any."""
    arguments = (record(dir, reason),) if call in ("create", "write") else ()
    try:
        getattr(records, call)(dir, *arguments)
    except StoreError:
        return "StoreError"
    return ""


@settings(max_examples=60, deadline=None)
@given(st.lists(CALL, max_size=12))
def test_any_calls_leave_in_memory_what_they_leave_on_a_disk(
    calls: list[tuple[str, str, str]],
) -> None:
    memory = MemoryRecords(Disk())
    with tempfile.TemporaryDirectory() as home:
        store = Store(Path(home), event_log())
        store.open()
        for call in calls:
            assert made(memory, *call) == made(store, *call)
            found = [(item.name, item.kind, item.record) for item in store.scan()]
            assert found == [(item.name, item.kind, item.record) for item in memory.scan()]


def test_what_was_not_flushed_may_be_lost_and_what_was_is_not() -> None:
    seen = set()
    for seed in range(40):
        disk = Disk()
        records = MemoryRecords(disk)
        records.create("job-1", record("job-1"))
        change = records.writing("job-1", record("job-1", "late"))
        change.visible()
        disk.cut_power(random.Random(seed))
        content = disk.visible["job-1"]
        assert content.record is not None
        seen.add(content.record.termination_reason)
        assert disk.possible("job-1") == [content]
    assert seen == {"", "late"}


def test_a_scan_makes_certain_what_it_reads() -> None:
    disk = Disk()
    records = MemoryRecords(disk)
    records.creating("job-1", record("job-1")).visible()
    assert None in disk.possible("job-1")
    assert [item.kind for item in records.scan()] == [RecordKind.GOOD]
    assert None not in disk.possible("job-1")


def test_by_hand_and_by_bytes_a_record_comes_back_the_same() -> None:
    for reason in ("", "terminated_by_user"):
        one = attrs.evolve(record("job-1", reason), terminated=False)
        found = []
        for as_bytes in (False, True):
            records = MemoryRecords(Disk(), as_bytes=as_bytes)
            records.create("job-1", one)
            found.append(records.scan()[0].record)
        assert found[0] == found[1]
