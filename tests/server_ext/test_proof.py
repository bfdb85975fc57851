from __future__ import annotations

from typing import Any

import attrs
import pytest

from dstack_shim_server.observation import Observation
from dstack_shim_server.proof import (
    OpenRestart,
    Outcome,
    Proof,
    TaskBefore,
    examine,
    never_explained,
)
from tests.server_ext.records import NEW, OLD, check

RUNS, ENDED = ("job-1", "running"), ("job-1", "terminated")
JOBS = frozenset({"job-1", "job-2"})


def begun(*tasks: tuple[str, ...], process: str = "") -> OpenRestart:
    before = tuple(TaskBefore(*task) for task in tasks)
    return OpenRestart("r", "id of box", "box", OLD, NEW, 100.0, before, process)


def back(*tasks: tuple[str, str], running: str = NEW, **more: Any) -> Observation:
    return check(running=running, installed=NEW, tasks=tasks, **{"jobs": JOBS, **more})


def looked(restart: OpenRestart, *checks: Observation, **reasons: str) -> Proof:
    """One check after the other, as they are recorded."""
    told = {name.replace("_", "-"): reason for name, reason in reasons.items()}
    found = None
    for seen in checks:
        found = examine(restart, seen, told)
        if found.outcome is not None:
            break
        restart = attrs.evolve(restart, after=found.after if found.returned else None)
    assert found is not None
    return found


def test_it_takes_two_checks_to_confirm() -> None:
    first = looked(begun(RUNS), back(RUNS))
    assert (first.outcome, first.returned) == (None, True)
    second = looked(begun(RUNS), back(RUNS), back(RUNS))
    assert second.outcome is Outcome.CONFIRMED
    assert second.why == "all 1 tasks are as they were"
    assert second.after == (RUNS,)


def test_an_idle_shim_is_confirmed_too() -> None:
    found = looked(begun(), back(), back())
    assert (found.outcome, found.why) == (Outcome.CONFIRMED, "there were no tasks")


def test_one_that_still_runs_the_old_version_is_not_back() -> None:
    found = looked(begun(RUNS), back(RUNS, running=OLD), back(RUNS, running=OLD))
    assert (found.outcome, found.returned) == (None, False)
    assert found.why == f"still runs {OLD}"


def test_one_whose_version_is_unreadable_is_not_back() -> None:
    assert not looked(begun(RUNS), back(RUNS, running="")).returned


def test_new_tasks_do_not_matter() -> None:
    new = ("job-9", "pulling")
    assert looked(begun(RUNS), back(RUNS, new), back(RUNS, new)).outcome is Outcome.CONFIRMED


def test_tasks_that_go_on_are_fine() -> None:
    restart = begun(("job-1", "pulling"), ("job-2", "terminated"))
    seen = back(RUNS, ("job-2", "terminated"))
    assert looked(restart, seen, seen).outcome is Outcome.CONFIRMED


@pytest.mark.parametrize(
    ("before", "after"),
    [("running", "creating"), ("terminated", "running"), ("pulling", "pending")],
)
def test_a_task_that_went_back_is_lost(before: str, after: str) -> None:
    found = looked(begun(("job-1", before)), back(("job-1", after)))
    assert found.outcome is Outcome.LOST_TASKS
    assert found.why == f"task job-1 was {before} and is {after}"


def test_a_task_not_known_any_more_is_lost_once_two_checks_say_so() -> None:
    assert looked(begun(RUNS), back()).outcome is None
    found = looked(begun(RUNS), back(), back())
    assert found.outcome is Outcome.LOST_TASKS
    assert found.why == "task job-1 was running and is not known any more"


def test_a_task_missing_in_one_check_only_is_not_lost() -> None:
    assert looked(begun(RUNS), back(RUNS), back(), back(RUNS)).outcome is Outcome.CONFIRMED


def test_a_task_that_dstack_has_no_job_for_any_more_is_not_lost() -> None:
    gone = back(jobs=frozenset())
    assert looked(begun(RUNS), gone, gone).outcome is Outcome.CONFIRMED


def test_a_task_that_dstack_removed_is_not_lost() -> None:
    restart = begun(RUNS)
    found = looked(restart, back(), back(), job_1="removed by dstack")
    assert found.outcome is Outcome.CONFIRMED


def test_without_knowing_dstacks_jobs_a_missing_task_is_lost() -> None:
    unknown = back(jobs=None)
    assert looked(begun(RUNS), unknown, unknown).outcome is Outcome.LOST_TASKS


def test_a_task_that_ended_by_itself_is_not_lost() -> None:
    found = looked(begun(RUNS), back(ENDED), back(ENDED), job_1="done_by_runner")
    assert found.outcome is Outcome.CONFIRMED


def test_a_task_that_its_shim_gave_up_is_lost() -> None:
    found = looked(begun(RUNS), back(ENDED), job_1="executor_error")
    assert found.outcome is Outcome.LOST_TASKS
    assert found.why == "task job-1 was running and ended with executor_error"


def test_a_lost_task_that_was_removed_is_still_lost() -> None:
    assert looked(begun(RUNS), back(), back(), job_1="executor_error").outcome is (
        Outcome.LOST_TASKS
    )


def test_a_task_that_ended_waits_for_its_reason_while_dstack_has_the_job() -> None:
    found = looked(begun(RUNS), back(ENDED), back(ENDED), back(ENDED))
    assert found.outcome is None
    assert "ended, why is not told yet" in found.why
    gone = back(ENDED, jobs=frozenset())
    assert looked(begun(RUNS), back(ENDED), gone, gone).outcome is Outcome.CONFIRMED


def test_a_reason_that_changed_is_a_loss() -> None:
    restart = begun(("job-1", "terminated", "done_by_runner"))
    found = looked(restart, back(ENDED), job_1="executor_error")
    assert found.outcome is Outcome.LOST_TASKS
    assert found.why == "task job-1 had ended with done_by_runner and now with executor_error"
    same = looked(restart, back(ENDED), back(ENDED), job_1="done_by_runner")
    assert same.outcome is Outcome.CONFIRMED


def test_tasks_that_were_not_seen_prove_nothing() -> None:
    unseen = attrs.evolve(back(), tasks=None)
    found = looked(begun(RUNS), unseen, unseen)
    assert (found.outcome, found.returned, found.after) == (None, True, None)


# Back in the old version -------------------------------------------------------------------------


def said(started_at: str, **upgrade: str) -> dict[str, Any]:
    return {"implementation": {"started_at": started_at, "last_upgrade": upgrade or None}}


def test_a_new_process_of_the_old_version_was_rolled_back() -> None:
    seen = back(RUNS, running=OLD, **said("12:05"))
    found = looked(begun(RUNS, process="12:00"), seen, seen)
    assert (found.outcome, found.why) == (Outcome.ROLLED_BACK, f"it runs {OLD} again")


def test_what_the_shim_says_of_its_upgrade_is_kept() -> None:
    upgrade = {"to_version": NEW, "outcome": "refused", "reason": "not a shim", "at": "12:04"}
    seen = back(RUNS, running=OLD, **said("12:00", **upgrade))
    found = looked(begun(RUNS, process="12:00"), seen, seen)
    assert (found.outcome, found.why) == (Outcome.ROLLED_BACK, f"{NEW} refused not a shim")


def test_a_shim_that_is_still_trying_the_new_file_is_not_back() -> None:
    trying = {"to_version": NEW, "outcome": "trying", "at": "12:04"}
    seen = back(RUNS, running=OLD, **said("12:00", **trying))
    found = looked(begun(RUNS, process="12:00"), seen, seen, seen)
    assert (found.outcome, found.returned) == (None, False)


def test_an_upgrade_before_the_restart_says_nothing_about_it() -> None:
    upgrade = {"to_version": OLD, "outcome": "done", "at": "11:00"}
    seen = back(RUNS, running=OLD, **said("12:00", **upgrade))
    assert not looked(begun(RUNS, process="12:00 11:00"), seen, seen).returned


def test_a_shim_that_says_nothing_of_itself_still_runs_the_old_one() -> None:
    assert not looked(begun(RUNS), back(RUNS, running=OLD, **said("12:05"))).returned
    assert not looked(begun(RUNS, process="12:00"), back(RUNS, running=OLD)).returned


def test_a_loss_counts_more_than_a_way_back() -> None:
    seen = back(running=OLD, **said("12:05"))
    found = looked(begun(RUNS, process="12:00"), seen, seen)
    assert found.outcome is Outcome.LOST_TASKS


# Out of time -------------------------------------------------------------------------------------


def test_what_was_not_explained_in_time_is_a_loss() -> None:
    restart = begun(RUNS)
    late = never_explained(restart, looked(restart, back(ENDED)))
    assert late.outcome is Outcome.LOST_TASKS
    assert "why is not told yet" in late.why


def test_a_shim_that_was_not_restarted_in_time_was_not_restarted() -> None:
    restart = begun(RUNS)
    late = never_explained(restart, looked(restart, back(RUNS, running=OLD)))
    assert (late.outcome, late.why) == (Outcome.WITHDRAWN, f"the shim still runs {OLD}")
