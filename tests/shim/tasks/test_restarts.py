"""The shim killed and started again, at each point of a task's life; and what outlives it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import pytest
from dstack_shim_contracts.record import Intent, Step, read_record, write_record
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.protocol import ContainerSpec, ContainerState
from dstack_shim.errors import EngineError, EngineUnreachable, ResourceError, StoreError
from dstack_shim.tasks.outcomes import FRESH, TOMBSTONE_KEPT, Boot
from tests.lab.fake_engine import FakeContainer
from tests.shim.tasks.stage import BOOT, Stage, config, soon, stage
from tests.simulation.host import GPUS
from tests.simulation.shim import RUNNER_PORT, spec_of

LOST = EngineUnreachable("no answer from the engine: Connection reset by peer")
FULL = StoreError("cannot write task.json: No space left on device")
REFUSED = EngineError("server error")


@pytest.fixture
def host(tmp_path: Path) -> Stage:
    return stage(tmp_path)


# Killed while a task starts.


@pytest.mark.parametrize(
    ("call", "after", "step"),
    [
        ("keys.acquire", False, "preparing"),
        ("keys.acquire", True, "preparing"),
        ("volumes.acquire", True, "preparing"),
        ("has_image", False, "pulling"),
        ("create", False, "creating"),
    ],
)
def test_killed_before_there_is_a_container_the_task_is_known_with_its_step(
    host: Stage, call: str, after: bool, step: str
) -> None:
    async def scene() -> None:
        hold = host.script.hold(call, after=after)
        await host.submit(config())
        await hold.reached.wait()
        await host.restart()
        info = host.core.info("t1")
        assert (info.status, info.termination_reason) == (TaskStatus.TERMINATED, "executor_error")
        assert info.termination_message == f"interrupted while {step}: the shim was restarted"
        assert host.holds(config()) == set()
        assert [file.name for file in host.dir(config()).iterdir()] == ["task.json"]
        await host.restart()
        assert host.core.info("t1") == info
        await host.remove("t1")
        assert not host.dir(config()).exists()
        await host.restart()
        assert host.core.list() == ()

    host.play(scene)


@pytest.mark.parametrize(("call", "after"), [("create", True), ("start", False)])
def test_killed_before_a_fresh_container_was_started_it_is_started(
    host: Stage, call: str, after: bool
) -> None:
    async def scene() -> None:
        hold = host.script.hold(call, after=after)
        await host.submit(config())
        await hold.reached.wait()
        await asyncio.sleep(FRESH - 1)
        await host.restart()
        assert host.status("t1") is TaskStatus.CREATING
        await host.round()
        assert host.status("t1") is TaskStatus.RUNNING
        assert host.container("t1").starts == 1
        assert host.holds(config()) == {GPUS[0], "volume-of-t1", "key-of-t1"}

    host.play(scene)


def test_killed_long_before_a_container_was_started_the_task_fails_and_holds_nothing(
    host: Stage,
) -> None:
    async def scene() -> None:
        hold = host.script.hold("start")
        await host.submit(config())
        await hold.reached.wait()
        host.kill()
        await asyncio.sleep(FRESH + 1)
        await host.restart()
        info = host.core.info("t1")
        assert info.termination_reason == "executor_error"
        assert info.termination_message == "container was not started, interrupted while starting"
        assert host.container("t1").starts == 0
        assert host.holds(config()) == set()
        await host.remove("t1")
        assert host.engine.containers == {}

    host.play(scene)


def test_killed_after_a_container_was_started_the_task_runs_on(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("start", after=True)
        await host.submit(config())
        await hold.reached.wait()
        started = host.container("t1").started_at
        await host.restart()
        assert host.status("t1") is TaskStatus.RUNNING
        assert host.container("t1").started_at == started
        assert host.record(config()).intent == Intent(Step.RUNNING, host.clock.now())

    host.play(scene)


@pytest.mark.parametrize(
    ("image", "reason"), [("ends", "done_by_runner"), ("fails", "container_exited_with_error")]
)
def test_an_exit_while_the_shim_is_away_ends_the_task_before_the_first_answer(
    host: Stage, image: str, reason: str
) -> None:
    async def scene() -> None:
        await host.run_task(config(image=image))
        host.kill()
        await asyncio.sleep(20)
        host.begin()
        await host.restored()
        assert (host.status("t1"), host.reason("t1")) == (TaskStatus.TERMINATED, reason)
        assert host.holds(config()) == set()

    host.play(scene)


# Killed while a task ends: the reason stays, whatever the container says by then.


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("records.write", True),
        ("stop", False),
        ("stop", True),
        ("volumes.release", False),
        ("volumes.release", True),
        ("keys.release", True),
    ],
)
def test_killed_at_any_point_of_a_terminate_the_reason_stays_and_the_end_is_made_up_for(
    host: Stage, call: str, after: bool
) -> None:
    async def scene() -> None:
        await host.run_task(config())
        hold = host.script.hold(call, after=after)
        host.begin_terminate("t1", "terminated_by_user", "me")
        await hold.reached.wait()
        await host.restart()
        info = host.core.info("t1")
        assert (info.status, info.termination_reason) == (
            TaskStatus.TERMINATED,
            "terminated_by_user",
        )
        assert info.termination_message == "me"
        assert not host.container("t1").state.alive
        assert host.holds(config()) == set()
        assert host.record(config()).ended_at is not None
        assert host.record(config()).stop_by is None

    host.play(scene)


def test_killed_before_a_terminate_was_written_down_the_task_runs_on(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        hold = host.script.hold("records.write")
        host.begin_terminate("t1")
        await hold.reached.wait()
        await host.restart()
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)


def test_a_terminate_without_a_reason_is_not_forgotten_by_a_restart(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        await host.terminate("t1", "", "")
        await host.restart()
        assert (host.status("t1"), host.reason("t1")) == (TaskStatus.TERMINATED, "")

    host.play(scene)


def test_a_grace_that_has_not_run_out_is_kept_across_a_restart(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="deaf"))
        hold = host.script.hold("stop")
        host.begin_terminate("t1", timeout=3600)
        await hold.reached.wait()
        await host.restart()
        assert host.status("t1") is TaskStatus.TERMINATED
        await asyncio.sleep(3000)
        await host.round()
        assert host.container("t1").state is ContainerState.RUNNING
        assert "volume-of-t1" in host.host.mounted
        await asyncio.sleep(601)
        await host.round()
        assert not host.container("t1").state.alive
        assert host.holds(config()) == set()

    host.play(scene)


def test_an_unwritten_end_is_found_again_from_the_container(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="fails"))
        await asyncio.sleep(20)
        host.script.fail("records.write", FULL, times=9)
        await host.round()
        assert host.reason("t1") == "container_exited_with_error"
        host.script.heal()
        await host.restart()
        assert host.reason("t1") == "container_exited_with_error"
        assert host.record(config()).cleaned_up

    host.play(scene)


# Stopped with grace.


def test_a_drain_ends_a_pull_with_a_reason_that_outlives_it(host: Stage) -> None:
    async def scene() -> None:
        await host.submit(config(image="remote"))
        await soon(lambda: host.status("t1") is TaskStatus.PULLING)
        await host.core.drain(5)
        await host.restart()
        info = host.core.info("t1")
        assert info.termination_reason == "executor_error"
        assert info.termination_message == "interrupted while pulling: the shim was stopped"

    host.play(scene)


def test_a_drain_lets_a_start_and_a_terminate_come_to_their_ends(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config("t1", image="deaf"))
        host.begin_terminate("t1", timeout=3)
        hold = host.script.hold("create")
        await host.submit(config("t2"))
        await hold.reached.wait()
        drain = asyncio.ensure_future(host.core.drain(5))
        await asyncio.sleep(1)
        hold.let_go()
        await drain
        assert host.status("t1") is TaskStatus.TERMINATED
        assert host.status("t2") is TaskStatus.RUNNING

    host.play(scene)


def test_a_drain_waits_no_longer_than_it_may(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="deaf"))
        host.begin_terminate("t1", timeout=3600)
        await asyncio.sleep(1)
        begun = host.loop.time()
        await host.core.drain(5)
        assert host.loop.time() - begun == pytest.approx(5)

    host.play(scene)


# Tombstones.


def test_a_task_nobody_removes_is_forgotten_after_its_time(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="nowhere"))
        await asyncio.sleep(TOMBSTONE_KEPT - 10)
        await host.restart()
        assert host.status("t1") is TaskStatus.TERMINATED
        await asyncio.sleep(20)
        await host.round()
        assert host.core.list() == ()
        assert not host.dir(config()).exists()

    host.play(scene)


def test_a_task_that_still_has_its_container_is_kept_for_ever(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="ends"))
        await asyncio.sleep(2 * TOMBSTONE_KEPT)
        await host.round()
        await host.round()
        assert host.status("t1") is TaskStatus.TERMINATED

    host.play(scene)


@pytest.mark.parametrize("released", [False, True])
def test_the_time_of_a_task_whose_end_was_never_dated_begins_when_it_is_found(
    host: Stage, released: bool
) -> None:
    async def scene() -> None:
        await host.run_task(config(image="nowhere"))
        path = host.dir(config()) / "task.json"
        undated = attrs.evolve(read_record(path.read_bytes()), ended_at=None, cleaned_up=released)
        path.write_bytes(write_record(undated))
        await host.restart()
        assert host.status("t1") is TaskStatus.TERMINATED
        await asyncio.sleep(TOMBSTONE_KEPT + 10)
        await host.round()
        assert host.core.list() == ()

    host.play(scene)


def test_a_task_that_is_forgotten_while_somebody_removes_it_is_gone_once(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="nowhere"))
        await asyncio.sleep(TOMBSTONE_KEPT + 10)
        hold = host.script.hold("records.forget", after=True)
        turn = asyncio.ensure_future(host.round())
        await hold.reached.wait()
        away = asyncio.ensure_future(host.remove("t1"))
        await asyncio.sleep(1)
        hold.let_go()
        await turn
        await host.submit(config())
        (outcome,) = await asyncio.gather(away, return_exceptions=True)
        assert type(outcome).__name__ == "TaskNotFound"
        await host.started("t1")
        assert host.status("t1") is TaskStatus.RUNNING
        assert host.dir(config()).exists()

    host.play(scene)


def test_a_stranger_with_the_name_of_a_task_that_was_interrupted_is_left_alone(
    host: Stage,
) -> None:
    async def scene() -> None:
        hold = host.script.hold("create")
        await host.submit(config())
        await hold.reached.wait()
        host.kill()
        spec = ContainerSpec(host.dir(config()).name, "runs-on")
        host.engine.containers["x"] = FakeContainer("x", spec, host.clock.now())
        await host.engine.start("x")
        await host.restart()
        assert host.reason("t1") == "executor_error"
        assert host.holds(config()) == set()
        await host.remove("t1")
        assert host.engine.containers["x"].state is ContainerState.RUNNING

    host.play(scene)


def test_what_cannot_be_discarded_is_no_hindrance(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="nowhere"))
        host.script.fail("records.discard_output", StoreError("cannot empty"))
        await host.restart()
        assert host.status("t1") is TaskStatus.TERMINATED

    host.play(scene)


# Reboots.


@pytest.mark.parametrize(
    ("code", "reason"), [(0, "executor_error"), (255, "container_exited_with_error")]
)
def test_after_a_reboot_a_zero_of_a_task_that_ran_is_no_success(
    host: Stage, code: int, reason: str
) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.kill()
        host.host.reboot()
        host.boot = Boot("another boot", host.clock.now())
        host.engine.exit(host.container("t1").id, code)
        await host.restart()
        assert host.reason("t1") == reason
        assert host.holds(config()) == set()

    host.play(scene)


def test_a_task_that_was_done_before_the_reboot_is_a_success(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config(image="ends"))
        host.kill()
        await asyncio.sleep(100)
        host.boot = Boot("another boot", host.clock.now())
        await host.restart()
        assert host.reason("t1") == "done_by_runner"

    host.play(scene)


def test_a_zero_given_by_the_engine_of_a_boot_between_is_no_success(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.kill()
        host.host.reboot()
        await asyncio.sleep(10)
        between = Boot("between", host.clock.now())
        await asyncio.sleep(5)
        host.engine.exit(host.container("t1").id, 0)  # found dead; the shim got no answer
        await asyncio.sleep(10)
        host.boot = Boot("another boot", host.clock.now(), (BOOT, between))
        await host.restart()
        assert host.reason("t1") == "executor_error"

    host.play(scene)


def test_a_container_made_before_the_reboot_is_not_started_after_it(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("start")
        await host.submit(config())
        await hold.reached.wait()
        host.kill()
        await asyncio.sleep(1)
        host.boot = Boot("another boot", host.clock.now())
        await host.restart()
        assert host.reason("t1") == "executor_error"
        assert host.container("t1").starts == 0

    host.play(scene)


# Records that are damaged or were never there.


def test_a_damaged_record_is_set_aside_and_its_container_runs_on_with_its_gpus(
    host: Stage,
) -> None:
    async def scene() -> None:
        await host.run_task(config())
        (host.dir(config()) / "task.json").write_bytes(b'{"version": 1, "id"')
        await host.restart()
        info = host.core.info("t1")
        assert (info.status, info.gpus_ids) == (TaskStatus.RUNNING, GPUS[:1])
        assert host.gpus.held() == {"t1": GPUS[:1]}
        assert (host.dir(config()) / ".task.json.damaged-1").exists()
        await host.terminate("t1")
        await host.restart()
        assert host.reason("t1") == "terminated_by_user"
        await host.remove("t1")
        assert not host.dir(config()).exists()

    host.play(scene)


def test_the_keys_of_a_damaged_record_stay_as_long_as_its_task_and_go_with_it(
    host: Stage,
) -> None:
    async def scene() -> None:
        one, other = config("t1"), config("t2")
        for task in (one, other):
            await host.run_task(task)
        (host.dir(one) / "task.json").write_bytes(b"")
        await host.restart()
        await host.terminate("t2")  # the same user's: its keys go, and nobody else's
        assert host.host.keys["alice"] == one.host_ssh_keys
        await host.terminate("t1")
        assert host.host.keys["alice"] == ()

    host.play(scene)


def test_a_created_container_whose_record_is_lost_is_not_started(host: Stage) -> None:
    async def scene() -> None:
        hold = host.script.hold("start")
        await host.submit(config())
        await hold.reached.wait()
        (host.dir(config()) / "task.json").write_bytes(b"")
        await host.restart()  # fresh, but was its end decided?
        assert host.reason("t1") == "executor_error"
        assert host.container("t1").starts == 0
        assert host.holds(config()) <= set(config().host_ssh_keys) | {"volume-of-t1"}

    host.play(scene)


def test_a_restore_asks_the_engine_once_whatever_runs_and_whatever_is_lost(host: Stage) -> None:
    async def scene() -> None:
        tasks = [config(f"t{n}", gpu=int(n < len(GPUS)), network_mode="bridge") for n in range(20)]
        before = {task.id: await host.run_task(task) for task in tasks}
        for task in tasks[::3]:
            (host.dir(task) / "task.json").write_bytes(b"")
        host.engine.calls.clear()
        await host.restart()
        assert [call.name for call in host.engine.calls] == ["list_task_containers"]
        assert {task.id: host.core.info(task.id) for task in tasks} == before

    host.play(scene)


def test_a_damaged_record_that_cannot_be_set_aside_costs_nobody_anything(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config("t1"))
        await host.run_task(config("t2"))
        (host.dir(config("t1")) / "task.json").write_bytes(b"")
        host.script.fail("records.set_aside", FULL)
        await host.restart()
        assert [item.status for item in host.core.list()] == [TaskStatus.RUNNING] * 2

    host.play(scene)


def test_a_record_of_a_newer_shim_is_never_written_over(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        path = host.dir(config()) / "task.json"
        newer = path.read_bytes().replace(b'"min_reader":1', b'"min_reader":9')
        assert newer != path.read_bytes()
        path.write_bytes(newer)
        await host.restart()
        await host.terminate("t1")
        assert host.status("t1") is TaskStatus.TERMINATED
        assert path.read_bytes() == newer

    host.play(scene)


def test_a_container_without_any_record_gets_one_at_its_first_change(host: Stage) -> None:
    async def scene() -> None:
        spec = spec_of(config(), "job-old", "job-old", (), with_labels=False)
        box = FakeContainer("old", spec, host.clock.now())
        host.engine.containers["old"] = box
        await host.engine.start("old")
        await host.restart()
        assert host.status("t1") is TaskStatus.RUNNING
        assert list((host.home / "runners").iterdir()) == []
        await host.terminate("t1")
        await host.restart()
        assert host.reason("t1") == "terminated_by_user"

    host.play(scene)


def test_two_containers_of_one_task_are_one_task(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config())
        spec = attrs.evolve(host.container("t1").spec, name="copy")
        host.engine.containers["copy"] = FakeContainer("copy", spec, host.clock.now())
        await host.restart()
        assert host.status("t1") is TaskStatus.RUNNING
        assert len(host.core.list()) == 1

    host.play(scene)


# GPUs.


def test_a_conflict_over_a_gpu_leaves_it_with_one_of_the_two(host: Stage) -> None:
    async def scene() -> None:
        await host.run_task(config("t1"))
        for task_id in ("t2", "t3"):
            name = f"job-{task_id}"
            spec = spec_of(config(task_id), name, name, (GPUS[0], "GPU-gone"), with_labels=False)
            host.engine.containers[task_id] = FakeContainer(task_id, spec, host.clock.now())
            await host.engine.start(task_id)
        await host.restart()
        held = [gpu for gpus in host.gpus.held().values() for gpu in gpus]
        assert sorted(held) == sorted(set(held))
        assert set(held) == {GPUS[0], "GPU-gone"}

    host.play(scene)


def test_a_gpu_claimed_by_one_that_runs_and_one_that_ended_is_kept_for_the_one_that_runs(
    host: Stage,
) -> None:
    async def scene() -> None:
        await host.run_task(config("t1", image="ends"))
        await asyncio.sleep(20)
        await host.round()
        await host.run_task(config("t2"))  # on the GPU that t1 gave back
        (host.dir(config("t1")) / "task.json").write_bytes(b"")  # who knows that it did?
        host.kill()
        host.begin()
        await host.core._restorer.carry_out((await host.core._restorer.look()).plan())
        assert host.gpus.held()["t2"] == GPUS[:1]
        await host.restart()
        assert (await host.run_task(config("t3"))).gpus_ids == GPUS[1:2]

    host.play(scene)


def test_gpus_of_two_tasks_that_nobody_can_tell_are_given_to_nobody_until_both_are_known(
    host: Stage,
) -> None:
    async def scene() -> None:
        for number, task_id in enumerate(("t8", "t9")):
            name = f"job-{task_id}"
            spec = spec_of(config(task_id), name, name, (GPUS[number],), with_labels=False)
            host.engine.containers[task_id] = FakeContainer(task_id, spec, host.clock.now())
            await host.engine.start(task_id)
        await host.run_task(config("t1", gpu=0))
        host.script.fail("inspect", REFUSED, times=4)
        await host.restart()
        assert not host.gpus.idle
        await host.terminate("t8")
        assert not host.gpus.idle
        await host.round()
        assert host.gpus.held() == {"t9": GPUS[1:2]}
        assert host.gpus.idle == (GPUS[0], *GPUS[2:])

    host.play(scene)


def test_a_container_that_vanishes_while_its_gpus_are_asked_for_has_none(host: Stage) -> None:
    async def scene() -> None:
        spec = spec_of(config("t9"), "job-t9", "job-t9", GPUS[:1], with_labels=False)
        host.engine.containers["t9"] = FakeContainer("t9", spec, host.clock.now())
        answer = host.script.hold("list_task_containers", after=True)
        host.kill()
        host.begin()
        restored = asyncio.ensure_future(host.restored())
        await answer.reached.wait()
        host.engine.delete("t9")
        answer.let_go()
        await restored
        assert host.gpus.held() == {}
        await host.round()  # the first one went by the list from before
        assert host.reason("t9") == "executor_error"

    host.play(scene)


# Bridge.


def test_a_restored_bridge_task_has_its_ports_and_is_never_shown_with_none(host: Stage) -> None:
    async def scene() -> None:
        before = await host.run_task(config(network_mode="bridge"))
        await host.restart()
        assert host.core.info("t1").ports == before.ports
        host.engine.exit(host.container("t1").id, 0)
        host.script.fail("inspect", LOST, times=9)
        await host.restart()
        info = host.core.info("t1")
        assert (info.status, info.ports) == (TaskStatus.RUNNING, None)

    host.play(scene)


def test_a_bridge_task_started_after_a_restart_is_not_shown_running_before_its_mapping(
    host: Stage,
) -> None:
    async def scene() -> None:
        hold = host.script.hold("start")
        await host.submit(config(network_mode="bridge"))
        await hold.reached.wait()
        await host.restart()
        assert host.status("t1") is TaskStatus.CREATING
        await host.round()
        info = host.core.info("t1")
        assert info.status is TaskStatus.RUNNING
        assert [mapping.container for mapping in info.ports or ()] == [RUNNER_PORT]

    host.play(scene)


# Keys of a record that the job could have written.


@pytest.mark.parametrize("readable", [True, False])
def test_keys_of_a_forged_record_count_only_where_the_host_has_them(
    host: Stage, readable: bool
) -> None:
    async def scene() -> None:
        await host.run_task(config("t1", gpu=0))
        await host.run_task(config("t2", gpu=0))
        box = host.container("t1")
        mounts = (attrs.evolve(box.spec.mounts[0], source=str(host.dir(config("t1")))),)
        box.spec = attrs.evolve(box.spec, mounts=mounts)  # the middle layout
        forged = attrs.evolve(
            host.record(config("t1")),
            config=config("t1", gpu=0, host_ssh_keys=("key-of-t1", "planted")),
        )
        (host.dir(config("t1")) / "task.json").write_bytes(write_record(forged))
        if not readable:
            host.script.fail("keys.confirm", ResourceError("no such file"))
        await host.restart()
        await host.terminate("t2")
        assert "planted" not in host.host.keys["alice"]
        assert ("key-of-t1" in host.host.keys["alice"]) == readable

    host.play(scene)


# A shim that cannot restore.


@pytest.mark.parametrize(
    ("call", "error"), [("list_task_containers", LOST), ("records.scan", FULL)]
)
def test_what_cannot_be_read_at_the_start_is_raised_and_changes_nothing(
    host: Stage, call: str, error: Exception
) -> None:
    async def scene() -> None:
        await host.run_task(config())
        host.kill()
        host.begin()
        host.script.fail(call, error)
        with pytest.raises(type(error)):
            await host.restored()
        assert host.core.list() == ()
        await host.restart()
        assert host.status("t1") is TaskStatus.RUNNING

    host.play(scene)
