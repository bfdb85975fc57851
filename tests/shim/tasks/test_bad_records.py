"""Whatever lies where a record belongs costs its own task at most, is named, and is kept."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.doctor import Examination, Level, examine
from dstack_shim.settings import Settings
from tests.shim.host_in_memory import kept_ids
from tests.shim.tasks.stage import Stage, config, stage

Spoil = Callable[[Path], None]
"""Puts something bad in the place of the good record at this path."""


def _bytes(change: Callable[[bytes], bytes]) -> Spoil:
    return lambda path: void(path.write_bytes(change(path.read_bytes())))


def void(_: object) -> None:
    """A spoiler returns nothing."""


def _json(**changes: object) -> Spoil:
    return _bytes(lambda raw: json.dumps({**json.loads(raw), **changes}).encode())


def another_version(raw: bytes) -> dict[str, object]:
    """As a later release of dstack's own shim would write it: it knows no least reader."""
    return {**{k: v for k, v in json.loads(raw).items() if k != "min_reader"}, "version": 2}


def _in_its_place(make: Callable[[Path], None]) -> Spoil:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


def _directory(path: Path) -> None:
    path.mkdir()
    (path / "task.json").write_text("{}")


def _socket(path: Path) -> None:
    # By a short name: the path of a socket has its limit.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with closing(socket.socket(socket.AF_UNIX)) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _link_out_of_the_home(path: Path) -> None:
    outside = path.parents[3] / f"outside-{path.parents[2].name}"
    outside.write_text('{"version": 1, "id": "t1", "config": {"id": "t1"}}')
    path.symlink_to(outside)


DAMAGE: dict[str, Spoil] = {
    "zero bytes": _bytes(lambda raw: b""),
    "zeroes": _bytes(lambda raw: bytes(len(raw))),
    "cut after its first byte": _bytes(lambda raw: raw[:1]),
    "cut in the middle": _bytes(lambda raw: raw[: len(raw) // 2]),
    "cut before its last brace": _bytes(lambda raw: raw.rstrip()[:-1]),
    "JSON and more bytes": _bytes(lambda raw: raw + b"\0\0"),
    "two records": _bytes(lambda raw: raw * 2),
    "a list": _bytes(lambda raw: b"[" + raw + b"]"),
    "null": _bytes(lambda raw: b"null"),
    "no UTF-8": _bytes(lambda raw: raw.replace(b"job", b"\xff\xfe\xfd")),
    "an id of another type": _json(id=1),
    "a configuration of another type": _json(config=[]),
    "a flag of another type": _json(cleaned_up="no"),
    "GPUs of another type": _json(gpus="all"),
    "ten megabytes": _bytes(lambda raw: raw + b" " * 10_000_000),
    "deep nesting": _json(later=json.loads("[" * 500 + "]" * 500)),
    "another task's id": _json(id="t9"),
    "a directory": _in_its_place(_directory),
    "a socket": _in_its_place(_socket),
    "a FIFO": _in_its_place(os.mkfifo),
    "a symlink out of the home": _in_its_place(_link_out_of_the_home),
    "a symlink to nowhere": _in_its_place(lambda path: path.symlink_to("nowhere")),
}
UNREADABLE: dict[str, Spoil] = {
    "another version": _bytes(lambda raw: json.dumps(another_version(raw)).encode()),
    "a newer reader": _json(min_reader=9),
}


@pytest.fixture
def host(tmp_path: Path) -> Stage:
    home = tmp_path / "home"
    home.mkdir()
    return stage(home)


async def examined(host: Stage) -> Examination:
    return await examine(Settings(shim_home=str(host.home)), host.engine)


def named(seen: Examination) -> set[str]:
    return {finding.what for finding in seen.findings if finding.level is Level.WARNING}


def content(path: Path) -> object:
    """What tells whether it is the same thing still."""
    status = path.lstat()
    is_file = path.is_file() and not path.is_symlink()
    return status.st_ino, status.st_mode, path.read_bytes() if is_file else b""


async def spoilt(host: Stage, spoil: Spoil) -> Path:
    """Two tasks run, the record of the first is bad, the shim was killed."""
    for task_id in ("t1", "t2"):
        await host.run_task(config(task_id))
    host.kill()
    path = host.dir(config("t1")) / "task.json"
    spoil(path)
    host.log.clear()
    return path


async def goes_on(host: Stage) -> None:
    """The next shim knows both tasks by what is left, and the second as it was."""
    neighbour = host.record(config("t2"))
    host.begin()
    await host.restored()
    assert {item.id: item.status for item in host.core.list()} == {
        "t1": TaskStatus.RUNNING,
        "t2": TaskStatus.RUNNING,
    }
    assert host.record(config("t2")) == neighbour
    held = host.gpus.held()
    assert set(held) == {"t1", "t2"}
    assert not set(held["t1"]) & set(held["t2"])


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_set_aside_and_named_by_log_and_doctor(host: Stage, what: str) -> None:
    async def scene() -> None:
        path = await spoilt(host, DAMAGE[what])
        before = content(path)
        outside = sorted(host.home.parent.glob("outside-*"))
        seen = await examined(host)
        assert named(seen) == {f"record in {path.parent.name}"}
        assert set(kept_ids(seen)) == {"t1", "t2"}
        assert content(path) == before  # by the doctor nothing is changed
        await goes_on(host)
        (line,) = (line for line in host.log if line.startswith("record.damaged"))
        assert path.parent.name in line
        kept = path.with_name(".task.json.damaged-1")
        assert content(kept) == before
        assert f"record {path.parent.name}/{kept.name}" in named(await examined(host))
        await host.restart()
        assert content(kept) == before
        await host.terminate("t1")
        assert host.holds(config("t1")) == {"volume-of-t1"}  # which no container mounts
        assert sorted(host.home.parent.glob("outside-*")) == outside
        await host.remove("t1")  # only that takes it away, with all else of the task
        assert not path.parent.exists()

    host.play(scene)


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_a_newer_shim_wrote_is_left_as_it_is_and_named_by_log_and_doctor(
    host: Stage, what: str
) -> None:
    async def scene() -> None:
        path = await spoilt(host, UNREADABLE[what])
        before = content(path)
        seen = await examined(host)
        assert named(seen) == {f"record in {path.parent.name}"}
        assert set(kept_ids(seen)) == {"t1", "t2"}
        await goes_on(host)
        assert any("restore task t1" in line and "no usable record" in line for line in host.log)
        await host.terminate("t1")
        await host.restart()
        assert content(path) == before

    host.play(scene)


ANYWHERE = {k: v for k, v in (DAMAGE | UNREADABLE).items() if k != "another task's id"}
"""What is bad whatever container there is."""


@pytest.mark.parametrize("what", ANYWHERE)
def test_without_a_container_it_costs_its_task_and_stays_for_somebody_to_look_at(
    host: Stage, what: str
) -> None:
    async def scene() -> None:
        path = await spoilt(host, ANYWHERE[what])
        host.engine.delete(host.container("t1").id)
        before = content(path)
        assert path.parent.name in str(named(await examined(host)))
        for _ in range(2):
            host.begin()
            await host.restored()
            assert [item.id for item in host.core.list()] == ["t2"]
            host.kill()
        assert any(path.parent.name in line for line in host.log)
        assert before in [content(file) for file in path.parent.glob("*task.json*")]
        assert path.parent.name in str(named(await examined(host)))
        host.begin()

    host.play(scene)


def test_a_record_nobody_may_read_is_read_by_root_and_left_alone_by_others(
    host: Stage,
) -> None:
    async def scene() -> None:
        path = await spoilt(host, lambda path: path.chmod(0o000))
        before = content(path) if os.geteuid() == 0 else None
        seen = await examined(host)
        assert set(kept_ids(seen)) == {"t1", "t2"}
        if before is not None:
            assert named(seen) == set()
        else:
            assert named(seen) == {f"record in {path.parent.name}"}
        await goes_on(host)
        assert path.stat().st_mode & 0o777 == 0

    host.play(scene)


def test_of_two_directories_with_one_id_the_second_is_left_alone_and_named(host: Stage) -> None:
    async def scene() -> None:
        copy = host.home / "runners" / "a-copy"
        path = await spoilt(host, lambda path: void(shutil.copytree(path.parent, copy)))
        before = content(copy / "task.json")
        seen = await examined(host)
        assert named(seen) == {"directory a-copy"}
        await goes_on(host)
        assert any("a-copy" in line for line in host.log)
        await host.terminate("t1")
        await host.remove("t1")
        assert not path.parent.exists()
        assert content(copy / "task.json") == before

    host.play(scene)
