"""Claims and proofs over real databases: replicas that meet, and what a version did."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dstack_shim_server.observation import Observation
from dstack_shim_server.record.recorder import Recorder
from tests.server_ext.databases import Database
from tests.server_ext.records import (
    NEW,
    OLD,
    Clock,
    check,
    claim,
    outcomes,
    policy,
    recorder,
    restart,
    see,
)

pytestmark = pytest.mark.usefixtures("all_levels")

RESTARTS = "SELECT * FROM shim_restart_restarts ORDER BY requested_at, id"
STOPS = "SELECT version, why FROM shim_restart_stops WHERE lifted_at IS NULL"
RUNS, ENDED = (("job-1", "running"),), (("job-1", "terminated"),)


def back(box: str = "box", **more: Any) -> Observation:
    return check(box, running=NEW, **more)


def confirm(keeper: Recorder, box: str = "box") -> None:
    see(keeper, back(box))
    see(keeper, back(box))


# Claims ------------------------------------------------------------------------------------------


def test_a_claim_is_a_row_with_what_was_there(database: Database) -> None:
    keeper = recorder(database, name="one", **policy())
    assert claim(keeper) == ""
    (row,) = database.ask(RESTARTS)
    assert row["instance"] == "box"
    assert (row["from_version"], row["to_version"]) == (OLD, NEW)
    assert row["tasks_before"] == '[["job-1", "running", ""]]'
    assert (row["replica"], row["outcome"]) == ("one", None)
    # And what the check saw is in the same transaction.
    assert [r["name"] for r in database.ask("SELECT name FROM shim_restart_instances")] == ["box"]


def test_an_instance_can_be_claimed_once(database: Database) -> None:
    one, other = recorder(database, **policy()), recorder(database, **policy())
    assert claim(one, number=1) == ""
    assert claim(other, number=2) == "a restart of this instance is under way"
    assert claim(one, number=3) == "a restart of this instance is under way"


def test_replicas_that_claim_at_once_take_no_more_than_may_be(database: Database) -> None:
    keepers = [recorder(database, name=f"r{n}", **policy(max_under_way=3)) for n in range(3)]
    start = threading.Barrier(12)
    answers: list[str] = []

    def try_it(number: int) -> None:
        start.wait()
        answers.append(claim(keepers[number % 3], f"box {number % 8}", number))

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count("") == 3
    rows = database.ask(RESTARTS)
    assert len(rows) == len({row["instance"] for row in rows}) == 3


def test_the_database_itself_allows_one_open_restart_of_an_instance(database: Database) -> None:
    keeper = recorder(database, **policy())
    assert claim(keeper) == ""
    with pytest.raises(Exception, match=r"UNIQUE|unique"):
        database.ask(
            "INSERT INTO shim_restart_restarts SELECT 'x', instance_id, instance, fleet, "
            "from_version, to_version, requested_at, replica, process, tasks_before, reasons, "
            "returned_at, absence, tasks_after, outcome, outcome_at, why FROM shim_restart_restarts"
        )


def test_canaries_first_then_the_rest(database: Database) -> None:
    keeper = recorder(database, **policy(canaries=2))
    assert [claim(keeper, box) == "" for box in "abc"] == [True, True, False]
    confirm(keeper, "a")
    assert claim(keeper, "c") == f"waits for canaries: 1 of 2 confirmed in {NEW}"
    confirm(keeper, "b")
    assert [claim(keeper, box) for box in "cdef"] == [""] * 4


def test_a_claim_that_came_to_nothing_frees_its_place(database: Database) -> None:
    keeper = recorder(database, **policy(max_under_way=1))
    assert claim(keeper, "a") == ""
    keeper.withdraw("a 1")
    keeper.flush()
    assert claim(keeper, "b") == ""
    assert outcomes(database) == {"b 1": None}


def test_a_claim_whose_server_died_is_freed_when_its_time_is_over(database: Database) -> None:
    clock = Clock()
    dead = recorder(database, clock, name="dead", **policy())
    assert claim(dead) == ""
    dead.stop()
    alive = recorder(database, clock, name="alive", **policy())
    see(alive, check(at=1.0))
    clock.pass_by(299)
    see(alive, check(at=2.0))
    assert claim(alive, number=2) == "a restart of this instance is under way"
    clock.pass_by(2)
    see(alive, check(at=3.0))
    assert claim(alive, number=2) == ""
    assert outcomes(database) == {"box 1": "withdrawn", "box 2": None}


def test_no_step_of_the_machines_clock_ends_a_restart(database: Database) -> None:
    clock = Clock()
    keeper = recorder(database, clock, **policy())
    assert claim(keeper) == ""
    for step in (7200.0, -90_000.0, 86_400.0 * 365):
        clock.wall += step
        keeper.flush()
        assert outcomes(database) == {"box 1": None}
    confirm(keeper)
    assert outcomes(database) == {"box 1": "confirmed"}
    (row,) = database.ask(RESTARTS)
    assert row["absence"] >= 0.0


# Proofs ------------------------------------------------------------------------------------------


def test_a_restart_that_hurt_nobody_is_confirmed(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    keeper = recorder(database, clock, **policy())
    assert claim(keeper) == ""
    clock.pass_by(17)
    confirm(keeper)
    (row,) = database.ask(RESTARTS)
    assert (row["outcome"], row["absence"]) == ("confirmed", 17.0)
    assert row["tasks_after"] == '[["job-1", "running"]]'
    assert caplog.messages[-1] == (
        f"shim_restart: instance box: restart from {OLD} to {NEW}: confirmed: "
        "all 1 tasks are as they were"
    )


def test_a_version_that_lost_a_task_goes_no_further_until_it_is_released(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    one = recorder(database, name="one", **policy())
    other = recorder(database, name="other", **policy())
    assert claim(one, "a") == ""
    see(one, back("a", tasks=()))
    assert claim(other, "b") == ""  # one check alone says nothing
    see(one, back("a", tasks=()))
    assert outcomes(database)["a 1"] == "lost tasks"
    why = "instance a lost tasks: task job-1 was running and is not known any more"
    assert database.ask(STOPS) == [{"version": NEW, "why": why}]
    assert claim(other, "c") == f"version {NEW} is stopped: {why}"
    assert claim(other, "c", installed="0.22.6") == ""
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    assert "lost tasks: task job-1" in errors[0]
    assert f"dstack-shim-fleet release {NEW}" in errors[1]


def test_reasons_heard_by_one_server_count_for_the_proof_of_another(database: Database) -> None:
    one = recorder(database, name="one", **policy())
    other = recorder(database, name="other", **policy())
    assert claim(one) == ""
    other.flush()
    other.notes.told("job-1", "executor_error")
    other.flush()
    see(one, back(tasks=ENDED))
    assert outcomes(database) == {"box 1": "lost tasks"}


def test_a_task_that_ended_meanwhile_is_no_loss(database: Database) -> None:
    keeper = recorder(database, **policy())
    assert claim(keeper) == ""
    keeper.notes.told("job-1", "done_by_runner")
    see(keeper, back(tasks=ENDED))
    see(keeper, back(tasks=()))
    assert outcomes(database) == {"box 1": "confirmed"}


def test_one_that_does_not_come_back_is_told_and_several_stop_the_version(
    database: Database,
) -> None:
    clock = Clock()
    keeper = recorder(database, clock, failures=2, **policy())
    assert claim(keeper, "a") == ""
    keeper.flush()
    clock.pass_by(301)
    keeper.flush()
    assert outcomes(database) == {"a 1": "did not come back"}
    assert database.ask(STOPS) == []
    assert claim(keeper, "b") == ""
    keeper.flush()
    clock.pass_by(301)
    keeper.flush()
    (stop,) = database.ask(STOPS)
    assert stop["why"] == "2 instances did not take it, the last was b: not seen again"


def test_one_that_its_shim_rolled_back_is_told(database: Database) -> None:
    keeper = recorder(database, **policy())
    said = {"started_at": "12:00"}
    assert claim(keeper, implementation=said) == ""
    upgrade = {"to_version": NEW, "outcome": "rolled-back", "reason": "died", "at": "12:01"}
    for _ in range(2):
        see(keeper, check(implementation={**said, "last_upgrade": upgrade}))
    (row,) = database.ask(RESTARTS)
    assert (row["outcome"], row["why"]) == (
        "rolled back by the shim",
        f"{NEW} rolled-back died",
    )


def test_an_instance_that_did_not_take_a_version_is_not_given_it_again(
    database: Database,
) -> None:
    """One bad file on one host must not be tried every half a minute for ever."""
    clock = Clock()
    keeper = recorder(database, clock, **policy())
    assert claim(keeper, "a") == ""
    keeper.flush()
    clock.pass_by(301)
    keeper.flush()
    assert claim(keeper, "a", 2) == f"it did not take {NEW} before: did not come back"
    assert claim(keeper, "a", 3, installed="0.22.6") == ""
    assert claim(keeper, "b") == ""


def test_restarts_made_without_a_claim_are_proved_too(database: Database) -> None:
    keeper = recorder(database, **policy())
    seen = check()
    keeper.notes.restarted(restart(seen))
    see(keeper, seen)
    confirm(keeper)
    assert outcomes(database) == {"box 1": "confirmed"}
