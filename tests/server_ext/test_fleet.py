"""`dstack-shim-fleet` as an operator runs it, in a process of its own and in this one."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dstack_shim_server.fleet import cli, words
from tests.server_ext.databases import Database
from tests.server_ext.records import NEW, OLD, Clock, check, claim, policy, recorder, see

NOW = 1_800_000_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(NOW)
    monkeypatch.setattr(time, "time", lambda: clock.wall)
    return clock


class Operator:
    """Runs commands against a database."""

    def __init__(self, database: Database, capsys: Any, patch: pytest.MonkeyPatch) -> None:
        self.capsys = capsys
        patch.setenv("DSTACK_DATABASE_URL", database.url)
        patch.setenv("COLUMNS", "200")

    def runs(self, *arguments: str) -> tuple[int, str]:
        code = cli.main(arguments)
        return code, self.capsys.readouterr().out

    def reads(self, *arguments: str) -> Any:
        return json.loads(self.runs(*arguments, "--json")[1])


@pytest.fixture
def operator(
    database: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Operator:
    return Operator(database, capsys, monkeypatch)


def lost(database: Database, clock: Clock) -> None:
    """A fleet in the middle of something: one confirmed, one that lost a task, and others."""
    keeper = recorder(database, clock, **policy())
    clock.pass_by(-300)
    for box in ("a", "b"):
        assert claim(keeper, box) == ""
    clock.pass_by(20)
    for _ in range(2):
        see(keeper, check("a", running=NEW, at=clock.wall))
        see(keeper, check("b", running=NEW, tasks=(), at=clock.wall))
        clock.pass_by(15)
    assert claim(keeper, "c", installed="0.22.6", at=clock.wall) == ""
    clock.pass_by(250)
    pulling: dict[str, Any] = {"answer": False, "blocking": {"pulling": 1}, "at": clock.wall - 9}
    tasks = (("job-1", "running"), ("job-2", "pulling"))
    see(keeper, check("d", reason="not safe: task job-2 is pulling", tasks=tasks, **pulling))
    held: dict[str, Any] = {"answer": False, "held": True, "at": clock.wall - 5}
    see(keeper, check("e", reason=f"not now: version {NEW} is stopped", fleet_id="f2", **held))
    see(keeper, check("a", running=NEW, running_features=("persisted-state",), at=clock.wall - 3))
    keeper.stop()


def test_status_is_a_table_and_what_holds_the_roll_out(
    database: Database, clock: Clock, operator: Operator
) -> None:
    lost(database, clock)
    code, said = operator.runs("status")
    assert code == 1
    lines = said.splitlines()
    assert lines[0] == (
        "5 instances: 1 current, 1 held, 1 restarting, 1 silent, 1 waiting; 1 restarts under way"
    )
    assert lines[1].split() == [
        "INSTANCE",
        "FLEET",
        "RUNNING",
        "WANTED",
        "FEATURES",
        "STATE",
        "SEEN",
        "WAITING",
        "FOR",
    ]
    rows = {line.split()[0]: " ".join(line.split()) for line in lines[2:7]}
    assert rows["a"] == f"a main/gpu {NEW} {NEW} persisted-state current 3 s"
    assert rows["d"] == f"d main/gpu {OLD} {NEW} - waiting 9 s 1 pulling"
    assert rows["e"] == f"e main/cpu {OLD} {NEW} - held 5 s version {NEW} is stopped"
    assert rows["c"].startswith(f"c main/gpu {OLD} 0.22.6 - restarting")
    assert lines[7].startswith(f"Version {NEW} is stopped for 4 min: instance b lost tasks: task")
    assert lines[7].endswith(f"`dstack-shim-fleet release {NEW}` lifts that.")


def test_status_for_programs(database: Database, clock: Clock, operator: Operator) -> None:
    lost(database, clock)
    said = operator.reads("status")
    by_name = {one["instance"]: one for one in said["instances"]}
    assert set(by_name) == set("abcde")
    assert by_name["d"]["waiting_for"] == {"pulling": 1}
    assert by_name["a"]["features"] == ["persisted-state"]
    assert said["stopped"][0]["version"] == NEW
    assert (said["under_way"], said["confirmed"]) == (1, {NEW: 1})
    assert said["servers"][0]["id"] == "replica"
    only = operator.reads("status", "--state", "held")
    assert [one["instance"] for one in only["instances"]] == ["e"]


def test_why_in_sentences(database: Database, clock: Clock, operator: Operator) -> None:
    lost(database, clock)
    assert operator.runs("why", "d") == (
        0,
        f"""\
Instance d (id of d) of fleet main/gpu was last checked 9 s ago and is waiting.
It runs {OLD} (tells no features) and has {NEW} installed.
For 9 s the answer has been: not safe: task job-2 is pulling.
Task job-1 is running.
Task job-2 is pulling and in the way.
Version {NEW} is stopped for 4 min: instance b lost tasks: task job-1 was running and is not \
known any more. `dstack-shim-fleet release {NEW}` lifts that.
""",
    )
    _, of_b = operator.runs("why", "id of b")
    assert (
        "Its last restart, from 0.22.4 to 0.22.5 5 min ago: lost tasks, absent for 20 s: " in of_b
    )
    _, of_c = operator.runs("why", "c")
    assert "A restart was requested 4 min ago." in of_c
    assert operator.reads("why", "c")[0]["restarts"][0]["outcome"] is None


def test_why_of_nobody(database: Database, clock: Clock, operator: Operator) -> None:
    recorder(database, clock).stop()
    assert operator.runs("why", "nobody") == (4, "No instance is called nobody.\n")


def test_history_tells_outcomes(database: Database, clock: Clock, operator: Operator) -> None:
    lost(database, clock)
    code, said = operator.runs("history")
    assert code == 1
    rows = [" ".join(line.split()) for line in said.splitlines()]
    assert rows[0] == "REQUESTED INSTANCE FROM TO OUTCOME ABSENT TASKS WHY"
    assert rows[1] == f"2027-01-15 07:55:50Z c {OLD} 0.22.6 under way - 1"
    assert f"a {OLD} {NEW} confirmed 20 s 1 all 1 tasks are as they were" in rows[2]
    assert f"b {OLD} {NEW} lost tasks 20 s 1 task job-1 was running" in rows[3]
    assert operator.runs("history", "--instance", "a")[0] == 0
    assert len(operator.reads("history", "--limit", "1")) == 1
    assert operator.reads("history", "--instance", "b")[0]["tasks_before"] == [
        ["job-1", "running", ""]
    ]


def test_watch_tells_each_change_once(
    database: Database, clock: Clock, operator: Operator
) -> None:
    lost(database, clock)
    code, said = operator.runs("watch", "--interval", "0.1", "--looks", "3")
    assert code == 1
    assert len(said.splitlines()) == 3


def test_pause_and_resume(database: Database, clock: Clock, operator: Operator) -> None:
    keeper = recorder(database, clock, **policy())
    assert operator.runs("pause") == (0, "Paused. Restarts under way go on, no other begins.\n")
    assert claim(keeper).startswith("the roll-out is paused by ")
    assert "The roll-out is paused by " in operator.runs("status")[1]
    assert operator.runs("resume") == (0, "Resumed.\n")
    assert operator.runs("resume") == (0, "It was not paused.\n")
    assert claim(keeper) == ""


def test_release_lifts_a_stop_until_the_next(
    database: Database, clock: Clock, operator: Operator
) -> None:
    lost(database, clock)
    assert operator.runs("release", NEW) == (0, f"{NEW} is rolled out again.\n")
    assert operator.runs("release", NEW) == (4, f"{NEW} was not stopped.\n")
    assert operator.runs("status")[0] == 0
    keeper = recorder(database, clock, **policy())
    assert claim(keeper, "f") == ""
    for _ in range(2):
        see(keeper, check("f", running=NEW, tasks=()))
    assert operator.runs("status")[0] == 1


def test_release_lets_an_instance_try_again_what_it_did_not_take(
    database: Database, clock: Clock, operator: Operator
) -> None:
    keeper = recorder(database, clock, **policy())
    assert claim(keeper) == ""
    keeper.flush()
    clock.pass_by(301)
    keeper.flush()
    assert claim(keeper, number=2).startswith("it did not take")
    assert operator.runs("release", NEW)[0] == 0
    assert operator.runs("release", NEW)[0] == 4
    clock.pass_by(1)
    assert claim(keeper, number=2) == ""


def test_what_failed_before_a_release_counts_no_more(
    database: Database, clock: Clock, operator: Operator
) -> None:
    keeper = recorder(database, clock, failures=2, **policy())

    def fail(box: str) -> None:
        assert claim(keeper, box) == ""
        keeper.flush()
        clock.pass_by(301)
        keeper.flush()

    fail("a")
    fail("b")
    assert operator.runs("status")[0] == 1
    operator.runs("release", NEW)
    fail("c")
    assert operator.runs("status")[0] == 0
    fail("d")
    assert operator.runs("status")[0] == 1


def test_metrics_are_what_prometheus_reads(
    database: Database, clock: Clock, operator: Operator
) -> None:
    lost(database, clock)
    code, said = operator.runs("metrics")
    assert code == 0
    lines = said.splitlines()
    assert 'dstack_shim_restart_instances{state="waiting"} 2' in lines
    assert 'dstack_shim_restart_restarts_total{outcome="lost tasks"} 1' in lines
    assert "dstack_shim_restart_restarts_under_way 1" in lines
    assert f'dstack_shim_restart_stopped_versions{{version="{NEW}"}} 1' in lines
    assert "# TYPE dstack_shim_restart_restarts_total counter" in lines
    assert operator.reads("metrics")[0]["name"] == "instances"


# What cannot be read -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["status"], ["history"], ["pause"], ["release", "1.0"]])
def test_without_a_record_the_code_says_so(
    command: list[str], database: Database, operator: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 3
    assert "the record's tables are not there" in capsys.readouterr().err


def test_newer_tables_are_not_read(
    database: Database, operator: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder(database).stop()
    database.ask("UPDATE shim_restart_version SET version_num = '9999'")
    assert cli.main(["status"]) == 3
    assert "of version 9999, newer than this code's" in capsys.readouterr().err


def test_a_database_that_is_not_there_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DSTACK_DATABASE_URL", raising=False)
    monkeypatch.setenv("DSTACK_SERVER_DIR", str(tmp_path))
    assert cli.main(["status"]) == 3
    assert f"there is no database {tmp_path}/data/sqlite.db" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_password_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "postgresql+asyncpg://dstack:hunter2@127.0.0.1:1/dstack"
    monkeypatch.setenv("DSTACK_DATABASE_URL", url)
    assert cli.main(["status"]) == 3
    assert "hunter2" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "arguments",
    [[], ["sing"], ["why"], ["history", "--limit", "0"], ["watch", "--interval", "never"]],
)
def test_wrong_usage_is_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


# Words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7200, "2 h"),
        (172_800, "2 d"),
        (-5, "in the future"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert words.age(seconds) == text


def test_a_name_cannot_forge_lines_nor_colours(
    database: Database, clock: Clock, operator: Operator
) -> None:
    keeper = recorder(database, clock)
    see(keeper, check("a\n[red]\x1b[2Jb", at=clock.wall))
    _, said = operator.runs("status")
    assert "\x1b" not in said
    assert "a\\x0a[red]\\x1b[2Jb" in said


# Five thousand -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.one_python
def test_five_thousand_instances_are_told_within_a_second(sqlite: Database) -> None:
    """Slow for its rows: start of the process, reading and printing all together."""
    keeper = recorder(sqlite)
    at = time.time()
    for number in range(5_000):
        reason = "not safe: task 1234abcd… is pulling"
        keeper.notes.see(check(f"instance-{number}", at=at, answer=False, reason=reason))
    keeper.flush()
    command = [sys.executable, "-m", "dstack_shim_server.fleet.cli", "status"]
    environment = {"DSTACK_DATABASE_URL": sqlite.url}
    subprocess.run(command, env=environment, check=True, capture_output=True)  # byte code
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(ran.stdout.splitlines()) == 5_002
    # Of one thread at a time, so on a machine with nothing else to do it takes no longer.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 1.0
