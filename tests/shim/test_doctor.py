"""The doctor: tells what a start would do, and does nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dstack_shim_contracts.record import Intent, Step
from dstack_shim_contracts.upgrade import Attempt, Outcome, ShimFile, UpgradeState

from dstack_shim import doctor
from dstack_shim.doctor import Examination, Finding, Level, examine, worst
from dstack_shim.engine.protocol import (
    EngineInfo,
)
from dstack_shim.errors import EngineUnreachable
from dstack_shim.home import LOCK, holder, lock_home
from dstack_shim.host import machine
from dstack_shim.log import event_log
from dstack_shim.settings import Settings
from dstack_shim.upgrade_state import UpgradeFile
from tests.lab.fake_engine import FakeEngine
from tests.shim.host_in_memory import Host, kept_ids


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def looked_at(seen: Examination) -> dict[str, str]:
    return {item.what: item.words for item in seen.findings if item.level is not Level.OK}


def test_a_host_in_order_keeps_everything(host: Host) -> None:
    host.record("t1", intent=Intent(Step.RUNNING, 1.0))
    host.run("t1")
    seen = host.examine()
    assert (worst(seen.findings), looked_at(seen)) == (Level.OK, {})
    assert kept_ids(seen) == ("t1",)
    assert (seen.kept[0].status, seen.kept[0].next) == ("running", "nothing")
    assert [finding.what for finding in seen.findings] == ["home", "engine", "boot"]
    assert seen.plan is not None
    assert seen.plan.lines()[0].startswith("restore task t1 as running")


def test_a_home_no_shim_has_used_is_in_order_and_stays_empty(tmp_path: Path) -> None:
    seen = asyncio.run(examine(Settings(shim_home=str(tmp_path)), FakeEngine()))
    assert (worst(seen.findings), seen.kept) == (Level.OK, ())
    assert list(tmp_path.iterdir()) == []


def test_what_the_first_step_would_do_is_told(host: Host) -> None:
    host.record("gone", intent=Intent(Step.PULLING, 1.0))
    seen = host.examine()
    assert seen.kept[0].next == "ask the engine whether it is gone"


def test_a_damaged_record_is_named_and_costs_its_neighbour_nothing(host: Host) -> None:
    host.record("t1")
    damaged = host.record("t2")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    for task_id in ("t1", "t2"):
        host.run(task_id)
    seen = host.examine()
    assert worst(seen.findings) is Level.WARNING
    assert kept_ids(seen) == ("t1", "t2")
    (what,) = looked_at(seen)
    assert what == f"record in {damaged.parent.name}"


def test_a_record_that_was_set_aside_before_is_still_named(host: Host) -> None:
    damaged = host.record("t1")
    damaged.rename(damaged.with_name(".task.json.damaged-1"))
    host.run("t1")
    assert looked_at(host.examine()) == {
        f"record {damaged.parent.name}/.task.json.damaged-1": "damaged, set aside"
    }


def test_what_is_left_alone_is_named(host: Host) -> None:
    host.run("t1", home="/another/home")
    (host.home / "runners" / "theirs").mkdir()
    seen = host.examine()
    assert worst(seen.findings) is Level.WARNING
    assert "it belongs to the shim home /another/home" in looked_at(seen).values()
    assert looked_at(seen)["directory theirs"] == "no record and no container"


def test_how_the_last_upgrade_went_is_told_and_looked_at_if_it_failed(host: Host) -> None:
    files = ShimFile("0.22.5", "a" * 64), ShimFile("0.22.5.post1", "b" * 64)
    file = UpgradeFile(host.home, event_log())
    file.write(UpgradeState(Attempt(*files, Outcome.DONE, "then")))
    seen = host.examine()
    assert worst(seen.findings) is Level.OK
    words = {finding.what: finding.words for finding in seen.findings}
    assert words["upgrade"] == "0.22.5 to 0.22.5.post1: done"
    failed = Attempt(*files, Outcome.DIED, "then", reason="it ended before it was ready")
    file.write(UpgradeState(failed).with_unfit(failed.new, failed.reason))
    assert looked_at(host.examine()) == {
        "upgrade": "0.22.5 to 0.22.5.post1: died, it ended before it was ready"
    }


def test_a_gpu_that_two_tasks_claim_is_named(host: Host) -> None:
    for task_id in ("t1", "t2"):
        host.record(task_id, gpus=("g1",))
        host.run(task_id)
    seen = host.examine()
    assert looked_at(seen) == {"GPU g1": "task t1 keeps it, task t2 claims it too"}
    assert kept_ids(seen) == ("t1", "t2")


def test_what_a_start_would_log_as_trouble_is_named(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = host.record("t1")
    host.run("t1")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "I/O error")))
    seen = asyncio.run(examine(Settings(shim_home=str(host.home)), host.engine))
    assert worst(seen.findings) is Level.WARNING
    assert {item.what for item in seen.findings if item.level is Level.WARNING} == {
        "store.flush_failed"
    }
    assert any(str(path.parent) in item.words for item in seen.findings)


@pytest.mark.parametrize("silent", [False, True])
def test_without_an_engine_nothing_can_be_told(
    host: Host, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoEngine(FakeEngine):
        async def ping(self) -> EngineInfo:
            if not silent:
                raise EngineUnreachable("no such socket")
            await asyncio.Event().wait()
            raise AssertionError

    host.record("t1")
    host.engine = NoEngine()
    monkeypatch.setattr(doctor, "PATIENCE", 0.01)
    seen = host.examine()
    assert (worst(seen.findings), seen.plan, seen.kept) == (Level.BROKEN, None, ())
    assert looked_at(seen) == {"engine": "no answer within 0.01 s" if silent else "no such socket"}


def test_an_engine_that_does_not_list_leaves_all_unknown(host: Host) -> None:
    class Mute(FakeEngine):
        async def list_task_containers(self) -> tuple[()]:
            raise EngineUnreachable("gone again")

    host.engine = Mute()
    assert looked_at(host.examine()) == {"tasks": "gone again"}


def test_records_that_cannot_be_listed_leave_all_unknown(tmp_path: Path) -> None:
    (tmp_path / "runners").write_text("no directory")
    seen = asyncio.run(examine(Settings(shim_home=str(tmp_path)), FakeEngine()))
    assert worst(seen.findings) is Level.BROKEN
    assert str(tmp_path / "runners") in looked_at(seen)["tasks"]


def test_a_missing_home_is_named_and_not_made(tmp_path: Path) -> None:
    seen = asyncio.run(examine(Settings(shim_home=str(tmp_path / "nowhere")), FakeEngine()))
    assert worst(seen.findings) is Level.BROKEN
    assert "nowhere is not a directory" in looked_at(seen)["home"]
    assert not (tmp_path / "nowhere").exists()


def test_a_boot_without_an_id_is_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "boot_id", lambda: None)
    assert list(looked_at(host.examine())) == ["boot"]


# The lock.


def test_a_running_shim_is_named_and_not_disturbed(host: Host) -> None:
    lock = lock_home(host.home)
    seen = host.examine()
    assert worst(seen.findings) is Level.OK
    assert f"pid {os.getpid()}" in seen.findings[0].words
    os.close(lock)
    assert "unused" in host.examine().findings[0].words


def test_the_number_of_a_shim_that_was_killed_is_not_believed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    for content in (f"{process.pid}\n", f"{os.getpid()}\n", "", "x"):
        (tmp_path / LOCK).write_text(content)
        assert holder(tmp_path) is None


def test_an_open_lock_file_without_a_lock_is_nobodys(tmp_path: Path) -> None:
    os.close(lock_home(tmp_path))
    with (tmp_path / LOCK).open("rb"):
        assert holder(tmp_path) is None


def test_a_lock_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    seen = asyncio.run(examine(Settings(shim_home=str(tmp_path)), FakeEngine()))
    assert worst(seen.findings) is Level.BROKEN
    assert "cannot tell who holds" in looked_at(seen)["home"]


def test_the_levels_are_the_exit_codes() -> None:
    findings = [Finding(level, "", "") for level in Level]
    assert [int(worst([item])) for item in findings] == [*range(3)]
    assert worst(Examination(()).findings) is Level.OK


def test_the_daemon_imports_nothing_of_it() -> None:
    asked = "import dstack_shim.daemon, sys; print('dstack_shim.doctor' in sys.modules)"
    command = [sys.executable, "-c", asked]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
