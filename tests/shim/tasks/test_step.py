"""The background step over the fake engine: what it sees, what it cannot see, what it leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import pytest
from dstack_shim_contracts.api import PortMapping
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.container import LABEL_PORTS
from dstack_shim.engine.protocol import ContainerState
from dstack_shim.errors import EngineError, EngineUnreachable
from tests.lab.fake_engine import FakeContainer
from tests.shim.tasks.stage import Stage, config, stage
from tests.simulation.host import GPUS
from tests.simulation.shim import spec_of

LOST = EngineUnreachable("no answer from the engine: Connection reset by peer")
REFUSED = EngineError("server error")


@pytest.fixture
def host(tmp_path: Path) -> Stage:
    return stage(tmp_path)


def lists(host: Stage) -> int:
    return sum(call.name == "list_task_containers" for call in host.engine.calls)


# Outcomes.


@pytest.mark.parametrize(
    ("image", "reason", "message"),
    [
        ("ends", "done_by_runner", ""),
        (
            "fails",
            "container_exited_with_error",
            "\n".join(f"line {number}" for number in range(4, 9)),
        ),
        ("fails-silently", "container_exited_with_error", "container exited with code 3"),
    ],
)
def test_an_exit_ends_the_task_with_its_true_outcome_and_releases_everything(
    host: Stage, image: str, reason: str, message: str
) -> None:
    async def scene() -> None:
        await host.run_task(config(image=image))
        await asyncio.sleep(20)
        await host.round()
        info = host.core.info("t1")
        assert (info.status, info.termination_reason) == (TaskStatus.TERMINATED, reason)
        assert info.termination_message == message
        assert host.holds(config()) == set()

    host.play(scene)


def test_running_out_of_memory_is_told(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.engine.exit(host.container("t1").id, 137, oom_killed=True)
        await host.round()
        message = host.core.info("t1").termination_message
        assert message == "container exited with code 137: out of memory"

    host.play(scene)


def test_a_container_removed_by_hand_is_confirmed_and_told(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.engine.delete(host.container("t1").id)
        await host.round()
        info = host.core.info("t1")
        assert (info.termination_reason, info.termination_message) == (
            "executor_error",
            "container not found",
        )
        assert host.holds(config()) == set()

    host.play(scene)


def test_a_container_that_only_the_list_lacks_is_left_alone(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        box = host.engine.containers.pop(host.container("t1").id)
        look = host.script.hold("inspect")
        turn = asyncio.ensure_future(host.round())
        await look.reached.wait()
        host.engine.containers[box.id] = box  # a list may lag behind
        look.let_go()
        await turn
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


@pytest.mark.parametrize("state", [ContainerState.PAUSED, ContainerState.RESTARTING])
def test_a_container_that_pauses_or_restarts_is_alive(host: Stage, state: ContainerState) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.container("t1").state = state
        await host.round()
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


# Unreachable is not dead.


@pytest.mark.parametrize("error", [LOST, REFUSED])
def test_when_the_list_fails_nothing_changes(host: Stage, error: Exception) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.engine.exit(host.container("t1").id, 0)
        host.script.fail("list_task_containers", error, times=3)
        for _ in range(3):
            await host.round()
            assert host.status("t1") is TaskStatus.RUNNING
        assert [line for line in host.log if line.startswith("engine.")] == [
            f'engine.lost error="{error}"'
        ]
        await host.round()
        assert host.reason("t1") == "done_by_runner"
        assert host.log.count("engine.back containers=1") == 1

    host.play(scene)


@pytest.mark.parametrize("error", [LOST, REFUSED])
@pytest.mark.parametrize("gone", [False, True])
def test_when_the_inspect_fails_the_task_is_undecided(
    host: Stage, error: Exception, gone: bool
) -> None:
    async def scene() -> None:
        await host.run_task(config(image="fails"))
        await asyncio.sleep(20)
        if gone:
            host.engine.delete(host.container("t1").id)
        host.script.fail("inspect", error)
        await host.round()
        assert host.status("t1") is TaskStatus.RUNNING
        await host.round()
        assert host.status("t1") is TaskStatus.TERMINATED

    host.play(scene)


def test_output_out_of_reach_leaves_a_failure_undecided(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="fails"))
        await asyncio.sleep(20)
        host.script.fail("last_lines", LOST)
        await host.round()
        assert host.status("t1") is TaskStatus.RUNNING
        host.script.fail("last_lines", REFUSED)
        await host.round()
        assert host.core.info("t1").termination_message == "container exited with code 7"

    host.play(scene)


def test_a_container_that_vanishes_between_list_and_inspect_is_decided_next_round(
    host: Stage,
) -> None:
    async def scene() -> None:
        await host.run_task(config(image="ends"))
        await asyncio.sleep(20)
        look = host.script.hold("inspect")
        turn = asyncio.ensure_future(host.round())
        await look.reached.wait()
        host.engine.delete(host.container("t1").id)
        look.let_go()
        await turn
        assert host.status("t1") is TaskStatus.RUNNING
        await host.round()
        assert host.reason("t1") == "executor_error"

    host.play(scene)


def test_a_container_started_again_between_list_and_inspect_runs_on(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        box = host.container("t1")
        host.engine.exit(box.id, 1)
        look = host.script.hold("inspect")
        turn = asyncio.ensure_future(host.round())
        await look.reached.wait()
        await host.engine.start(box.id)
        look.let_go()
        await turn
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


def test_ten_minutes_without_an_engine_end_nothing(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        step = host.ask(host.core.step.run(1.0, 1.0))
        host.engine.is_unreachable = True
        await asyncio.sleep(600)
        assert host.status("t1") is TaskStatus.RUNNING
        host.engine.is_unreachable = False
        await asyncio.sleep(2)
        assert host.status("t1") is TaskStatus.RUNNING
        assert lists(host) > 600
        step.cancel()

    host.play(scene)


# Whom the step leaves alone.


def test_a_task_being_started_is_left_alone(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("create")
        await host.submit(config())
        await hold.reached.wait()
        await host.round()
        assert host.status("t1") is TaskStatus.CREATING
        hold.let_go()
        await host.started("t1")
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


def test_a_task_that_moved_while_the_list_was_under_way_is_left_for_the_next_round(
    host: Stage,
) -> None:
    async def scene() -> None:
        answer = host.script.hold("list_task_containers", after=True)
        turn = asyncio.ensure_future(host.round())
        await answer.reached.wait()
        await host.run_task(config())  # the list, asked for before, knows nothing of it
        answer.let_go()
        await turn
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


def test_a_container_that_an_old_list_shows_as_not_started_runs_on(host: Stage) -> None:
    async def scene() -> None:
        start = host.script.hold("start")
        await host.submit(config())
        await start.reached.wait()
        answer = host.script.hold("list_task_containers", after=True)
        turn = asyncio.ensure_future(host.round())
        await answer.reached.wait()
        start.let_go()
        await host.started("t1")
        answer.let_go()
        await turn
        assert host.status("t1") is TaskStatus.RUNNING
        assert host.container("t1").state.alive

    host.play(scene)


def test_one_task_with_a_fault_costs_no_other_its_round(host: Stage) -> None:
    async def scene() -> None:
        for task_id in ("t1", "t2"):
            await host.run_task(config(task_id, image="ends"))
        await asyncio.sleep(20)
        host.script.fail("inspect", ZeroDivisionError("division by zero"))
        await host.round()
        assert [host.status(task_id) for task_id in ("t1", "t2")] == [
            TaskStatus.RUNNING,
            TaskStatus.TERMINATED,
        ]
        assert [line.partition(" ")[0] for line in host.broken] == ["step.broken"]
        host.broken.clear()
        await host.round()
        assert host.status("t1") is TaskStatus.TERMINATED

    host.play(scene)


def test_fifty_running_tasks_cost_one_list_a_round_and_nothing_else(host: Stage) -> None:
    async def scene() -> None:
        await asyncio.gather(*(host.run_task(config(f"t{n}", gpu=0)) for n in range(50)))
        host.engine.calls.clear()
        for _ in range(3):
            await host.round()
        assert [call.name for call in host.engine.calls] == ["list_task_containers"] * 3

    host.play(scene)


# The loop.


def test_the_step_is_woken_and_comes_by_itself(host: Stage) -> None:
    async def scene() -> None:
        step = host.ask(host.core.step.run(30.0, 30.0))
        await asyncio.sleep(1)
        before = lists(host)
        host.core.step.wake.set()
        await asyncio.sleep(1)
        assert lists(host) == before + 1
        await asyncio.sleep(60)
        assert lists(host) == before + 3
        step.cancel()

    host.play(scene)


def test_the_step_can_be_stopped_even_at_the_instant_it_is_woken(host: Stage) -> None:
    async def scene() -> None:
        step = host.ask(host.core.step.run(30.0, 30.0))
        await asyncio.sleep(1)
        host.core.step.wake.set()
        for _ in range(2):  # the waiter is woken, and has not run yet
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait((step,), timeout=60)
        assert step.cancelled()

    host.play(scene)


def test_the_step_can_be_stopped_in_the_callback_that_wakes_it(host: Stage) -> None:
    async def scene() -> None:
        for turns in range(4):
            step = host.ask(host.core.step.run(30.0, 30.0))
            await asyncio.sleep(1)
            host.core.step.wake.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait((step,), timeout=100)
            assert step.cancelled()

    host.play(scene)


def test_a_task_whose_runner_listens_elsewhere_since_other_flags_is_shown_all_the_same(
    host: Stage,
) -> None:
    async def scene() -> None:
        one = config(network_mode="bridge")
        hold = host.script.hold("start", after=True)
        await host.submit(one)
        await hold.reached.wait()
        box = host.container("t1")
        box.spec = attrs.evolve(box.spec, labels={**box.spec.labels, LABEL_PORTS: "[1234, 22]"})
        box.ports = (PortMapping(40000, 1234),)
        await host.restart()
        info = host.core.info("t1")
        assert (info.status, info.ports) == (TaskStatus.RUNNING, box.ports)

    host.play(scene)


# Strangers.


def stranger(host: Stage, task_id: str = "t9", *, gpus: tuple[str, ...] = ()) -> FakeContainer:
    """A container as dstack's own shim makes them: no home, no labels of ours."""
    spec = spec_of(config(task_id), f"job-{task_id}", f"job-{task_id}", gpus, with_labels=False)
    box = FakeContainer(f"{9:064x}", spec, host.clock.now())
    host.engine.containers[box.id] = box
    return box


def test_a_container_nobody_knows_is_adopted_and_finishes(host: Stage) -> None:
    async def scene() -> None:
        box = stranger(host, gpus=GPUS[1:2])
        await host.engine.start(box.id)
        await host.round()
        info = host.core.info("t9")
        assert (info.status, info.container_id) == (TaskStatus.RUNNING, box.id)
        assert info.gpus_ids == host.gpus.held()["t9"] == GPUS[1:2]
        host.engine.exit(box.id, 0)
        await host.round()
        assert host.reason("t9") == "done_by_runner"
        assert (host.home / "runners" / "job-t9" / "task.json").exists()
        await host.remove("t9")
        assert host.core.list() == ()

    host.play(scene)


@pytest.mark.parametrize("ran", [True, False])
def test_a_leftover_found_while_running_makes_way_for_a_task_of_its_id(
    host: Stage, ran: bool
) -> None:
    async def scene() -> None:
        box = stranger(host)
        if ran:
            await host.engine.start(box.id)
            host.engine.exit(box.id, 0)
        await host.round()
        await host.submit(config("t9"))
        await host.round()
        assert box.id not in host.engine.containers
        assert [task.id for task in host.core.list()] == ["t9"]

    host.play(scene)


def test_a_container_of_another_home_is_left_alone(host: Stage) -> None:
    async def scene() -> None:
        one = config("t9")
        spec = spec_of(one, "job-t9", "job-t9", (), home="/home/another")
        host.engine.containers["x"] = FakeContainer("x", spec, host.clock.now())
        await host.round()
        assert host.core.list() == ()

    host.play(scene)


def test_a_stranger_whose_id_is_submitted_at_that_moment_does_not_stop_the_step(
    host: Stage,
) -> None:
    async def scene() -> None:
        await host.engine.start(stranger(host).id)
        look = host.script.hold("inspect")  # for its GPUs
        turn = asyncio.ensure_future(host.round())
        await look.reached.wait()
        submit = asyncio.ensure_future(host.submit(config("t9")))
        await asyncio.sleep(1)
        look.let_go()
        await turn
        (outcome,) = await asyncio.gather(submit, return_exceptions=True)
        assert type(outcome).__name__ == "TaskExists"
        assert len(host.core.list()) == 1

    host.play(scene)


def test_a_stranger_whose_id_was_submitted_while_the_list_was_under_way_is_no_second_task(
    host: Stage,
) -> None:
    async def scene() -> None:
        stranger(host)
        answer = host.script.hold("list_task_containers", after=True)
        turn = asyncio.ensure_future(host.round())
        await answer.reached.wait()
        writing = host.script.hold("records.create", after=True)
        submit = asyncio.ensure_future(host.submit(config("t9")))
        await writing.reached.wait()
        answer.let_go()
        await asyncio.sleep(1)
        writing.let_go()
        await submit
        await turn
        assert len(host.core.list()) == 1

    host.play(scene)


def test_a_task_removed_while_the_list_was_under_way_does_not_come_back(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        await host.terminate("t1")
        answer = host.script.hold("list_task_containers", after=True)
        turn = asyncio.ensure_future(host.round())
        await answer.reached.wait()
        await host.remove("t1")
        answer.let_go()
        await turn
        assert host.core.list() == ()

    host.play(scene)


# GPUs nobody can tell.


def test_while_the_gpus_of_one_task_are_unknown_none_is_given_out(host: Stage) -> None:
    async def scene() -> None:
        boxes = [stranger(host, task_id, gpus=(gpu,)) for task_id, gpu in (("t8", GPUS[0]),)]
        await host.engine.start(boxes[0].id)
        host.script.fail("inspect", REFUSED, times=2)
        await host.round()
        assert host.status("t8") is TaskStatus.RUNNING
        await host.submit(config("t1"))
        await host.started("t1")
        assert host.reason("t1") == "executor_error"
        await host.round()
        assert host.gpus.held() == {"t8": GPUS[:1]}
        assert (await host.run_task(config("t2"))).gpus_ids == GPUS[1:2]

    host.play(scene)


def test_gpus_that_stay_unknown_are_idle_again_once_their_task_is_released(host: Stage) -> None:
    async def scene() -> None:
        box = stranger(host, gpus=GPUS[:1])
        await host.engine.start(box.id)
        host.script.fail("inspect", REFUSED, times=1000)
        await host.round()
        assert not host.gpus.idle
        await host.terminate("t9")
        assert host.gpus.idle == GPUS

    host.play(scene)


def test_a_task_released_while_its_gpus_are_asked_for_holds_none(host: Stage) -> None:
    async def scene() -> None:
        box = stranger(host, gpus=GPUS[:1])
        await host.engine.start(box.id)
        host.script.fail("inspect", REFUSED, times=2)
        await host.round()
        look = host.script.hold("inspect", after=True)
        turn = asyncio.ensure_future(host.round())
        await look.reached.wait()
        await host.terminate("t9")
        await host.remove("t9")
        look.let_go()
        await turn
        assert host.gpus.held() == {}
        assert host.core.list() == ()

    host.play(scene)
