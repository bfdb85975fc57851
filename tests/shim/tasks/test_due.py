"""What the background step has to do though no event tells of it, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.errors import EngineError, EngineUnreachable, StoreError
from tests.lab.fake_engine import FakeContainer
from tests.shim.tasks.stage import NEVER, Stage, attended, config, lists, stage
from tests.simulation.host import GPUS
from tests.simulation.shim import spec_of

LOST = EngineUnreachable("no answer from the engine: Connection reset by peer")


@pytest.fixture
def host(tmp_path: Path) -> Stage:
    return stage(tmp_path)


def unsaved(host: Stage) -> set[str]:
    return {entry.task.id for entry in host.core.book if entry.unsaved}


def stranger(host: Stage) -> FakeContainer:
    """A container as dstack's own shim makes them: only it tells which GPUs it has."""
    one = config("t9")
    name = host.dir(one).name
    spec = spec_of(one, name, name, GPUS[:1], with_labels=False)
    box = FakeContainer(f"{9:064x}", spec, host.clock.now())
    host.engine.containers[box.id] = box
    return box


def test_a_grace_that_runs_out_is_not_overslept(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="deaf"))
        host.begin_terminate("t1", timeout=33)
        await asyncio.sleep(1)
        await host.restart()
        async with attended(host):
            await asyncio.sleep(30)
            assert host.container("t1").ended.is_set() is False
            await asyncio.sleep(3)
            assert host.container("t1").ended.is_set()
            assert host.status("t1") is TaskStatus.TERMINATED

    host.play(scene)


def test_a_stop_that_failed_is_tried_again_soon(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host):
            host.script.fail("stop", EngineError("server error"), times=2)
            with pytest.raises(EngineError):
                await host.terminate("t1")
            await asyncio.sleep(3)
            assert host.status("t1") is TaskStatus.TERMINATED

    host.play(scene)


@pytest.mark.parametrize("call", ["inspect", "last_lines"])
def test_an_undecided_end_is_asked_about_again_soon(host: Stage, call: str) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host):
            host.script.fail(call, LOST, times=2)
            host.engine.exit(host.container("t1").id, 7)
            await asyncio.sleep(3)
            assert host.reason("t1") == "container_exited_with_error"

    host.play(scene)


def test_a_list_that_failed_is_asked_for_again_soon(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host):
            host.script.fail("list_task_containers", LOST, times=2)
            host.engine.exit(host.container("t1").id, 0)
            await asyncio.sleep(3)
            assert host.reason("t1") == "done_by_runner"

    host.play(scene)


def test_a_record_that_could_not_be_written_is_written_soon(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host):
            host.script.fail("records.write", StoreError("No space left on device"), times=4)
            host.engine.exit(host.container("t1").id, 0)
            await asyncio.sleep(0.5)
            assert unsaved(host) == {"t1"}
            await asyncio.sleep(4)
            assert unsaved(host) == set()
            assert host.record(config()).termination_reason == "done_by_runner"

    host.play(scene)


def test_a_record_that_a_terminate_could_not_write_is_written_soon(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host):
            host.script.fail("records.write", StoreError("No space left on device"), times=4)
            with pytest.raises(StoreError):
                await host.terminate("t1")
            host.script.heal()
            await asyncio.sleep(2)
            assert host.record(config()).termination_reason == "terminated_by_user"

    host.play(scene)


def test_what_could_not_be_released_is_released_soon(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        async with attended(host):
            host.script.fail("volumes.release", StoreError("busy"), times=2)
            host.engine.exit(host.container("t1").id, 0)
            await asyncio.sleep(0.5)
            assert host.holds(config())
            await asyncio.sleep(3)
            assert host.holds(config()) == set()

    host.play(scene)


def test_a_start_without_an_answer_is_asked_about_soon(host: Stage) -> None:
    async def scene() -> None:
        async with attended(host):
            host.script.fail("start", LOST, after=True)
            await host.submit(config())
            await asyncio.sleep(2)
            assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


def test_a_start_that_a_crash_prevented_is_tried_again_soon(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("start")
        await host.submit(config())
        await hold.reached.wait()
        host.kill()
        host.script.fail("start", LOST, times=2)
        host.begin()
        await host.restored()
        async with attended(host):
            await asyncio.sleep(3)
            assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


def test_gpus_that_nobody_can_tell_are_asked_about_and_written_down_soon(host: Stage) -> None:
    async def scene() -> None:
        await host.engine.start(stranger(host).id)
        host.script.fail("inspect", EngineError("server error"), times=6)
        async with attended(host):
            assert set(host.gpus.doubtful) == {"t9"}
            host.script.fail("records.create", StoreError("No space left on device"), times=3)
            await asyncio.sleep(5)
            assert set(host.gpus.doubtful) == set()
            assert unsaved(host) == {"t9"}
            await asyncio.sleep(4)
            assert host.record(config("t9")).gpus == GPUS[:1]

    host.play(scene)


def test_a_task_that_moved_during_the_round_that_shows_its_end_is_looked_at_again(
    host: Stage,
) -> None:
    async def scene() -> None:
        box = stranger(host)
        await host.engine.start(box.id)
        host.script.fail("inspect", EngineError("server error"), times=6)
        async with attended(host, interval=30.0, quiet=NEVER):
            host.script.heal()
            host.engine.exit(box.id, 0)  # the round first settles its GPUs
            await asyncio.sleep(31)
            assert host.reason("t9") == "done_by_runner"

    host.play(scene)


def test_a_pull_of_many_minutes_costs_no_rounds(host: Stage) -> None:
    async def scene() -> None:
        async with attended(host):
            hold = host.script.hold("pull")
            await host.submit(config(image="remote"))
            await hold.reached.wait()
            before = lists(host)
            await asyncio.sleep(600)
            assert lists(host) - before == 60
            hold.let_go()
            await host.started("t1")

    host.play(scene)
