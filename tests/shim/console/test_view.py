"""Records, containers and the shim's word put together."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from dstack_shim_contracts.api import (
    HealthcheckResponse,
    ImagePullProgress,
    PortMapping,
    TaskConfig,
    TaskListItem,
)
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.record import Intent, TaskRecord
from dstack_shim_contracts.statuses import TaskStatus
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.console.sources import ShimSays, Sources
from dstack_shim.console.view import NoSuchTask, find, short_ids, tasks_of
from dstack_shim.engine.protocol import Container, ContainerState
from dstack_shim.records import FoundDir, RecordKind

HOME = "/home"
RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED
PROGRESS = ImagePullProgress(1, 1, 4, True)


def record(task_id: str, **fields: object) -> FoundDir:
    config = TaskConfig(id=task_id, name="job", image_name="image", network_mode="bridge")
    whole = TaskRecord(task_id, **{"config": config, "intent": Intent("running", 5.0), **fields})  # type: ignore[arg-type]  # any of its fields
    return FoundDir(container_name("job", task_id), RecordKind.GOOD, whole)


def container(
    task_id: str, state: ContainerState = ContainerState.RUNNING, home: str = HOME
) -> Container:
    return Container(
        id=f"c-{task_id}",
        name=container_name("job", task_id),
        state=state,
        created=7.0,
        task_id=task_id,
        home=home,
        ports=(PortMapping(32768, 10999),),
        network_mode="bridge",
    )


def says(**statuses: TaskStatus) -> ShimSays:
    items = tuple(TaskListItem(task_id, status) for task_id, status in statuses.items())
    return ShimSays(HealthcheckResponse("dstack-shim", "1"), items, {"t1": PROGRESS})


def sources(
    *found: FoundDir,
    containers: tuple[Container, ...] | None = (),
    shim: ShimSays | None = None,
) -> Sources:
    return Sources(Path(HOME), 1, found, shim, containers)


def test_a_record_and_its_container_are_one_task() -> None:
    (task,) = tasks_of(sources(record("t1"), containers=(container("t1"),)))
    assert (task.status, task.hint, task.since) == (RUNNING, "", 5.0)
    assert task.ports == (PortMapping(32768, 10999),)
    assert task.container is not None


@pytest.mark.parametrize(
    ("containers", "hint"),
    [
        ((), "its container is gone"),
        ((container("t1", ContainerState.EXITED),), "its container is exited"),
        ((container("t1", ContainerState.PAUSED),), ""),
        (None, ""),
    ],
)
def test_without_a_shim_its_container_tells_what_is_to_come(
    containers: tuple[Container, ...] | None, hint: str
) -> None:
    (task,) = tasks_of(sources(record("t1"), containers=containers))
    assert (task.status, task.outcome) == (RUNNING, hint)


def test_the_shim_s_word_on_a_status_counts() -> None:
    here = sources(record("t1"), record("t2"), shim=says(t1=TaskStatus.PULLING, t3=RUNNING))
    tasks = {task.id: task for task in tasks_of(here)}
    assert {task_id: task.status for task_id, task in tasks.items()} == {
        "t1": TaskStatus.PULLING,
        "t3": RUNNING,
    }
    assert tasks["t1"].progress == PROGRESS
    assert tasks["t1"].hint == ""


def test_a_container_without_a_record_is_a_task_one_of_another_home_is_none() -> None:
    here = sources(containers=(container("t1"), container("t2", home="/other")))
    (task,) = tasks_of(here)
    assert (task.id, task.config.name, task.since) == ("t1", "job", 7.0)


def test_those_that_go_on_come_first_then_the_newest() -> None:
    ended = {"terminated": True, "termination_reason": "x"}
    here = sources(
        record("old", intent=Intent("running", 1.0)),
        record("new", intent=Intent("running", 2.0)),
        record("over", ended_at=9.0, **ended),
        record("untold", **ended),
    )
    assert [task.id for task in tasks_of(here)] == ["new", "old", "over", "untold"]


def test_an_end_is_told_with_its_reason() -> None:
    (task,) = tasks_of(sources(record("t1", termination_reason="r", termination_message="m")))
    assert task.outcome == "r: m"
    (task,) = tasks_of(sources(record("t1", terminated=True)))
    assert task.outcome == "ended without a reason"


def test_a_word_finds_an_id_before_a_beginning_before_a_name() -> None:
    found = [record(task_id) for task_id in ("a", "ab", "abc")]
    other = record("x")
    assert other.record is not None
    named = attrs.evolve(
        other, record=attrs.evolve(other.record, config=TaskConfig(id="x", name="b"))
    )
    tasks = tasks_of(sources(*found, named))
    assert find(tasks, "a").id == "a"
    assert find(tasks, "abc").id == "abc"
    assert find(tasks, "b").id == "x"
    assert find(tasks, container_name("job", "ab")).id == "ab"
    for word, why in (("job", "fits 3 tasks"), ("", "no task has"), ("z", "no task has")):
        with pytest.raises(NoSuchTask, match=why):
            find(tasks, word)


@given(st.lists(st.text("ab", min_size=1, max_size=6), unique=True), st.integers(1, 4))
def test_short_ids_tell_tasks_apart(ids: list[str], least: int) -> None:
    short = short_ids(ids, least)
    assert set(short) == set(ids)
    for task_id in ids:
        assert task_id.startswith(short[task_id])
        assert len(short[task_id]) >= min(least, len(task_id))
        longer = [other for other in ids if other != task_id and other.startswith(short[task_id])]
        assert not longer or short[task_id] == task_id
