"""What a guarded shutdown finds in its way."""

from __future__ import annotations

from dstack_shim_contracts.api import SHIM, Component, ComponentStatus, Obstacle, TaskListItem
from dstack_shim_contracts.gate import ALWAYS_SAFE, Verdict
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.obstacles import obstacles

TARGET = Component(SHIM, "0.21.2", ComponentStatus.INSTALLED)
UNSAFE = Verdict(ALWAYS_SAFE, "not safe: installed file 0.21.2 keeps no state")


def test_a_task_under_way_is_named_with_its_status() -> None:
    task = TaskListItem("t1", TaskStatus.PULLING)
    assert obstacles([task], UNSAFE, TARGET, ()) == (
        Obstacle("task", "t1", "pulling", "task t1 is pulling"),
    )


def test_a_target_that_keeps_no_state_is_named_where_it_costs_a_running_task() -> None:
    found = obstacles([TaskListItem("t1", TaskStatus.RUNNING)], UNSAFE, TARGET, ())
    assert found[1] == Obstacle("target", SHIM, "installed", UNSAFE.reason)
    assert obstacles((), UNSAFE, TARGET, ()) == ()


def test_an_install_under_way_is_in_the_way() -> None:
    assert obstacles((), UNSAFE, TARGET, [SHIM]) == (
        Obstacle("install", SHIM, "installing", "dstack-shim is being installed"),
    )
