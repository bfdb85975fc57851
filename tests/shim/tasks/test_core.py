"""The core over the tests' fake engine and the real store: submits, starts, and their failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import pytest
from dstack_shim_contracts.record import Step
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.protocol import ContainerSpec, ContainerState
from dstack_shim.errors import (
    EngineError,
    EngineUnreachable,
    ResourceError,
    ShuttingDown,
    StoreError,
    TaskExists,
    TaskNotFound,
)
from tests.lab.fake_engine import FakeContainer
from tests.shim.tasks.stage import Stage, config, soon, stage
from tests.simulation.host import GPUS
from tests.simulation.shim import RUNNER_PORT, spec_of

FULL = StoreError("cannot write task.json: No space left on device")
LOST = EngineUnreachable("no answer from the engine: Connection reset by peer")


@pytest.fixture
def host(tmp_path: Path) -> Stage:
    return stage(tmp_path)


# Submit.


def test_a_submitted_task_is_on_disk_before_it_is_answered_and_then_starts(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("create")
        await host.submit(config())
        assert host.record(config()).id == "t1"
        await hold.reached.wait()
        assert host.status("t1") is TaskStatus.CREATING
        assert host.record(config()).intent.step is Step.CREATING  # type: ignore[union-attr]  # written just before
        hold.let_go()
        await host.started("t1")
        info = host.core.info("t1")
        assert info.status is TaskStatus.RUNNING
        assert (info.ports, info.container_id) == ((), host.container("t1").id)
        assert info.gpus_ids == GPUS[:1]
        assert host.holds(config()) == {GPUS[0], "volume-of-t1", "key-of-t1"}
        assert [item.id for item in host.core.list()] == ["t1"]

    host.play(scene)


def test_a_submit_that_cannot_be_written_down_is_refused_and_leaves_nothing(host: Stage) -> None:
    async def scene() -> None:
        host.script.fail("records.create", FULL)
        with pytest.raises(StoreError, match="No space left"):
            await host.submit(config())
        assert host.core.list() == ()
        assert not host.dir(config()).exists()
        await host.submit(config())  # and may be tried again

    host.play(scene)


def test_of_two_submits_of_one_id_at_once_one_is_accepted(host: Stage) -> None:
    async def scene() -> None:
        outcomes = await asyncio.gather(
            *(host.submit(config()) for _ in range(2)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [type(None), TaskExists]
        await host.started("t1")
        host.container("t1")

    host.play(scene)


def test_a_hundred_submits_at_once_all_run(host: Stage) -> None:
    async def scene() -> None:
        configs = [config(f"t{number}", gpu=0) for number in range(100)]
        await asyncio.gather(*(host.submit(one) for one in configs))
        assert len(host.core.list()) == 100
        await asyncio.gather(*(host.started(one.id) for one in configs))
        assert {item.status for item in host.core.list()} == {TaskStatus.RUNNING}
        assert len(host.engine.containers) == 100

    host.play(scene)


def test_a_shim_that_goes_away_accepts_nothing_and_says_so(host: Stage) -> None:
    async def scene() -> None:
        await host.core.drain(1)
        with pytest.raises(ShuttingDown):
            await host.submit(config())
        assert not host.dir(config()).exists()

    host.play(scene)


def test_a_held_shim_accepts_nothing_until_it_admits_again(host: Stage) -> None:
    async def scene() -> None:
        host.core.hold()
        with pytest.raises(ShuttingDown):
            await host.submit(config())
        host.core.admit()
        await host.submit(config())

    host.play(scene)


def test_it_holds_only_if_every_task_is_in_a_safe_status(host: Stage) -> None:
    safe = frozenset({TaskStatus.RUNNING, TaskStatus.TERMINATED})

    async def scene() -> None:
        await host.submit(config("t1", gpu=0))
        await host.started("t1")
        held = host.script.hold("create")
        await host.submit(config("t2", gpu=0))
        await held.reached.wait()
        assert [task.id for task in await host.core.hold_if(safe)] == ["t2"]
        held.let_go()
        await host.started("t2")
        await host.submit(config("t3", gpu=0))  # it was not held
        await host.started("t3")
        assert await host.core.hold_if(safe) == ()
        with pytest.raises(ShuttingDown):
            await host.submit(config("t4", gpu=0))

    host.play(scene)


def test_no_submit_slips_in_between_the_look_and_the_hold(host: Stage) -> None:
    async def scene() -> None:
        held = host.script.hold("records.create")
        submit = asyncio.ensure_future(host.submit(config()))
        await held.reached.wait()
        guard = asyncio.ensure_future(host.core.hold_if(frozenset({TaskStatus.TERMINATED})))
        await asyncio.sleep(1)
        assert not guard.done()
        held.let_go()
        assert [task.id for task in await guard] == ["t1"]
        await submit

    host.play(scene)


def test_what_nobody_submitted_is_not_found(host: Stage) -> None:
    async def scene() -> None:
        with pytest.raises(TaskNotFound, match="t1"):
            host.core.info("t1")
        with pytest.raises(TaskNotFound):
            await host.terminate("t1")
        with pytest.raises(TaskNotFound):
            await host.remove("t1")

    host.play(scene)


def test_which_gpus_a_task_takes_is_on_disk_before_it_takes_anything_else(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("keys.acquire")
        await host.submit(config())
        await hold.reached.wait()
        assert host.record(config()).gpus == (GPUS[0],)
        hold.let_go()
        await host.started("t1")

    host.play(scene)


# Starts that fail. Each ends the task with the server's word for it and gives everything back.


@pytest.mark.parametrize(
    ("call", "error", "reason", "message"),
    [
        ("keys.acquire", ResourceError("no such user"), "executor_error", "no such user"),
        ("volumes.acquire", ResourceError("no device"), "executor_error", "no device"),
        ("has_image", EngineError("out of order"), "creating_container_error", "out of order"),
        ("create", EngineError("bad mount"), "creating_container_error", "bad mount"),
        ("create", LOST, "creating_container_error", str(LOST)),
        ("start", EngineError("out of memory"), "creating_container_error", "out of memory"),
        ("records.write", FULL, "executor_error", str(FULL)),
    ],
)
def test_a_start_that_fails_ends_the_task_with_the_reason_and_holds_nothing(
    host: Stage, call: str, error: Exception, reason: str, message: str
) -> None:
    async def scene() -> None:
        host.script.fail(call, error)
        info = await host.run_task(config())
        assert (info.status, info.termination_reason) == (TaskStatus.TERMINATED, reason)
        assert info.termination_message == message
        assert host.holds(config()) == set()
        record = host.record(config())
        assert (record.termination_reason, record.cleaned_up) == (reason, True)

    host.play(scene)


def test_a_start_that_fails_while_the_engine_is_away_is_ended_when_it_is_back(
    host: Stage,
) -> None:
    async def scene() -> None:
        host.engine.is_unreachable = True
        await host.submit(config())
        await host.started("t1")
        info = host.core.info("t1")
        assert (info.status, info.termination_reason) == (
            TaskStatus.PULLING,
            "creating_container_error",
        )
        await host.round()
        assert host.status("t1") is TaskStatus.PULLING
        host.engine.is_unreachable = False
        await host.round()
        assert host.status("t1") is TaskStatus.TERMINATED
        assert host.holds(config()) == set()

    host.play(scene)


def test_too_few_idle_gpus_is_told_in_numbers(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config("t1", gpu=3))
        info = await host.run_task(config("t2", gpu=2))
        assert info.termination_reason == "executor_error"
        assert info.termination_message == "2 GPU(s) requested, 1 of this host's 4 idle"
        assert host.holds(config("t1")) >= set(GPUS[:3])

    host.play(scene)


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_full_disk_at_any_record_of_a_start_ends_it_and_a_later_round_writes_that_down(
    host: Stage, nth: int
) -> None:
    async def scene() -> None:
        await host.submit(config(image="remote"))
        for _ in range(nth - 1):
            host.script.fail("records.write", FULL, times=0)
        host.script.fail("records.write", FULL, times=50)
        await host.started("t1")
        assert host.reason("t1") == "executor_error"
        assert host.status("t1") is TaskStatus.TERMINATED
        assert not any(box.state.alive for box in host.containers("t1"))
        assert host.host.keys["alice"] == ()
        host.script.heal()
        await host.round()
        await host.round()
        record = host.record(config())
        assert (record.termination_reason, record.cleaned_up) == ("executor_error", True)
        assert host.holds(config()) == set()

    host.play(scene)


def test_a_container_that_cannot_start_says_why_in_the_engines_words(host: Stage) -> None:
    async def scene() -> None:
        info = await host.run_task(config(image="talks-and-cannot-start"))
        assert info.termination_reason == "container_exited_with_error"
        assert info.termination_message == "port is already allocated"
        assert host.holds(config()) == set()

    host.play(scene)


def test_a_container_that_cannot_start_says_why_in_its_own_words_if_it_has_any(
    host: Stage,
) -> None:
    async def scene() -> None:
        hold = host.script.hold("start")
        await host.submit(config(image="talks-and-cannot-start"))
        await hold.reached.wait()
        host.container("t1").output += [f"line {number}" for number in range(9)]
        hold.let_go()
        await host.started("t1")
        message = host.core.info("t1").termination_message
        assert message.splitlines() == [f"line {number}" for number in range(4, 9)]

    host.play(scene)


def test_output_that_cannot_be_read_is_no_hindrance_to_an_end(host: Stage) -> None:
    async def scene() -> None:
        host.script.fail("last_lines", EngineError("this log driver does not support reading"))
        info = await host.run_task(config(image="talks-and-cannot-start"))
        assert info.termination_message == "port is already allocated"

    host.play(scene)


def test_a_device_the_driver_lacks_is_tried_without_once(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("start", after=False)
        await host.submit(config(image="cannot-start"))
        await hold.reached.wait()
        first = host.container("t1")
        hold.let_go()
        second = host.script.hold("start")
        await second.reached.wait()
        assert host.container("t1") is not first
        host.engine.images["cannot-start:latest"] = host.engine.images["runs-on:latest"]
        second.let_go()
        await host.started("t1")
        assert host.status("t1") is TaskStatus.RUNNING
        assert host.core.info("t1").container_id == host.container("t1").id

    host.play(scene)


def test_a_fault_of_ours_ends_one_task_and_nothing_else(host: Stage) -> None:
    async def scene() -> None:
        host.script.fail("has_image", ZeroDivisionError("division by zero"))
        info = await host.run_task(config())
        assert info.termination_reason == "executor_error"
        assert "division by zero" in info.termination_message
        assert (await host.run_task(config("t2"))).status is TaskStatus.RUNNING
        assert [line.partition(" ")[0] for line in host.broken] == ["start.broken"]
        host.broken.clear()

    host.play(scene)


# Pulls.


def test_a_pull_shows_its_progress_and_keeps_its_stream(host: Stage) -> None:
    async def scene() -> None:
        await host.submit(config(image="remote"))
        await soon(lambda: host.core.info("t1").image_pull_progress)
        assert host.status("t1") is TaskStatus.PULLING
        await host.started("t1")
        assert host.status("t1") is TaskStatus.RUNNING
        assert b"Downloading" in (host.dir(config()) / "pull.log").read_bytes()
        assert host.core.info("t1").image_pull_progress is not None

    host.play(scene)


@pytest.mark.parametrize(
    ("image", "message"), [("broken", "no space left on device"), ("nowhere", "manifest unknown")]
)
def test_a_pull_that_fails_ends_the_task_with_the_registrys_words(
    host: Stage, image: str, message: str
) -> None:
    async def scene() -> None:
        info = await host.run_task(config(image=image))
        assert info.termination_reason == "creating_container_error"
        assert message in info.termination_message
        assert host.holds(config(image=image)) == set()

    host.play(scene)


def test_a_login_goes_to_the_registry_and_nowhere_else(host: Stage) -> None:
    async def scene() -> None:
        asked = config(image="remote", registry_username="me", registry_password="secret-word")
        await host.run_task(asked)
        assert host.status("t1") is TaskStatus.RUNNING
        for file in host.home.rglob("*"):
            assert not file.is_file() or b"secret-word" not in file.read_bytes()
        assert "secret-word" not in "\n".join(host.log) + repr(host.core.info("t1"))

    host.play(scene)


# Answers that are lost, names that are taken.


def test_a_create_whose_answer_was_lost_leaves_no_container_running_and_can_be_removed(
    host: Stage,
) -> None:
    async def scene() -> None:
        host.script.fail("create", LOST, after=True)
        info = await host.run_task(config())
        assert info.termination_reason == "creating_container_error"
        assert host.container("t1").state is ContainerState.CREATED
        await host.remove("t1")
        assert host.engine.containers == {}

    host.play(scene)


def test_a_start_whose_answer_was_lost_is_decided_by_what_the_engine_shows(host: Stage) -> None:
    async def scene() -> None:
        host.script.fail("start", LOST, after=True)
        info = await host.run_task(config())
        assert info.status is TaskStatus.CREATING
        await host.round()
        assert host.status("t1") is TaskStatus.RUNNING
        assert host.container("t1").starts == 1

    host.play(scene)


def test_a_start_that_never_arrived_is_made_up_for(host: Stage) -> None:
    async def scene() -> None:
        host.script.fail("start", LOST)
        assert (await host.run_task(config())).status is TaskStatus.CREATING
        await host.round()
        await host.round()
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


def test_a_start_nobody_saw_succeed_that_failed_fails(host: Stage) -> None:
    async def scene() -> None:
        host.script.fail("start", LOST)
        await host.run_task(config(image="talks-and-cannot-start"))
        await host.round()
        assert host.reason("t1") == "container_exited_with_error"
        assert host.holds(config()) == set()

    host.play(scene)


def place(host: Stage, spec: ContainerSpec) -> FakeContainer:
    """A container that somebody else has made."""
    box = FakeContainer(f"{len(host.engine.containers):064x}", spec, host.clock.now())
    host.engine.containers[box.id] = box
    return box


def own_spec(host: Stage, **changes: object) -> ContainerSpec:
    one = config()
    name = host.dir(one).name
    spec = spec_of(one, name, name, (), home=str(host.home))
    return attrs.evolve(spec, **changes)  # type: ignore[arg-type]  # one helper for all fields


def test_a_name_taken_by_a_lost_attempt_of_our_own_is_taken_back(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("create")
        await host.submit(config())
        await hold.reached.wait()
        lost = place(host, own_spec(host))
        hold.let_go()
        await host.started("t1")
        assert host.status("t1") is TaskStatus.RUNNING
        assert host.container("t1") is not lost

    host.play(scene)


def test_a_name_that_is_free_again_by_the_time_one_looks_is_used(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("create")
        await host.submit(config())
        await hold.reached.wait()
        lost = place(host, own_spec(host))
        look = host.script.hold("inspect")
        hold.let_go()
        await look.reached.wait()
        host.engine.delete(lost.id)
        look.let_go()
        await host.started("t1")
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


@pytest.mark.parametrize("labels", [{}, {"ai.dstack.shim.task-id": "t2"}])
def test_a_name_taken_by_a_stranger_fails_the_task_and_leaves_the_stranger_alone(
    host: Stage, labels: dict[str, str]
) -> None:
    async def scene() -> None:
        stranger = place(host, ContainerSpec(host.dir(config()).name, "runs-on", labels))
        await host.engine.start(stranger.id)
        info = await host.run_task(config())
        assert info.termination_reason == "creating_container_error"
        assert "is not of this task" in info.termination_message
        await host.round()
        await host.terminate("t1")
        await host.remove("t1")
        assert host.engine.containers == {stranger.id: stranger}
        assert stranger.state is ContainerState.RUNNING

    host.play(scene)


# Bridge.


def test_in_bridge_mode_the_runners_port_is_told_with_running(host: Stage) -> None:
    async def scene() -> None:
        info = await host.run_task(config(network_mode="bridge"))
        assert info.status is TaskStatus.RUNNING
        assert info.ports is not None
        assert [mapping.container for mapping in info.ports] == [RUNNER_PORT]

    host.play(scene)


@pytest.mark.parametrize("mode", ["no mapping", "inspect fails"])
def test_in_bridge_mode_a_task_is_not_shown_running_without_its_mapping(
    host: Stage, mode: str
) -> None:
    async def scene() -> None:
        hold = host.script.hold("inspect")
        await host.submit(config(network_mode="bridge"))
        await hold.reached.wait()
        ports, host.container("t1").ports = host.container("t1").ports, ()
        if mode == "inspect fails":
            host.container("t1").ports = ports
            host.script.fail("inspect", LOST, after=True)
        hold.let_go()
        await host.started("t1")
        assert host.status("t1") is TaskStatus.CREATING
        await host.round()
        if mode == "no mapping":
            assert host.reason("t1") == "executor_error"
            assert "no host port" in host.core.info("t1").termination_message
            assert not host.container("t1").state.alive
            assert host.holds(config()) == set()
        else:
            assert host.core.info("t1").ports == ports

    host.play(scene)


def test_a_running_that_cannot_be_written_down_is_left_to_the_step(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("start", after=True)
        await host.submit(config())
        await hold.reached.wait()
        host.script.fail("records.write", FULL)
        hold.let_go()
        await host.started("t1")
        assert host.status("t1") is TaskStatus.CREATING
        await host.round()
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)
