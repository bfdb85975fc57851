"""From dstack's own shim to ours and back, with tasks that run meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import attrs
import pytest
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.shapes import structure
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.protocol import ContainerState, Mount
from dstack_shim.tasks.recovery import RUNNER_MOUNT
from tests.contracts import stock_reader
from tests.lab import stock_layouts
from tests.lab.fake_engine import FakeContainer
from tests.lab.stock_layouts import BEFORE_RECORDS, LAYOUTS, RECORD_BESIDE, Layout
from tests.shim.tasks.stage import Stage, config, stage
from tests.simulation.host import GPUS
from tests.simulation.shim import spec_of

RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED
VOLUME = {"backend": "gcp", "name": "data", "volume_id": "v", "init_fs": False, "device_name": "d"}
THEIRS = stock_layouts.config(
    "t1",
    volumes=[VOLUME],
    volume_mounts=[{"name": "data", "path": "/data"}],
    host_ssh_user="alice",
    host_ssh_keys=["key-of-t1"],
)


@pytest.fixture
def host(tmp_path: Path) -> Stage:
    return stage(tmp_path)


def leave(host: Stage, layout: Layout, **decided: Any) -> FakeContainer:
    """What dstack's own shim has left of a task that runs."""
    mounted = stock_layouts.make_task_dir(host.home, layout, THEIRS, **decided)
    one = structure(TaskConfig, THEIRS)
    name = container_name(one.name, one.id)
    spec = spec_of(one, name, name, (GPUS[0],), home=str(host.home), with_labels=False)
    mounts = (Mount(str(mounted), RUNNER_MOUNT), *spec.mounts[1:])
    box = FakeContainer("b" * 64, attrs.evolve(spec, mounts=mounts), host.clock.now() - 100)
    box.state, box.starts, box.started_at = ContainerState.RUNNING, 1, host.clock.now() - 99
    box.output = ["last words"]
    host.engine.containers[box.id] = box
    host.host.mounted["data"] = None
    host.host.keys["alice"] = ("key-of-t1",)
    return box


def record_of(host: Stage, task_id: str = "t1", name: str = "t1-0-0") -> Path:
    return host.home / "runners" / container_name(name, task_id) / "task.json"


def written_by_stock(record: Path) -> dict[str, Any]:
    """dstack's own shim reads it strictly, and writes it again."""
    raw = record.read_bytes()
    record.write_bytes(stock_reader.rewrite(raw))
    return stock_reader.read(raw)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_task_of_dstacks_own_shim_runs_on_with_all_it_has(host: Stage, layout: Layout) -> None:
    async def scene() -> None:
        box = leave(host, layout)
        await host.restart()
        info = host.core.info("t1")
        assert (info.status, info.container_id, info.ports) == (RUNNING, box.id, ())
        assert host.gpus.held() == {"t1": (GPUS[0],)}
        assert host.host.mounted == {"data": None}
        assert host.host.keys == {"alice": ("key-of-t1",)}
        assert box.starts == 1
        await host.terminate("t1")
        assert host.gpus.held() == {}
        assert host.host.mounted == {}
        # Before records nobody wrote down which keys are the task's.
        keys = ("key-of-t1",) if layout is BEFORE_RECORDS else ()
        assert host.host.keys == {"alice": keys}
        await host.remove("t1")
        assert list((host.home / "runners").iterdir()) == []

    host.play(scene)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("code", [0, 7])
def test_its_end_is_told_truly_and_stays_so_across_hand_overs_both_ways(
    host: Stage, layout: Layout, code: int
) -> None:
    async def scene() -> None:
        box = leave(host, layout)
        host.engine.exit(box.id, code)
        await host.restart()
        info = host.core.info("t1")
        words = {0: ("done_by_runner", ""), 7: ("container_exited_with_error", "last words")}
        assert (info.termination_reason, info.termination_message) == words[code]
        for _ in range(2):
            theirs = written_by_stock(record_of(host))
            assert theirs["termination_reason"] == info.termination_reason
            assert theirs["termination_message"] == info.termination_message
            assert theirs["cleaned_up"] is True
            await host.restart()
            told = host.core.info("t1")
            assert attrs.evolve(told, gpus_ids=info.gpus_ids) == info
            assert host.gpus.held() == {}

    host.play(scene)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_what_it_had_decided_is_kept(host: Stage, layout: Layout) -> None:
    async def scene() -> None:
        box = leave(
            host, layout, termination_reason="terminated_by_user", termination_message="me"
        )
        await host.restart()
        info = host.core.info("t1")
        assert (info.status, info.termination_reason) == (TERMINATED, "terminated_by_user")
        assert info.termination_message == "me"
        assert not box.state.alive
        assert host.gpus.held() == {}

    host.play(scene)


def test_what_it_had_released_before_it_wrote_the_reason_is_owned_by_nobody(host: Stage) -> None:
    async def scene() -> None:
        box = leave(host, RECORD_BESIDE, cleaned_up=True)
        host.engine.exit(box.id, 7)
        await host.restart()
        assert host.reason("t1") == "container_exited_with_error"
        assert host.gpus.held() == {}

    host.play(scene)


def test_a_task_of_ours_goes_there_and_back_while_it_runs(host: Stage) -> None:
    async def scene() -> None:
        one = config()
        await host.run_task(one)
        before = host.core.info("t1")
        record = record_of(host, name=one.name)
        for _ in range(3):
            host.kill()
            theirs = written_by_stock(record)
            assert theirs["config"]["host_ssh_keys"] == ["key-of-t1"]
            assert [volume["name"] for volume in theirs["config"]["volumes"]] == ["volume-of-t1"]
            host.begin()
            await host.restored()
            assert host.core.info("t1") == before
            assert host.holds(one) == {GPUS[0], "volume-of-t1", "key-of-t1"}
        assert host.container("t1").starts == 1
        host.engine.exit(host.container("t1").id, 0)
        await host.round()
        assert host.reason("t1") == "done_by_runner"
        assert host.holds(one) == set()

    host.play(scene)


def test_the_layouts_live_side_by_side(host: Stage) -> None:
    async def scene() -> None:
        for number, layout in enumerate(LAYOUTS):
            one = stock_layouts.config(f"s{number}", gpu=0)
            mounted = stock_layouts.make_task_dir(host.home, layout, one)
            made = structure(TaskConfig, one)
            name = container_name(made.name, made.id)
            spec = spec_of(made, name, name, (), home=str(host.home), with_labels=False)
            mounts = (Mount(str(mounted), RUNNER_MOUNT),)
            box = FakeContainer(f"{number:064}", attrs.evolve(spec, mounts=mounts), 1.0)
            box.state = ContainerState.RUNNING
            host.engine.containers[box.id] = box
        await host.run_task(config())
        await host.restart()
        assert {task.id: task.status for task in host.core.list()} == dict.fromkeys(
            ("t1", "s0", "s1", "s2"), RUNNING
        )
        await asyncio.sleep(1)
        for task in host.core.list():
            await host.terminate(task.id)
            await host.remove(task.id)
        assert list((host.home / "runners").iterdir()) == []

    host.play(scene)
