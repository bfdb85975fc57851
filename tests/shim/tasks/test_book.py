"""The book by itself: changes under lock, or not at all."""

from __future__ import annotations

import asyncio
from functools import partial

import attrs
import pytest
from dstack_shim_contracts.record import TaskRecord
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.cancelling import to_its_end
from dstack_shim.errors import IllegalTransition, TaskExists, TaskNotFound
from dstack_shim.tasks.book import Book
from dstack_shim.tasks.task import Task, asked_to_end, ended, found, new_task
from tests.shim.tasks.stage import config
from tests.simulation.disk import Disk, MemoryRecords
from tests.simulation.log import SimLog


async def at_once(call: object, /, *args: object) -> object:
    return call(*args)  # type: ignore[operator]  # a blocking call, made here and now


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def book(disk: Disk) -> Book:
    return Book(MemoryRecords(disk), at_once, SimLog(None, pytest.fail))  # type: ignore[arg-type]  # generic by hand


def task(task_id: str = "t1") -> Task:
    return new_task(config(task_id), "job-1", boot_id=None, now=0.0, written_by="us")


def to(status: TaskStatus) -> object:
    return lambda old: attrs.evolve(old, status=status)


async def test_an_id_is_in_it_once(book: Book) -> None:
    book.add(task())
    with pytest.raises(TaskExists):
        book.add(task())
    assert len(book) == 1


async def test_a_change_backwards_is_discarded_whole(book: Book, disk: Disk) -> None:
    entry = book.add(attrs.evolve(task(), status=TaskStatus.RUNNING))
    MemoryRecords(disk).create("job-1", entry.task.record)

    def back(old: Task) -> Task:
        record = attrs.evolve(old.record, termination_reason="wrong")
        return attrs.evolve(old, status=TaskStatus.PULLING, record=record)

    with pytest.raises(IllegalTransition, match="running"):
        await book.change(entry, back)
    assert entry.task.status is TaskStatus.RUNNING
    assert entry.task.record.termination_reason == ""
    content = disk.visible["job-1"]
    assert content.record == entry.task.record


async def test_a_change_that_raises_changes_nothing(book: Book) -> None:
    entry = book.add(task())
    before = entry.task

    def broken(old: Task) -> Task:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await book.change(entry, broken)
    assert entry.task is before
    assert not entry.lock.locked()


async def test_a_task_that_left_it_can_neither_be_changed_nor_leave_again(
    book: Book, disk: Disk
) -> None:
    entry = book.add(task())
    await book.forget(entry)
    book.add(task())
    with pytest.raises(TaskNotFound):
        await book.change(entry, lambda old: old)
    with pytest.raises(TaskNotFound):
        await book.forget(entry)
    assert "t1" in book


async def test_a_change_of_what_no_record_holds_writes_nothing(book: Book, disk: Disk) -> None:
    entry = book.add(task())  # there is no directory: a write would fail
    await book.change(entry, lambda old: attrs.evolve(old, container_id="c1"))
    assert entry.task.container_id == "c1"
    assert disk.visible == {}


async def test_a_removal_is_remembered_until_no_list_can_be_older(book: Book) -> None:
    before = book.sequence
    entry = book.add(task())
    await book.forget(entry)
    assert book.removed_since("t1", before)
    assert not book.removed_since("t1", book.sequence)
    book.forget_removals(before)
    assert book.removed_since("t1", before)
    book.forget_removals(book.sequence)
    assert not book.removed_since("t1", before)


async def test_changes_of_one_task_come_one_after_the_other(book: Book, disk: Disk) -> None:
    entry = book.add(task())
    MemoryRecords(disk).create("job-1", entry.task.record)

    def count(old: Task) -> Task:
        gpus = (*(old.record.gpus or ()), "x")
        return attrs.evolve(old, record=attrs.evolve(old.record, gpus=gpus))

    await asyncio.gather(*(book.change(entry, count) for _ in range(20)))
    assert len(entry.task.record.gpus or ()) == 20
    record = disk.visible["job-1"].record
    assert isinstance(record, TaskRecord)
    assert len(record.gpus or ()) == 20


class Slow:
    """The way to a disk that takes its time; as in the daemon, a call is done to its end."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, call: object, /, *args: object) -> object:
        return await to_its_end(self._work(call, *args))

    async def _work(self, call: object, *args: object) -> object:
        self.reached.set()
        await self.go.wait()
        return call(*args)  # type: ignore[operator]  # a blocking call, made here and now


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def slow_book(disk: Disk, slow: Slow) -> Book:
    return Book(MemoryRecords(disk), slow, SimLog(None, pytest.fail))  # type: ignore[arg-type]  # generic by hand


async def test_a_change_that_is_on_disk_counts_even_if_who_made_it_was_cancelled(
    slow_book: Book, slow: Slow, disk: Disk
) -> None:
    """The background step is stopped while it writes an end; a terminate comes right behind."""
    entry = slow_book.add(task())
    MemoryRecords(disk).create("job-1", entry.task.record)
    ending = partial(ended, reason="done_by_runner", message="", now=1.0)
    step = asyncio.ensure_future(slow_book.change(entry, ending))
    await slow.reached.wait()
    step.cancel()
    asked = partial(asked_to_end, reason="terminated_by_user", message="", stop_by=2.0)
    terminate = asyncio.ensure_future(slow_book.change(entry, asked, insist=True))
    slow.go.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert (await terminate).record.termination_reason == "done_by_runner"
    assert disk.visible["job-1"].record == entry.task.record


async def test_a_change_that_is_cancelled_while_it_waits_for_its_turn_never_happens(
    slow_book: Book, disk: Disk
) -> None:
    entry = slow_book.add(task())
    async with entry.lock:
        change = asyncio.ensure_future(slow_book.change(entry, partial(found, container_id="c")))
        await asyncio.sleep(0)
        change.cancel()
        with pytest.raises(asyncio.CancelledError):
            await change
    assert entry.task.container_id == ""


async def test_a_task_whose_directory_is_gone_is_gone_even_if_who_removed_it_was_cancelled(
    slow_book: Book, slow: Slow, disk: Disk
) -> None:
    entry = slow_book.add(task())
    MemoryRecords(disk).create("job-1", entry.task.record)
    removal = asyncio.ensure_future(slow_book.forget(entry))
    await slow.reached.wait()
    removal.cancel()
    slow.go.set()
    with pytest.raises(asyncio.CancelledError):
        await removal
    assert "t1" not in slow_book
    assert disk.visible == {}
