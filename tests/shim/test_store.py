"""The durable records on a real file system."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.record import (
    MAX_RECORD_BYTES,
    TaskRecord,
    read_record,
    write_record,
)

from dstack_shim.errors import StoreError
from dstack_shim.log import event_log
from dstack_shim.records import RecordKind
from dstack_shim.store import Store

RECORD = TaskRecord("t1", TaskConfig(id="t1", name="job"))
DIR = "job-1"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def store(home: Path) -> Store:
    store = Store(home, event_log())
    store.open()
    return store


def files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home / "runners")) for path in home.glob("runners/**/*"))


def test_a_new_task_has_its_record_and_its_runner_directory(store: Store, home: Path) -> None:
    store.create(DIR, RECORD)
    assert files(home) == [DIR, f"{DIR}/runner", f"{DIR}/task.json"]
    assert stat.S_IMODE((home / "runners" / DIR).stat().st_mode) == 0o700
    assert stat.S_IMODE(store.runner_dir(DIR).stat().st_mode) == 0o755
    assert stat.S_IMODE((home / "runners" / DIR / "task.json").stat().st_mode) == 0o600
    (found,) = store.scan()
    assert (found.name, found.kind, found.record) == (DIR, RecordKind.GOOD, RECORD)


def test_a_written_record_replaces_the_old_one(store: Store) -> None:
    store.create(DIR, RECORD)
    changed = attrs.evolve(RECORD, termination_reason="x", terminated=True)
    store.write(DIR, changed)
    assert store.scan()[0].record == changed


def test_a_leftover_temporary_file_is_no_hindrance(store: Store) -> None:
    store.create(DIR, RECORD)
    (store.path(DIR) / "task.json.tmp").write_text("half a rec")
    store.write(DIR, RECORD)
    assert store.scan()[0].kind is RecordKind.GOOD


def test_a_directory_that_is_there_already_keeps_what_it_has(store: Store, home: Path) -> None:
    (home / "runners" / DIR / "logs").mkdir(parents=True)
    store.create(DIR, RECORD)
    assert files(home) == [DIR, f"{DIR}/logs", f"{DIR}/runner", f"{DIR}/task.json"]


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("/etc")])
def test_a_name_taken_by_something_else_is_an_error_and_left_alone(
    store: Store, make: Callable[[Path], object]
) -> None:
    make(store.path(DIR))
    with pytest.raises(StoreError, match="not a directory"):
        store.create(DIR, RECORD)
    assert not (Path("/etc") / "task.json").exists()


def test_forgetting_takes_the_whole_directory_and_twice_is_fine(store: Store, home: Path) -> None:
    store.create(DIR, RECORD)
    (store.runner_dir(DIR) / "x").write_text("y")
    store.forget(DIR)
    store.forget(DIR)
    assert files(home) == []


def test_discarding_output_keeps_records_only(store: Store, home: Path) -> None:
    store.create(DIR, RECORD)
    with store.open_pull_log(DIR) as log:
        log.write(b"{}")
    (store.path(DIR) / ".task.json.damaged-1").touch()
    (store.path(DIR) / "link").symlink_to("/etc")
    store.discard_output(DIR)
    assert files(home) == [DIR, f"{DIR}/.task.json.damaged-1", f"{DIR}/task.json"]


def test_damage_is_set_aside_inside_its_own_directory_under_a_new_name_each_time(
    store: Store, home: Path
) -> None:
    store.create(DIR, RECORD)
    assert store.set_aside(DIR) == ".task.json.damaged-1"
    store.write(DIR, RECORD)
    assert store.set_aside(DIR) == ".task.json.damaged-2"
    assert files(home) == [
        DIR,
        f"{DIR}/.task.json.damaged-1",
        f"{DIR}/.task.json.damaged-2",
        f"{DIR}/runner",
    ]


def test_what_crashes_left_half_made_or_half_gone_is_swept_at_the_start(home: Path) -> None:
    for name in (".new-job-1-1", ".trash-job-2-2", ".kept", "job-3"):
        (home / "runners" / name).mkdir(parents=True)
    Store(home, event_log()).open()
    assert files(home) == [".kept", "job-3"]


def test_only_plain_directories_without_a_leading_dot_are_task_directories(
    store: Store, home: Path
) -> None:
    runners = home / "runners"
    (runners / ".hidden").mkdir()
    (runners / "file").touch()
    (runners / "link").symlink_to("/etc")
    (runners / "b").mkdir()
    (runners / "a").mkdir()
    assert [found.name for found in store.scan()] == ["a", "b"]


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


GOOD = write_record(RECORD)
DAMAGED: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(GOOD[:-20]),
    "trailing": lambda path: path.write_bytes(GOOD + b"x"),
    "list": lambda path: path.write_bytes(b"[]"),
    "null": lambda path: path.write_bytes(b"null"),
    "wrong type": lambda path: path.write_bytes(b'{"version":1,"id":7}'),
    "huge": lambda path: path.write_bytes(b" " * 10_000_000),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "directory": lambda path: path.mkdir(),
    "socket": _socket,
    "fifo": os.mkfifo,
    "symlink": lambda path: path.symlink_to("/etc/passwd"),
    "dangling symlink": lambda path: path.symlink_to("/nowhere"),
}


@pytest.mark.parametrize("make", DAMAGED.values(), ids=DAMAGED)
def test_what_is_no_record_is_damage_costs_no_neighbour_and_can_be_set_aside(
    store: Store, home: Path, make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("good-1", RECORD)
    (home / "runners" / "bad-1").mkdir()
    monkeypatch.chdir(home / "runners" / "bad-1")  # a socket's path is short
    make(Path("task.json"))
    bad, good = store.scan()
    assert (bad.kind, good.kind) == (RecordKind.DAMAGED, RecordKind.GOOD)
    assert bad.problem
    store.set_aside("bad-1")
    assert [found.kind for found in store.scan()] == [RecordKind.NONE, RecordKind.GOOD]


def test_a_record_of_a_newer_shim_is_unreadable_and_not_damage(store: Store) -> None:
    store.create(DIR, RECORD)
    newer = GOOD.replace(b'"min_reader":1', b'"min_reader":2')
    (store.path(DIR) / "task.json").write_bytes(newer)
    assert store.scan()[0].kind is RecordKind.UNREADABLE


def test_a_disk_that_refuses_to_read_is_not_taken_for_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create(DIR, RECORD)

    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "open", refuse)
    assert store.scan()[0].kind is RecordKind.UNREADABLE


def test_a_record_that_cannot_be_opened_is_not_taken_for_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create(DIR, RECORD)
    real = os.open

    def refuse(path: str, *args: Any, **kwargs: Any) -> int:
        if path == "task.json":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        (found,) = store.scan()
    assert (found.kind, found.problem) == (
        RecordKind.UNREADABLE,
        "[Errno 13] Permission denied",
    )
    assert store.scan()[0].record == RECORD


def test_a_directory_full_of_damage_is_an_error_and_keeps_it_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create(DIR, RECORD)
    monkeypatch.setattr(os, "stat", lambda *args, **kwargs: None)  # every name is taken
    with pytest.raises(StoreError, match="10,000 damaged records"):
        store.set_aside(DIR)
    monkeypatch.undo()
    assert store.scan()[0].record == RECORD


def test_what_cannot_be_deleted_is_told_and_left_for_the_next_start(
    store: Store, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create(DIR, RECORD)

    def refuse(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        store.forget(DIR)
    assert store.scan() == ()
    assert any(name.startswith(f".trash-{DIR}-") for name in files(home))
    Store(home, event_log()).open()
    assert files(home) == []


def test_a_record_too_large_to_be_read_back_is_not_written(store: Store) -> None:
    store.create(DIR, RECORD)
    with pytest.raises(StoreError, match=r"cannot write .*task.json: .*bytes"):
        store.write(DIR, attrs.evolve(RECORD, termination_message="x" * MAX_RECORD_BYTES))
    assert store.scan()[0].record == RECORD


class Refusing:
    """Makes one system call fail, the nth time it is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, nth: int) -> None:
        self._real = getattr(os, name)
        self._left = nth
        monkeypatch.setattr(os, name, self)
        if name == "mkdir":  # before Python 3.11, pathlib keeps the one it found when imported
            monkeypatch.setattr(Path, name, lambda path, mode=0o777: self(path, mode))

    def __call__(self, *args: object, **kwargs: object) -> object:
        self._left -= 1
        if self._left == 0:
            raise OSError(28, "No space left on device")
        return self._real(*args, **kwargs)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_record_that_could_not_be_replaced_is_the_old_one_and_the_error_says_why(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.create(DIR, RECORD)
    with monkeypatch.context() as patch:
        Refusing(patch, call, 1)
        with pytest.raises(StoreError, match="No space left"):
            store.write(DIR, attrs.evolve(RECORD, termination_reason="x", terminated=True))
    assert store.scan()[0].record == RECORD
    assert not (store.path(DIR) / "task.json.tmp").exists()


@pytest.mark.parametrize(("call", "nth"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("mkdir", 1)])
def test_a_task_that_could_not_be_made_durable_leaves_no_half_made_directory(
    store: Store, home: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    with monkeypatch.context() as patch:
        Refusing(patch, call, nth)
        with pytest.raises(StoreError):
            store.create(DIR, RECORD)
    assert files(home) == []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flushes and renames, in order, with what kind of thing was flushed."""
    made: list[str] = []
    fsync, rename = os.fsync, os.rename

    def flush(fd: int) -> None:
        made.append("flush dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "flush file")
        fsync(fd)

    def move(*args: object, **kwargs: object) -> None:
        made.append("rename")
        rename(*args, **kwargs)  # type: ignore[arg-type]  # handed on as it came

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    return made


def test_a_write_flushes_the_file_before_and_the_directory_after_the_rename(
    store: Store, calls: list[str]
) -> None:
    store.create(DIR, RECORD)
    calls.clear()
    store.write(DIR, RECORD)
    assert calls == ["flush file", "rename", "flush dir"]


def test_a_new_directory_is_flushed_before_and_after_it_takes_its_name(
    store: Store, calls: list[str]
) -> None:
    store.create(DIR, RECORD)
    assert calls[:3] == ["flush file", "rename", "flush dir"]
    assert calls[-1] == "flush dir"


def test_forgetting_is_flushed(store: Store, calls: list[str]) -> None:
    store.create(DIR, RECORD)
    calls.clear()
    store.forget(DIR)
    assert "flush dir" in calls


def test_an_error_names_path_and_reason(store: Store) -> None:
    with pytest.raises(StoreError, match=r"cannot write .*job-1/task.json: No such file"):
        store.write(DIR, RECORD)


def test_no_credential_reaches_the_disk(store: Store, home: Path) -> None:
    config = attrs.evolve(RECORD.config, registry_username="alice", registry_password="hunter2")
    store.create(DIR, attrs.evolve(RECORD, config=config))
    content = (home / "runners" / DIR / "task.json").read_bytes()
    assert b"hunter2" not in content
    assert b"alice" not in content
    assert read_record(content).config.registry_password == ""
