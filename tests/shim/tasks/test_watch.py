"""The engine's events and the step they wake, in virtual time.

Counted are rounds, which are lists of the engine; how long something took is virtual and exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.protocol import ContainerEvent
from dstack_shim.errors import EngineError, EngineUnreachable
from dstack_shim.tasks.watch import LONGEST_PAUSE, PATIENCE
from tests.shim.tasks.stage import NEVER, OFTEN, SELDOM, Stage, attended, config, lists, stage

LOST = EngineUnreachable("no answer from the engine: Connection reset by peer")


@pytest.fixture
def host(tmp_path: Path) -> Stage:
    return stage(tmp_path)


def count(host: Stage, name: str) -> int:
    return sum(call.name == name for call in host.engine.calls)


def told(host: Stage, event: str) -> list[str]:
    return [line for line in host.log if line.startswith(event)]


# Woken.


def test_an_end_is_seen_at_once(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host, NEVER, NEVER):
            host.engine.exit(host.container("t1").id, 0)
            await asyncio.sleep(0.01)
            assert host.reason("t1") == "done_by_runner"

    host.play(scene)


def test_a_container_removed_by_hand_is_seen_at_once(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host, NEVER, NEVER):
            host.engine.delete(host.container("t1").id)
            await asyncio.sleep(0.01)
            assert host.reason("t1") == "executor_error"

    host.play(scene)


def test_an_end_is_seen_at_once_though_the_list_is_behind(host: Stage) -> None:
    async def scene() -> None:
        host.engine.list_lags = 5.0
        await host.run_task(config())
        async with attended(host, NEVER, NEVER):
            host.engine.exit(host.container("t1").id, 7)
            await asyncio.sleep(0.01)
            assert host.core.info("t1").termination_message == "container exited with code 7"

    host.play(scene)


def test_a_container_started_again_by_hand_runs_on(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host):
            box = host.container("t1")
            answer = host.script.hold("list_task_containers")
            host.engine.exit(box.id, 0)
            await answer.reached.wait()
            await host.engine.start(box.id)
            answer.let_go()
            await asyncio.sleep(5)
            host.engine.calls.clear()
            await asyncio.sleep(60)
            assert host.status("t1") is TaskStatus.RUNNING
            assert len(host.engine.calls) == lists(host) == 6

    host.play(scene)


def test_an_end_during_the_start_is_seen_when_the_start_is_over(host: Stage) -> None:
    async def scene() -> None:
        async with attended(host, NEVER, NEVER):
            answer = host.script.hold("start", after=True)
            await host.submit(config())
            await answer.reached.wait()
            host.engine.exit(host.container("t1").id, 0)
            await asyncio.sleep(1)
            answer.let_go()
            await asyncio.sleep(0.01)
            assert host.reason("t1") == "done_by_runner"

    host.play(scene)


def test_an_end_while_a_round_is_under_way_is_seen_by_the_next(host: Stage) -> None:
    async def scene() -> None:
        for task_id in ("t1", "t2"):
            await host.run_task(config(task_id))
        async with attended(host, NEVER, NEVER):
            answer = host.script.hold("list_task_containers", after=True)
            host.engine.exit(host.container("t1").id, 0)
            await answer.reached.wait()
            host.engine.exit(host.container("t2").id, 0)
            answer.let_go()
            await asyncio.sleep(0.01)
            assert [host.reason(task) for task in ("t1", "t2")] == ["done_by_runner"] * 2

    host.play(scene)


def test_two_hundred_ends_at_once_are_two_rounds(host: Stage) -> None:
    async def scene() -> None:
        for number in range(200):
            await host.run_task(config(f"t{number}", gpu=0))
        async with attended(host):
            before = lists(host)
            for number in range(200):
                host.engine.exit(host.container(f"t{number}").id, 0)
            await asyncio.sleep(5)
            assert {task.status for task in host.core.list()} == {TaskStatus.TERMINATED}
            assert lists(host) - before <= 2

    host.play(scene)


# How often it looks.


@pytest.mark.parametrize("tasks", [0, 50])
def test_while_nothing_happens_an_hour_is_six_requests_a_minute(host: Stage, tasks: int) -> None:
    async def scene() -> None:
        for number in range(tasks):
            await host.run_task(config(f"t{number}", gpu=0))
        async with attended(host):
            await asyncio.sleep(60)
            host.engine.calls.clear()
            await asyncio.sleep(3600)
            assert len(host.engine.calls) == lists(host) == 360

    host.play(scene)


def test_without_events_it_looks_every_second(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.script.fail("events", EngineError("no such path: /events"), times=1 << 30)
        async with attended(host):
            before = lists(host)
            await asyncio.sleep(60)
            assert 59 <= lists(host) - before <= 61
            assert count(host, "events") <= 60 / LONGEST_PAUSE + 10
            host.engine.exit(host.container("t1").id, 0)
            await asyncio.sleep(1.01)
            assert host.reason("t1") == "done_by_runner"
        assert len(told(host, "events.lost")) == 1

    host.play(scene)


def test_while_the_engine_does_not_answer_it_looks_every_second(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("events")
        async with attended(host):
            before = lists(host)
            await asyncio.sleep(60)
            assert 59 <= lists(host) - before <= 61
            hold.let_go()
            await asyncio.sleep(2)
            before = lists(host)
            await asyncio.sleep(60)
            assert lists(host) - before == 6

    host.play(scene)


# Streams that end.


@pytest.mark.parametrize("error", [None, LOST])
def test_nothing_is_lost_between_two_streams(host: Stage, error: EngineError | None) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host, NEVER, NEVER):
            await asyncio.sleep(100)
            host.engine.end_streams(error)
            host.engine.exit(host.container("t1").id, 0)
            await asyncio.sleep(1)
            assert host.reason("t1") == "done_by_runner"
            assert len(told(host, "events.followed")) == 2

    host.play(scene)


def test_a_restarted_engine_that_remembers_nothing_is_looked_at(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host, NEVER, NEVER):
            await asyncio.sleep(100)
            host.engine.exit(host.container("t1").id, 0)
            host.engine.restart()
            await asyncio.sleep(1)
            assert host.reason("t1") == "done_by_runner"

    host.play(scene)


def test_the_past_is_asked_for_from_the_last_event_on(
    host: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        asked: list[float] = []
        real = host.engine.events

        def events(since: float, *callbacks: Any) -> Coroutine[Any, Any, None]:
            asked.append(since)
            return real(since, *callbacks)

        monkeypatch.setattr(host.engine, "events", events)
        begun = host.clock.now()
        async with attended(host):
            await asyncio.sleep(50)
            await host.run_task(config())
            happened = host.clock.now()
            await asyncio.sleep(50)
            host.engine.end_streams()
            await asyncio.sleep(1)
        assert begun - 2 < asked[0] < begun
        assert happened - 2 < asked[1] < happened

    host.play(scene)


def test_streams_that_end_at_once_are_asked_for_less_and_less_often(
    host: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        real = host.engine.events

        def events(*arguments: Any) -> Coroutine[Any, Any, None]:
            asyncio.get_running_loop().call_soon(host.engine.end_streams)
            return real(*arguments)

        monkeypatch.setattr(host.engine, "events", events)
        async with attended(host):
            await asyncio.sleep(60)
            before = count(host, "events")
            await asyncio.sleep(60)
            assert count(host, "events") - before <= 60 / LONGEST_PAUSE + 1

    host.play(scene)


def test_a_fault_in_following_costs_no_round(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="ends"))
        host.script.fail("events", ZeroDivisionError("division by zero"))
        async with attended(host):
            await asyncio.sleep(12)
            assert host.reason("t1") == "done_by_runner"
        assert [line.partition(" ")[0] for line in host.broken] == ["events.broken"]
        host.broken.clear()

    host.play(scene)


def test_followed_no_more_nobody_is_told(host: Stage) -> None:
    async def scene() -> None:
        async with attended(host):
            assert len(host.engine.followers) == 1
        assert host.engine.followers == []

    host.play(scene)


# Streams that are silent though something happens.


def test_a_stream_that_is_silent_about_an_end_is_not_relied_on(
    host: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        for task_id in ("t1", "t2"):
            await host.run_task(config(task_id))
        async with attended(host):
            await asyncio.sleep(30)
            silent = host.engine.followers[0]
            monkeypatch.setattr(host.engine, "tell", lambda event: None)
            host.engine.exit(host.container("t1").id, 0)
            await asyncio.sleep(SELDOM + PATIENCE + 1)
            assert host.reason("t1") == "done_by_runner"
            assert silent not in host.engine.followers
            assert len(told(host, 'events.lost why="it is silent')) == 1
            # The next stream has told nothing new yet.
            host.engine.exit(host.container("t2").id, 0)
            await asyncio.sleep(OFTEN + 0.01)
            assert host.reason("t2") == "done_by_runner"

    host.play(scene)


def test_a_doubted_stream_is_relied_on_once_it_tells_something_new(
    host: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host):
            await asyncio.sleep(30)
            monkeypatch.setattr(host.engine, "tell", lambda event: None)
            host.engine.exit(host.container("t1").id, 0)
            await asyncio.sleep(20)
            monkeypatch.undo()
            before = lists(host)
            await asyncio.sleep(30)
            assert lists(host) - before >= 29
            await host.run_task(config("t2"))
            await asyncio.sleep(5)
            before = lists(host)
            await asyncio.sleep(60)
            assert lists(host) - before == 6

    host.play(scene)


def test_an_event_that_is_a_little_late_raises_no_doubt(
    host: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host):
            await asyncio.sleep(30)
            real = host.engine.tell
            late: list[ContainerEvent] = []
            monkeypatch.setattr(host.engine, "tell", late.append)
            host.engine.exit(host.container("t1").id, 0)
            host.core.step.wake.set()
            await asyncio.sleep(PATIENCE / 2)
            assert host.reason("t1") == "done_by_runner"
            for event in late:
                real(event)
            await asyncio.sleep(60)
        assert told(host, "events.lost") == []

    host.play(scene)


def test_what_ended_before_the_stream_began_raises_no_doubt(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        await host.run_task(config("t2"))
        host.engine.exit(host.container("t1").id, 0)
        host.engine.delete(host.container("t2").id)
        host.engine.past.clear()
        await asyncio.sleep(100)
        async with attended(host):
            await asyncio.sleep(60)
            assert {task.status for task in host.core.list()} == {TaskStatus.TERMINATED}
        assert told(host, "events.lost") == []

    host.play(scene)


def test_an_event_that_comes_twice_costs_a_round_and_nothing_else(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host, NEVER, NEVER):
            box = host.container("t1")
            host.engine.exit(box.id, 0)
            await asyncio.sleep(1)
            before = len(host.engine.calls)
            host.engine.tell(ContainerEvent(box.id, "die", host.clock.now()))
            await asyncio.sleep(1)
            assert [call.name for call in host.engine.calls[before:]] == ["list_task_containers"]

    host.play(scene)
