"""Statuses, their order, and reasons."""

from __future__ import annotations

import itertools

import pytest
from dstack_shim_contracts.statuses import SERVER_REASONS, Reason, TaskStatus, may_become

FORWARD = ["pending", "preparing", "pulling", "creating", "running", "terminated"]
PAIRS = list(itertools.product(FORWARD, FORWARD))


def test_statuses_are_the_six_words_servers_know_in_order() -> None:
    assert [status.value for status in TaskStatus] == FORWARD


@pytest.mark.parametrize(("current", "new"), PAIRS)
def test_a_task_only_goes_forward_and_never_to_itself(current: str, new: str) -> None:
    expected = FORWARD.index(current) < FORWARD.index(new)
    assert may_become(TaskStatus(current), TaskStatus(new)) is expected


@pytest.mark.parametrize("current", FORWARD[:-1])
def test_every_status_may_go_to_terminated(current: str) -> None:
    assert may_become(TaskStatus(current), TaskStatus.TERMINATED)


def test_statuses_print_as_their_words_on_every_python() -> None:
    assert f"{TaskStatus.RUNNING} {TaskStatus.PULLING!s}" == "running pulling"


def test_every_reason_the_shim_sets_is_one_servers_know() -> None:
    own = {value for name, value in vars(Reason).items() if name.isupper()}
    assert own == {
        "executor_error",
        "creating_container_error",
        "container_exited_with_error",
        "done_by_runner",
    }
    assert own <= SERVER_REASONS


def test_reasons_named_by_the_protocol_are_in_the_servers_enum() -> None:
    named = {
        "terminated_by_user",
        "terminated_by_server",
        "max_duration_exceeded",
        "log_quota_exceeded",
    }
    assert named <= SERVER_REASONS
    assert "" not in SERVER_REASONS
