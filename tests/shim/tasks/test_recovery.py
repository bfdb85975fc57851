"""The recovery plan as a table: what lies on disk × what the engine shows."""

from __future__ import annotations

import json
from itertools import product

import attrs
import pytest
from dstack_shim_contracts.api import PortMapping, TaskConfig, VolumeInfo
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.record import Intent, Step, TaskRecord
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.container import LABEL_BOOT, LABEL_GPUS, LABEL_HOST_KEYS
from dstack_shim.engine.protocol import Container, ContainerState, Mount
from dstack_shim.records import FoundDir, RecordKind
from dstack_shim.tasks.recovery import HostFacts, Plan, doubtful, plan
from dstack_shim.tasks.task import Saving

HOME = "/home/shim"
RUNNERS = f"{HOME}/runners"
NAME = container_name("job", "t1")
CONFIG = TaskConfig(id="t1", name="job", network_mode="host")


def record(**changes: object) -> TaskRecord:
    return TaskRecord("t1", CONFIG, **changes)  # type: ignore[arg-type]  # one helper for all fields


def good(name: str = NAME, **changes: object) -> FoundDir:
    return FoundDir(name, RecordKind.GOOD, record(**changes))


def container(
    state: ContainerState = ContainerState.RUNNING,
    *,
    task_id: str = "t1",
    name: str = NAME,
    mount: str = f"{RUNNERS}/{NAME}/runner",
    **more: object,
) -> Container:
    mounts = (Mount(mount, "/tmp/runner"),) if mount else ()
    box = Container(f"id-{name}", name, state, 1.0, task_id, mounts=mounts, network_mode="host")
    return attrs.evolve(box, **more)  # type: ignore[arg-type]  # one helper for all fields


def planned(
    dirs: list[FoundDir], containers: list[Container], host: HostFacts | None = None
) -> Plan:
    return plan(dirs, containers, HOME, host or HostFacts())


@pytest.mark.parametrize("state", list(ContainerState))
def test_a_task_with_record_and_container_is_restored_as_running_whatever_its_state(
    state: ContainerState,
) -> None:
    (item,) = planned([good()], [container(state)]).restore
    assert item.task.status is TaskStatus.RUNNING
    assert (item.task.dir, item.task.container_id) == (NAME, f"id-{NAME}")
    assert item.task.ports == ()


@pytest.mark.parametrize("state", list(ContainerState))
@pytest.mark.parametrize("reason", ["terminated_by_user", ""])
def test_a_decided_task_is_restored_as_terminated_with_its_reason(
    state: ContainerState, reason: str
) -> None:
    found = good(termination_reason=reason, terminated=True)
    (item,) = planned([found], [container(state)]).restore
    assert item.task.status is TaskStatus.TERMINATED
    assert item.task.record.termination_reason == reason


def test_released_without_a_reason_is_restored_as_running_and_owns_nothing() -> None:
    (item,) = planned([good(cleaned_up=True, gpus=("g1",))], [container()]).restore
    assert item.task.status is TaskStatus.RUNNING
    assert item.gpus == ()


@pytest.mark.parametrize(
    ("step", "status"),
    [
        (None, TaskStatus.RUNNING),
        (Step.PREPARING, TaskStatus.PREPARING),
        (Step.PULLING, TaskStatus.PULLING),
        (Step.CREATING, TaskStatus.CREATING),
        (Step.STARTING, TaskStatus.CREATING),
        (Step.RUNNING, TaskStatus.RUNNING),
    ],
)
def test_a_record_without_a_container_is_known_where_it_stood(
    step: Step | None, status: TaskStatus
) -> None:
    (item,) = planned([good(intent=Intent(step, 1.0) if step else None)], []).restore
    assert item.task.status is status
    assert item.task.container_id == ""


def test_tasks_that_run_come_first_then_those_that_ended_then_those_without_a_container() -> None:
    found = [good()]
    found += [
        FoundDir(f"dir-{task_id}", RecordKind.GOOD, attrs.evolve(record(), id=task_id))
        for task_id in ("t0", "t2", "t3")
    ]
    boxes = [
        container(ContainerState.EXITED),
        container(task_id="t3", name="dir-t3"),
        container(task_id="t2", name="dir-t2"),
    ]
    # Whoever comes first keeps a GPU that two claim.
    order = [item.task.id for item in planned(found, boxes).restore]
    assert order == ["t2", "t3", "t1", "t0"]


def test_a_record_without_a_container_still_holds_its_gpus_until_released() -> None:
    assert planned([good(gpus=("g1",))], []).restore[0].gpus == ("g1",)
    assert planned([good(gpus=("g1",), cleaned_up=True)], []).restore[0].gpus == ()


@pytest.mark.parametrize("kind", [RecordKind.NONE, RecordKind.DAMAGED, RecordKind.UNREADABLE])
def test_a_container_without_a_usable_record_is_adopted_by_its_label(kind: RecordKind) -> None:
    result = planned([FoundDir(NAME, kind, problem="why")], [container()])
    (item,) = result.restore
    assert item.task.id == "t1"
    assert item.task.status is TaskStatus.RUNNING
    assert item.task.dir == NAME
    assert (item.task.saving is Saving.HANDS_OFF) == (kind is RecordKind.UNREADABLE)
    assert bool(result.set_aside) == (kind is RecordKind.DAMAGED)
    assert result.leave == ()


def test_a_container_without_any_directory_is_adopted_too() -> None:
    (item,) = planned([], [container(mount="")]).restore
    assert (item.task.dir, item.task.saving) == (None, Saving.ON_CHANGE)


def test_an_adopted_task_takes_its_volumes_and_ports_from_its_container() -> None:
    box = container(
        mounts=(
            Mount("/mnt/disks/dstack-volumes/data", "/data"),
            Mount("/mnt/disks/dstack-volumes/data", "/again"),
            Mount("/mnt/disks/dstack-volumes/../etc", "/evil"),
            Mount("/mnt/disks/dstack-volumes/a/b", "/deep"),
            Mount("/mnt/disks/dstack-volumes/..", "/up"),
            Mount("/somewhere", "/else"),
        ),
        network_mode="bridge",
        ports=(PortMapping(40000, 10999),),
    )
    (item,) = planned([], [box]).restore
    assert item.task.record.config.volumes == (VolumeInfo(name="data"),)
    assert item.task.record.config.network_mode == "bridge"
    assert item.task.ports == (PortMapping(40000, 10999),)


def test_an_adopted_task_has_the_keys_and_the_boot_its_labels_tell() -> None:
    keys = json.dumps({"user": "alice", "keys": ["key"]})
    box = container(labels={LABEL_HOST_KEYS: keys, LABEL_BOOT: "b1"})
    (item,) = planned([], [box]).restore
    record = item.task.record
    assert (record.config.host_ssh_user, record.config.host_ssh_keys) == ("alice", ("key",))
    assert (record.boot_id, record.intent) == ("b1", None)


def test_a_boot_that_dstacks_own_shim_dropped_from_the_record_is_known_from_the_labels() -> None:
    labels = {LABEL_BOOT: "b1"}
    assert planned([good()], [container(labels=labels)]).restore[0].task.record.boot_id == "b1"
    known = good(boot_id="b0")
    assert planned([known], [container(labels=labels)]).restore[0].task.record.boot_id == "b0"


def test_damage_without_a_container_is_set_aside_and_nothing_else() -> None:
    result = planned([FoundDir("x-1", RecordKind.DAMAGED, problem="cut")], [])
    assert [item.dir for item in result.set_aside] == ["x-1"]
    assert result.restore == ()


@pytest.mark.parametrize("kind", [RecordKind.NONE, RecordKind.UNREADABLE])
def test_a_directory_nobody_can_place_is_left_alone(kind: RecordKind) -> None:
    result = planned([FoundDir("x-1", kind)], [])
    assert (result.set_aside, result.restore) == ((), ())
    assert [item.what for item in result.leave] == ["directory x-1"]


def test_a_container_of_another_home_is_left_alone() -> None:
    result = planned([], [container(home="/another/home")])
    assert result.restore == ()
    assert "/another/home" in result.leave[0].why


@pytest.mark.parametrize("home", [None, HOME])
def test_a_container_of_this_home_or_of_none_is_ours(home: str | None) -> None:
    assert len(planned([], [container(home=home)]).restore) == 1


def test_of_two_containers_with_one_id_the_living_one_is_the_task() -> None:
    dead = container(ContainerState.EXITED, name="job-a")
    alive = container(ContainerState.RUNNING, name="job-b", created=9.0)
    result = planned([good()], [dead, alive])
    assert [item.task.container_id for item in result.restore] == ["id-job-b"]
    assert "job-a" in result.leave[0].what


def test_of_two_directories_with_one_id_the_mounted_one_is_the_tasks() -> None:
    first, second = good("a-dir"), good("b-dir")
    box = container(mount=f"{RUNNERS}/b-dir/runner")
    result = planned([first, second], [box])
    assert [item.task.dir for item in result.restore] == ["b-dir"]
    assert [item.what for item in result.leave] == ["directory a-dir"]


def test_of_two_directories_with_one_id_and_no_container_the_first_wins() -> None:
    result = planned([good("b-dir"), good("a-dir")], [])
    assert [item.task.dir for item in result.restore] == ["a-dir"]


def test_gpus_come_from_the_record_else_from_the_labels_else_from_an_inspect() -> None:
    labelled = container(labels={LABEL_GPUS: json.dumps(["g2"])})
    assert planned([good(gpus=("g1",))], [labelled]).restore[0].gpus == ("g1",)
    assert planned([good()], [labelled]).restore[0].gpus == ("g2",)
    assert planned([good()], [container()]).restore[0].gpus is None


FLAT = f"{RUNNERS}/{NAME}"


def test_a_record_the_job_could_write_is_believed_only_as_far_as_the_host_confirms_it() -> None:
    config = attrs.evolve(
        CONFIG,
        volumes=(VolumeInfo(name="someone-elses"),),
        host_ssh_user="root",
        host_ssh_keys=("planted", "there already"),
    )
    forged = FoundDir(
        NAME,
        RecordKind.GOOD,
        TaskRecord("t1", config, cleaned_up=True, gpus=()),
    )
    box = container(
        mounts=(
            Mount(FLAT, "/tmp/runner"),
            Mount("/mnt/disks/dstack-volumes/mine", "/data"),
        )
    )
    assert [item.name for item in doubtful([forged], [box], HOME)] == [NAME]
    (item,) = planned([forged], [box], HostFacts({NAME: ("there already",)})).restore
    assert item.task.record.config.volumes == (VolumeInfo(name="mine"),)
    assert item.task.record.config.host_ssh_keys == ("there already",)
    assert item.gpus is None
    assert not item.task.released


def test_a_record_beside_the_mounted_directory_is_believed() -> None:
    config = attrs.evolve(CONFIG, host_ssh_user="ubuntu", host_ssh_keys=("key",))
    found = FoundDir(NAME, RecordKind.GOOD, TaskRecord("t1", config))
    assert doubtful([found], [container()], HOME) == ()
    (item,) = planned([found], [container()]).restore
    assert item.task.record.config == config


def test_a_record_that_names_another_task_than_its_container_is_damage() -> None:
    theirs = container(task_id="t2", mount=FLAT)
    result = planned([good()], [theirs])
    assert [item.task.id for item in result.restore] == ["t2"]
    assert [item.dir for item in result.set_aside] == [NAME]
    assert "t1" in result.set_aside[0].why


def test_the_plan_says_in_words_all_it_will_do() -> None:
    dirs = [good(), FoundDir("bad-1", RecordKind.DAMAGED, problem="cut")]
    lines = planned(dirs, [container(), container(home="/x", name="y")]).lines()
    assert [line.split()[0] for line in lines] == ["set", "restore", "leave"]


def test_a_plan_has_every_task_at_most_once() -> None:
    dirs = [good("a"), good("b"), FoundDir("c", RecordKind.DAMAGED)]
    boxes = [container(name=name, task_id=task) for name, task in product("abc", ["t1", "t2"])]
    ids = [item.task.id for item in planned(dirs, boxes).restore]
    assert sorted(ids) == ["t1", "t2"]
