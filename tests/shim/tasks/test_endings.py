"""Ends of tasks: terminate and remove, landing wherever they like."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.protocol import ContainerState
from dstack_shim.errors import (
    EngineError,
    EngineUnreachable,
    ResourceError,
    StoreError,
    TaskNotFound,
    TaskNotTerminated,
)
from tests.shim.tasks.stage import Stage, config, soon, stage
from tests.simulation.host import GPUS

FULL = StoreError("cannot write task.json: No space left on device")
LOST = EngineUnreachable("no answer from the engine: Connection reset by peer")
REASON = "terminated_by_user"


@pytest.fixture
def host(tmp_path: Path) -> Stage:
    return stage(tmp_path)


def assert_all_over(host: Stage, task_id: str = "t1", reason: str = REASON) -> None:
    """Terminated as asked, nothing runs, nothing is held, and the disk says so."""
    one = config(task_id)
    assert (host.status(task_id), host.reason(task_id)) == (TaskStatus.TERMINATED, reason)
    assert not any(box.state.alive for box in host.containers(task_id))
    assert host.holds(one) == set()
    record = host.record(one)
    assert (record.terminated, record.termination_reason) == (True, reason)
    assert record.cleaned_up
    assert record.ended_at is not None


# Terminate while a start is in flight.


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("records.write", False),
        ("has_image", False),
        ("create", False),
        ("create", True),
        ("start", False),
        ("start", True),
    ],
)
def test_a_terminate_that_lands_in_a_start_waits_for_it_and_leaves_nothing(
    host: Stage, call: str, after: bool
) -> None:
    async def scene() -> None:
        hold = host.script.hold(call, after=after)
        await host.submit(config())
        await hold.reached.wait()
        end = asyncio.ensure_future(host.terminate("t1", REASON, "enough"))
        if call != "records.write":  # then the terminate's own record waits behind it
            await soon(lambda: host.core.book.get("t1").task.over)
        assert not end.done()
        hold.let_go()
        info = await end
        assert (info.status, info.termination_message) == (TaskStatus.TERMINATED, "enough")
        assert_all_over(host)

    host.play(scene)


@pytest.mark.parametrize(("call", "after"), [("keys.acquire", False), ("volumes.acquire", True)])
def test_a_terminate_cuts_short_what_waits_for_a_disk_or_a_file(
    host: Stage, call: str, after: bool
) -> None:
    async def scene() -> None:
        hold = host.script.hold(call, after=after)
        await host.submit(config())
        await hold.reached.wait()
        begun = host.loop.time()
        await host.terminate("t1", REASON)
        assert host.loop.time() - begun < 1
        assert_all_over(host)

    host.play(scene)


def test_a_stop_of_the_shim_ends_what_waits_for_a_disk_and_says_so(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("volumes.acquire", after=True)
        await host.submit(config())
        await hold.reached.wait()
        await host.core.drain(5)
        assert_all_over(host, reason="executor_error")
        message = host.core.info("t1").termination_message
        assert message == "interrupted while preparing: the shim was stopped"

    host.play(scene)


def test_a_terminate_cuts_a_pull_within_a_second(host: Stage) -> None:
    async def scene() -> None:
        await host.submit(config(image="remote"))
        await soon(lambda: host.status("t1") is TaskStatus.PULLING)
        begun = host.loop.time()
        await host.terminate("t1")
        assert host.loop.time() - begun < 1
        assert_all_over(host)

    host.play(scene)


def test_a_terminate_while_the_answer_of_a_create_is_lost_finds_the_container(
    host: Stage,
) -> None:
    async def scene() -> None:
        hold = host.script.hold("create", after=True)
        host.script.fail("create", LOST, after=True)
        await host.submit(config())
        await hold.reached.wait()
        end = asyncio.ensure_future(host.terminate("t1"))
        await soon(lambda: host.core.book.get("t1").task.over)
        hold.let_go()
        await end
        assert_all_over(host)
        await host.remove("t1")
        assert host.engine.containers == {}

    host.play(scene)


@pytest.mark.parametrize("lost", [False, True])
def test_a_terminate_while_a_second_attempt_is_created_finds_that_one(
    host: Stage, lost: bool
) -> None:
    async def scene() -> None:
        hold = host.script.hold("remove", after=True)
        await host.submit(config(image="cannot-start"))
        await hold.reached.wait()
        second = host.script.hold("create", after=True)
        hold.let_go()
        await second.reached.wait()
        end = asyncio.ensure_future(host.terminate("t1"))
        await soon(lambda: host.core.book.get("t1").task.over)
        if lost:
            host.script.fail("create", LOST, after=True)
        second.let_go()
        await end
        assert_all_over(host)
        await host.remove("t1")
        assert host.engine.containers == {}
        await host.round()
        assert host.core.list() == ()

    host.play(scene)


def test_a_terminate_right_behind_its_submit_comes_before_any_container(host: Stage) -> None:
    async def scene() -> None:
        await host.submit(config())
        await host.terminate("t1")
        assert_all_over(host)
        assert host.engine.containers == {}

    host.play(scene)


def test_a_start_the_step_makes_up_for_is_waited_for_like_any_other(host: Stage) -> None:
    async def scene() -> None:
        host.script.fail("start", LOST)
        await host.run_task(config())
        hold = host.script.hold("start")
        late = asyncio.ensure_future(host.round())
        await hold.reached.wait()
        end = asyncio.ensure_future(host.terminate("t1"))
        await soon(lambda: host.core.book.get("t1").task.over)
        assert not end.done()
        hold.let_go()
        await asyncio.gather(end, late)
        assert_all_over(host)

    host.play(scene)


def test_a_start_the_step_makes_up_for_goes_on_if_the_step_is_stopped(host: Stage) -> None:
    async def scene() -> None:
        host.script.fail("start", LOST)
        await host.run_task(config())
        hold = host.script.hold("start")
        late = host.ask(host.core.step.round())
        await hold.reached.wait()
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        end = asyncio.ensure_future(host.terminate("t1"))
        await soon(lambda: host.core.book.get("t1").task.over)
        assert not end.done()
        hold.let_go()
        await end
        assert_all_over(host)

    host.play(scene)


def test_a_terminate_just_before_the_step_would_start_a_container_wins(host: Stage) -> None:
    async def scene() -> None:
        host.script.fail("start", LOST)
        await host.run_task(config())
        host.core.book.get("t1").unsaved = True
        hold = host.script.hold("records.write")
        late = asyncio.ensure_future(host.round())
        await hold.reached.wait()  # the step saves first, then looks at the task
        end = asyncio.ensure_future(host.terminate("t1"))
        await asyncio.sleep(1)
        hold.let_go()
        await asyncio.gather(late, end)
        assert_all_over(host)
        assert host.container("t1").starts == 0

    host.play(scene)


# Graces.


def test_a_grace_is_given_in_full_and_a_second_terminate_without_one_cuts_it_short(
    host: Stage,
) -> None:
    async def scene() -> None:
        await host.run_task(config(image="deaf"))
        first = asyncio.ensure_future(host.terminate("t1", "aborted_by_user", "", 3600))
        await asyncio.sleep(1000)
        assert host.container("t1").state is ContainerState.RUNNING
        await host.terminate("t1", REASON, "", 0)
        await first
        assert_all_over(host, reason="aborted_by_user")
        assert host.loop.time() < 1100

    host.play(scene)


def test_a_second_terminate_cannot_make_a_grace_longer(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="deaf"))
        host.script.fail("stop", LOST)
        with pytest.raises(EngineUnreachable):
            await host.terminate("t1", REASON, "", 5)
        begun = host.loop.time()
        await host.terminate("t1", "aborted_by_user", "", 3600)
        assert host.loop.time() - begun <= 5
        assert_all_over(host)

    host.play(scene)


# Reasons.


def test_the_first_reason_stays_with_its_message(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        await host.terminate("t1", "max_duration_exceeded", "too long")
        info = await host.terminate("t1", REASON, "me")
        assert info.termination_reason == "max_duration_exceeded"
        assert info.termination_message == "too long"

    host.play(scene)


def test_an_empty_reason_ends_a_task_and_leaves_room_for_one(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        info = await host.terminate("t1", "", "")
        assert (info.status, info.termination_reason) == (TaskStatus.TERMINATED, "")
        assert_all_over(host, reason="")
        info = await host.terminate("t1", REASON, "late")
        assert (info.termination_reason, info.termination_message) == (REASON, "late")
        assert_all_over(host)

    host.play(scene)


def test_an_exit_seen_after_an_empty_reason_does_not_fill_it(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.script.fail("stop", LOST)
        with pytest.raises(EngineUnreachable):
            await host.terminate("t1", "", "")
        host.engine.exit(host.container("t1").id, 0)
        await host.round()
        assert_all_over(host, reason="")

    host.play(scene)


def test_an_outcome_that_is_recorded_is_not_replaced_by_a_terminate(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="fails"))
        await asyncio.sleep(20)
        await host.round()
        info = await host.terminate("t1")
        assert info.termination_reason == "container_exited_with_error"

    host.play(scene)


# Terminates that fail.


def test_an_engine_that_cannot_stop_is_told_and_the_step_goes_on_trying(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.script.fail("stop", EngineError("tried, and failed"), times=2)
        with pytest.raises(EngineError, match="tried, and failed"):
            await host.terminate("t1")
        assert host.status("t1") is TaskStatus.RUNNING
        assert host.record(config()).termination_reason == REASON
        await host.round()
        assert host.status("t1") is TaskStatus.RUNNING
        await host.round()
        assert_all_over(host)

    host.play(scene)


def test_what_cannot_be_released_is_told_and_tried_again(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.script.fail("volumes.release", ResourceError("target is busy"), times=2)
        with pytest.raises(ResourceError, match="volumes: target is busy"):
            await host.terminate("t1")
        assert host.status("t1") is TaskStatus.TERMINATED
        assert host.holds(config()) == {"volume-of-t1"}
        await host.round()
        assert host.holds(config()) == {"volume-of-t1"}
        await host.round()
        assert_all_over(host)

    host.play(scene)


def test_a_terminate_of_a_task_that_was_not_released_tries_that_again(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.script.fail("keys.release", ResourceError("read-only file system"))
        with pytest.raises(ResourceError, match="host_keys: read-only"):
            await host.terminate("t1")
        await host.terminate("t1", "aborted_by_user", "", 5)
        assert_all_over(host)

    host.play(scene)


def test_a_remove_of_a_task_that_was_not_released_releases_it_first(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.script.fail("keys.release", ResourceError("read-only file system"), times=2)
        with pytest.raises(ResourceError):
            await host.terminate("t1")
        with pytest.raises(ResourceError):
            await host.remove("t1")
        assert len(host.core.list()) == 1
        await host.remove("t1")
        assert (host.core.list(), host.holds(config())) == ((), set())

    host.play(scene)


def test_a_full_disk_keeps_no_container_running_and_is_told(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.script.fail("records.write", FULL, times=9)
        with pytest.raises(StoreError, match="No space left"):
            await host.terminate("t1")
        assert host.status("t1") is TaskStatus.TERMINATED
        assert not host.container("t1").state.alive
        assert host.host.keys["alice"] == ()
        assert host.host.mounted == {}
        host.script.heal()
        await host.round()
        await host.round()
        assert_all_over(host)

    host.play(scene)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_full_disk_at_any_record_of_an_end_is_made_up_for(host: Stage, nth: int) -> None:
    async def scene() -> None:
        await host.run_task(config())
        hold = host.script.hold("stop")
        if nth == 1:
            host.script.fail("records.write", FULL)
        end = asyncio.ensure_future(host.terminate("t1"))
        await hold.reached.wait()
        if nth == 2:
            host.script.fail("records.write", FULL)
        last = host.script.hold("keys.release")
        hold.let_go()
        await last.reached.wait()
        if nth == 3:
            host.script.fail("records.write", FULL)
        last.let_go()
        (outcome,) = await asyncio.gather(end, return_exceptions=True)
        assert isinstance(outcome, StoreError) == (nth == 3)  # a later write made up for it
        await host.round()
        await host.round()
        assert_all_over(host)

    host.play(scene)


def test_a_gpu_is_idle_again_only_once_that_is_on_disk(host: Stage) -> None:
    """A crash in between would have two tasks claim it."""

    async def scene() -> None:
        await host.run_task(config())
        keys = host.script.hold("keys.release", after=True)
        host.begin_terminate("t1")
        await keys.reached.wait()
        write = host.script.hold("records.write")
        keys.let_go()
        await write.reached.wait()
        assert host.gpus.held() == {"t1": (GPUS[0],)}
        write.let_go()
        await soon(lambda: host.gpus.held() == {})
        assert host.record(config()).cleaned_up

    host.play(scene)


# Remove.


def test_a_remove_that_comes_late_takes_nothing_of_the_next_task_of_its_id(host: Stage) -> None:
    """A remove that was asked for twice waited for the first one; the id was submitted anew."""

    async def scene() -> None:
        await host.run_task(config(image="broken"))
        old = host.core.book.get("t1")
        await host.remove("t1")
        await host.run_task(config())
        with pytest.raises(TaskNotFound):
            await host.ask(host.core._finish.remove(old))
        assert host.container("t1").state.alive
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


def test_a_removed_task_leaves_nothing_and_its_id_is_free_again(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        await host.terminate("t1")
        await host.remove("t1")
        assert host.core.list() == ()
        assert host.engine.containers == {}
        assert not host.dir(config()).exists()
        with pytest.raises(TaskNotFound):
            await host.remove("t1")
        assert (await host.run_task(config())).status is TaskStatus.RUNNING

    host.play(scene)


def test_a_remove_before_the_end_is_refused(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        with pytest.raises(TaskNotTerminated, match="running"):
            await host.remove("t1")
        assert host.container("t1").state is ContainerState.RUNNING

    host.play(scene)


def test_a_remove_while_starting_is_refused(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("start")
        await host.submit(config())
        await hold.reached.wait()
        with pytest.raises(TaskNotTerminated, match="creating"):
            await host.remove("t1")
        hold.let_go()
        await host.started("t1")
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


def test_a_remove_while_terminating_is_refused_until_the_container_has_ended(
    host: Stage,
) -> None:
    async def scene() -> None:
        await host.run_task(config())
        hold = host.script.hold("stop")
        end = asyncio.ensure_future(host.terminate("t1"))
        await hold.reached.wait()
        with pytest.raises(TaskNotTerminated):
            await host.remove("t1")
        hold.let_go()
        await end
        await host.remove("t1")

    host.play(scene)


def test_a_remove_while_things_are_released_waits_for_that(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        hold = host.script.hold("volumes.release")
        end = asyncio.ensure_future(host.terminate("t1"))
        await hold.reached.wait()
        away = asyncio.ensure_future(host.remove("t1"))
        await asyncio.sleep(1)
        assert not away.done()
        hold.let_go()
        await asyncio.gather(end, away, return_exceptions=True)
        assert host.core.list() == ()
        assert host.holds(config()) == set()
        assert host.host.mounted == {}

    host.play(scene)


def test_of_two_removes_at_once_the_second_finds_nothing(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        await host.terminate("t1")
        outcomes = await asyncio.gather(
            host.remove("t1"), host.remove("t1"), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [type(None), TaskNotFound]

    host.play(scene)


@pytest.mark.parametrize(
    ("call", "error"), [("remove", EngineError("busy")), ("records.forget", FULL)]
)
def test_a_remove_that_fails_leaves_the_task_and_can_be_repeated(
    host: Stage, call: str, error: Exception
) -> None:
    async def scene() -> None:
        await host.run_task(config())
        await host.terminate("t1")
        host.script.fail(call, error)
        with pytest.raises(type(error)):
            await host.remove("t1")
        assert host.status("t1") is TaskStatus.TERMINATED
        await host.remove("t1")
        assert host.core.list() == ()

    host.play(scene)


def test_a_terminate_that_waited_behind_a_remove_touches_nothing_of_a_new_task(
    host: Stage,
) -> None:
    async def scene() -> None:
        await host.run_task(config())
        await host.terminate("t1", "", "")
        hold = host.script.hold("records.forget", after=True)
        away = asyncio.ensure_future(host.remove("t1"))
        await hold.reached.wait()
        late = asyncio.ensure_future(host.terminate("t1", REASON, ""))
        await asyncio.sleep(1)
        hold.let_go()
        await away
        await host.run_task(config())
        with pytest.raises(TaskNotFound):
            await late
        assert host.status("t1") is TaskStatus.RUNNING
        assert host.record(config()).termination_reason == ""

    host.play(scene)


def test_two_tasks_with_one_volume_and_key_that_end_at_once_leave_neither(host: Stage) -> None:
    async def scene() -> None:
        volumes = config("shared").volumes
        for task_id in ("t1", "t2", "t3"):
            await host.run_task(config(task_id, volumes=volumes, host_ssh_keys=("shared",)))
        await host.terminate("t3")
        assert list(host.host.mounted) == ["volume-of-shared"]
        assert host.host.keys["alice"] == ("shared",)
        await asyncio.gather(host.terminate("t1"), host.terminate("t2"))
        assert not host.host.mounted
        assert not host.host.keys["alice"]

    host.play(scene)
