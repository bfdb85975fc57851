"""The tables of the background step, row by row."""

from __future__ import annotations

import attrs
import pytest
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.record import Intent, Step, TaskRecord
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.container import LABEL_INTENT, START
from dstack_shim.engine.protocol import Container, ContainerDetails, ContainerState
from dstack_shim.tasks.outcomes import (
    FRESH,
    TOMBSTONE_KEPT,
    Boot,
    Do,
    outcome_of_exit,
    outcome_of_gone,
    outcome_of_unstarted,
    what_to_do,
)
from dstack_shim.tasks.task import Task

NOW = 1_000_000.0
BOOT = Boot("this-boot", NOW - 50_000)
RECORD = TaskRecord("t1", TaskConfig(id="t1", name="job"), boot_id=BOOT.id)
RUNNING = Task(RECORD, TaskStatus.RUNNING, "job-1", container_id="c1")

LIVE = [ContainerState.RUNNING, ContainerState.PAUSED, ContainerState.RESTARTING]
OVER = [ContainerState.EXITED, ContainerState.DEAD, ContainerState.REMOVING]


def container(state: ContainerState, *, age: float = 10.0) -> Container:
    return Container("c1", "job-1", state, NOW - age, "t1")


def record(**changes: object) -> Task:
    return attrs.evolve(RUNNING, record=attrs.evolve(RECORD, **changes))  # type: ignore[arg-type]  # one helper for all fields


def intent(step: Step, *, handover: bool = False) -> Intent:
    return Intent(step, NOW - 10, handover)


@pytest.mark.parametrize("state", LIVE)
def test_a_running_task_with_a_live_container_is_left_as_it_is(state: ContainerState) -> None:
    assert what_to_do(RUNNING, container(state), NOW, BOOT) is Do.NOTHING


@pytest.mark.parametrize("state", LIVE)
@pytest.mark.parametrize(
    "status", [TaskStatus.PENDING, TaskStatus.PREPARING, TaskStatus.PULLING, TaskStatus.CREATING]
)
def test_a_start_nobody_finishes_is_shown_running_once_its_container_lives(
    state: ContainerState, status: TaskStatus
) -> None:
    task = attrs.evolve(RUNNING, status=status)
    assert what_to_do(task, container(state), NOW, BOOT) is Do.SHOW_RUNNING


@pytest.mark.parametrize("state", OVER)
def test_a_finished_container_is_asked_how_it_ended(state: ContainerState) -> None:
    assert what_to_do(RUNNING, container(state), NOW, BOOT) is Do.ASK_OUTCOME


def test_a_container_missing_from_the_list_is_asked_for_before_it_counts_as_gone() -> None:
    assert what_to_do(RUNNING, None, NOW, BOOT) is Do.ASK_WHETHER_GONE


def test_a_state_nobody_knows_never_ends_a_task() -> None:
    assert what_to_do(RUNNING, container(ContainerState.UNKNOWN), NOW, BOOT) is Do.NOTHING


@pytest.mark.parametrize(
    ("step", "handover", "age", "boot_id", "expected"),
    [
        (Step.STARTING, False, FRESH - 1, BOOT.id, Do.START),
        (Step.CREATING, False, FRESH - 1, BOOT.id, Do.START),
        (Step.STARTING, False, FRESH + 1, BOOT.id, Do.END_UNSTARTED),
        (Step.STARTING, True, FRESH + 1000, BOOT.id, Do.START),
        (Step.STARTING, False, 1, "another-boot", Do.END_UNSTARTED),
        (Step.STARTING, True, 60_000, BOOT.id, Do.END_UNSTARTED),  # made before this boot
        (Step.STARTING, False, 1, None, Do.START),
        (Step.RUNNING, False, 1, BOOT.id, Do.END_UNSTARTED),
        (Step.PULLING, False, 1, BOOT.id, Do.END_UNSTARTED),
    ],
)
def test_a_created_container_is_started_only_while_that_is_what_the_server_waits_for(
    step: Step, handover: bool, age: float, boot_id: str | None, expected: Do
) -> None:
    task = record(intent=intent(step, handover=handover), boot_id=boot_id)
    assert what_to_do(task, container(ContainerState.CREATED, age=age), NOW, BOOT) is expected


def test_a_created_container_without_a_word_of_intent_is_not_started() -> None:
    created = container(ContainerState.CREATED, age=1)
    assert what_to_do(record(intent=None), created, NOW, BOOT) is Do.END_UNSTARTED


def test_a_created_container_whose_task_is_released_is_not_started() -> None:
    task = record(intent=intent(Step.STARTING), cleaned_up=True)
    created = container(ContainerState.CREATED, age=1)
    assert what_to_do(task, created, NOW, BOOT) is Do.END_UNSTARTED


DECIDED = {"terminated": True, "termination_reason": "terminated_by_user"}


@pytest.mark.parametrize("state", [*LIVE, ContainerState.UNKNOWN])
def test_a_container_that_outlived_its_task_is_stopped(state: ContainerState) -> None:
    assert what_to_do(record(**DECIDED), container(state), NOW, BOOT) is Do.STOP


@pytest.mark.parametrize(("stop_by", "expected"), [(NOW + 1, Do.NOTHING), (NOW - 1, Do.STOP)])
def test_a_grace_given_before_a_restart_still_holds(stop_by: float, expected: Do) -> None:
    task = record(**DECIDED, stop_by=stop_by)
    assert what_to_do(task, container(ContainerState.RUNNING), NOW, BOOT) is expected


@pytest.mark.parametrize("there", [None, *OVER, ContainerState.CREATED])
def test_a_decided_task_whose_container_does_not_run_ends_then_releases_then_rests(
    there: ContainerState | None,
) -> None:
    box = container(there) if there else None
    asked = record(**DECIDED)
    restored = attrs.evolve(asked, status=TaskStatus.TERMINATED)
    ended = attrs.evolve(restored, record=attrs.evolve(restored.record, ended_at=NOW - 1))
    released = attrs.evolve(ended, record=attrs.evolve(ended.record, cleaned_up=True))
    assert what_to_do(asked, box, NOW, BOOT) is Do.END
    assert what_to_do(restored, box, NOW, BOOT) is Do.END  # nobody has written down when
    assert what_to_do(ended, box, NOW, BOOT) is Do.RELEASE
    assert what_to_do(released, box, NOW, BOOT) is Do.NOTHING


@pytest.mark.parametrize(
    ("ended_at", "there", "expected"),
    [
        (NOW - TOMBSTONE_KEPT - 1, None, Do.EXPIRE),
        (NOW - TOMBSTONE_KEPT + 1, None, Do.NOTHING),
        (None, None, Do.END),  # or its time would never come
        (NOW - TOMBSTONE_KEPT - 1, ContainerState.EXITED, Do.NOTHING),
    ],
)
def test_a_tombstone_is_kept_for_its_time_and_a_container_for_ever(
    ended_at: float | None, there: ContainerState | None, expected: Do
) -> None:
    task = record(**DECIDED, cleaned_up=True, ended_at=ended_at)
    task = attrs.evolve(task, status=TaskStatus.TERMINATED)
    assert what_to_do(task, container(there) if there else None, NOW, BOOT) is expected


def details(code: int, **more: object) -> ContainerDetails:
    return ContainerDetails(container(ContainerState.EXITED), code, **more)  # type: ignore[arg-type]  # one helper for all fields


def test_exit_code_zero_is_success_without_a_message() -> None:
    outcome = outcome_of_exit(RECORD, details(0), "chatter", BOOT)
    assert (outcome.reason, outcome.message) == ("done_by_runner", "")


@pytest.mark.parametrize("code", [1, 7, 137, 255, -1])
def test_another_exit_code_is_an_error_with_the_last_lines(code: int) -> None:
    outcome = outcome_of_exit(RECORD, details(code), "last\nwords", BOOT)
    assert outcome.reason == "container_exited_with_error"
    assert outcome.message == "last\nwords"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "container exited with code 137"),
        ({"oom_killed": True}, "container exited with code 137: out of memory"),
        ({"error": "engine words"}, "container exited with code 137: engine words"),
    ],
)
def test_an_exit_without_output_says_at_least_the_code(
    more: dict[str, object], message: str
) -> None:
    assert outcome_of_exit(RECORD, details(137, **more), "", BOOT).message == message


@pytest.mark.parametrize(
    ("boot_id", "finished_at", "reason"),
    [
        ("another-boot", BOOT.started_at - 1, "done_by_runner"),
        ("another-boot", BOOT.started_at + 1, "executor_error"),
        ("another-boot", None, "executor_error"),
        (BOOT.id, BOOT.started_at + 1, "done_by_runner"),
        (None, BOOT.started_at + 1, "done_by_runner"),
    ],
)
def test_a_zero_the_job_did_not_say_is_no_success_after_a_reboot(
    boot_id: str | None, finished_at: float | None, reason: str
) -> None:
    record = attrs.evolve(RECORD, boot_id=boot_id)
    assert outcome_of_exit(record, details(0, finished_at=finished_at), "", BOOT).reason == reason


@pytest.mark.parametrize(
    ("finished", "reason"),
    [
        (10.0, "done_by_runner"),  # in its own boot
        (45.0, "executor_error"),  # by the engine of a boot that is over as well
        (75.0, "executor_error"),
    ],
)
def test_after_two_reboots_a_zero_counts_only_from_before_the_first_of_them(
    finished: float, reason: str
) -> None:
    earlier = (Boot("older", -9.0), Boot("its own", 0.0), Boot("between", 40.0))
    boot = Boot("this-boot", 70.0, earlier)
    record = attrs.evolve(RECORD, boot_id="its own")
    ended = attrs.evolve(details(0, finished_at=finished), started_at=5.0)
    assert outcome_of_exit(record, ended, "", boot).reason == reason


def test_a_clock_set_right_after_the_start_does_not_make_its_own_boot_a_later_one() -> None:
    boot = Boot("this-boot", 700.0, (Boot("its own", 8.0),))
    record = attrs.evolve(RECORD, boot_id="its own")
    ended = attrs.evolve(details(0, finished_at=10.0), started_at=5.0)
    assert outcome_of_exit(record, ended, "", boot).reason == "done_by_runner"


def test_a_container_that_never_started_says_how_far_it_came() -> None:
    outcome = outcome_of_unstarted(attrs.evolve(RECORD, intent=intent(Step.STARTING)), details(0))
    assert outcome.reason == "executor_error"
    assert outcome.message == "container was not started, interrupted while starting"


def test_a_container_that_never_started_and_whose_record_is_lost_says_what_was_intended() -> None:
    labelled = attrs.evolve(container(ContainerState.CREATED), labels={LABEL_INTENT: START})
    lost = TaskRecord("t1", TaskConfig(id="t1"))
    message = outcome_of_unstarted(lost, ContainerDetails(labelled, 0)).message
    assert message == "container was not started, interrupted while starting"
    plain = ContainerDetails(container(ContainerState.CREATED), 0)
    assert outcome_of_unstarted(lost, plain).message == "container was not started"


def test_a_container_whose_start_was_refused_says_so() -> None:
    outcome = outcome_of_unstarted(RECORD, details(127, error="no such file"))
    assert outcome.reason == "container_exited_with_error"
    assert "127" in outcome.message
    assert "no such file" in outcome.message


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (None, "container not found"),
        (Step.RUNNING, "container not found"),
        (Step.STARTING, "container not found"),
        (Step.PULLING, "interrupted while pulling: the shim was restarted"),
        (Step.PREPARING, "interrupted while preparing: the shim was restarted"),
        (Step.CREATING, "interrupted while creating: the shim was restarted"),
    ],
)
def test_a_task_without_a_container_says_how_far_it_came(step: Step | None, message: str) -> None:
    record = attrs.evolve(RECORD, intent=intent(step) if step else None)
    assert outcome_of_gone(record).message == message
    assert outcome_of_gone(record).reason == "executor_error"
