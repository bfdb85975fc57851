"""What must be true of a host once the dust has settled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dstack_shim_contracts.record import TaskRecord
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.protocol import LABEL_HOME, LABEL_IS_TASK, LABEL_TASK_ID
from dstack_shim.records import RecordKind
from dstack_shim.tasks.task import Task
from tests.lab.fake_engine import FakeContainer
from tests.simulation.shim import HOME, Shim
from tests.simulation.watch import gpus_of

if TYPE_CHECKING:
    from tests.simulation.world import World


def census(world: World, shim: Shim) -> Iterator[str]:
    """Everything that is not as it must be, in words."""
    tasks = [entry.task for entry in shim.core.book]
    unreleased = [task.record for task in tasks if not task.released]
    yield from _gpus(world, shim, unreleased)
    yield from _host(world, unreleased)
    yield from _containers(world, tasks)
    yield from _dirs(world, tasks)
    for entry in shim.core.book:
        yield from _task(world, entry.task)
        if entry.unsaved:
            yield f"the record of {entry.task.id} is not saved"
        if entry.busy:
            yield f"somebody is still busy with {entry.task.id}"


def _gpus(world: World, shim: Shim, unreleased: list[TaskRecord]) -> Iterator[str]:
    held = {owner: set(gpus) for owner, gpus in shim.gpus.held().items()}
    wanted = {record.id: set(record.gpus) for record in unreleased if record.gpus}
    if held != wanted:
        yield f"GPUs are held as {held}, tasks have {wanted}"
    for container in world.watch.alive():
        owner = container.spec.labels[LABEL_TASK_ID]
        missing = set(gpus_of(container)) - held.get(owner, set())
        if missing:
            yield f"{owner} runs on {sorted(missing)}, which it does not hold"


def _host(world: World, unreleased: list[TaskRecord]) -> Iterator[str]:
    volumes = {volume.name for record in unreleased for volume in record.config.volumes}
    # A record that was damaged cannot tell what to give back: reported by the doctor, not undone.
    lost = [story.config for story in world.damaged if story.config is not None]
    lost_volumes = {volume.name for config in lost for volume in config.volumes}
    if set(world.host.mounted) - lost_volumes != volumes - lost_volumes:
        yield f"mounted: {sorted(world.host.mounted)}, needed: {sorted(volumes)}"
    for user, keys in world.host.keys.items():
        needed = {
            key
            for record in unreleased
            if record.config.host_ssh_user == user
            for key in record.config.host_ssh_keys
        }
        lost_keys = {key for config in lost for key in config.host_ssh_keys}
        if set(keys) - lost_keys != needed - lost_keys:
            yield f"keys of {user}: {sorted(keys)}, needed: {sorted(needed)}"


def _containers(world: World, tasks: list[Task]) -> Iterator[str]:
    running = {task.id for task in tasks if task.status is TaskStatus.RUNNING}
    ours = [container for container in world.engine.containers.values() if _is_ours(container)]
    for container in ours:
        owner = container.spec.labels[LABEL_TASK_ID]
        if container.state.alive and owner not in running:
            yield f"a container of {owner} runs, the task does not"
        if owner not in {task.id for task in tasks}:
            yield f"a container of {owner} is there, the task is not known"
    counts = Counter(container.spec.labels[LABEL_TASK_ID] for container in ours)
    for owner, count in counts.items():
        if count > 1:
            yield f"{owner} has {count} containers"
    alive = {container.spec.labels[LABEL_TASK_ID] for container in ours if container.state.alive}
    for task_id in sorted(running - alive):
        yield f"{task_id} is running without a running container"


def _is_ours(container: FakeContainer) -> bool:
    labels = container.spec.labels
    return LABEL_IS_TASK in labels and labels.get(LABEL_HOME, HOME) == HOME


def _dirs(world: World, tasks: list[Task]) -> Iterator[str]:
    known = {task.dir for task in tasks}
    for dir, content in world.disk.visible.items():
        is_damage = content.set_aside or content.kind is RecordKind.DAMAGED
        if dir not in known and not is_damage:
            yield f"the directory {dir} is of no task"
    for task in tasks:
        story = world.stories.get(task.id)
        # A remove that failed at its last flush is to be repeated; the directory is gone.
        may_lack_it = story is not None and story.may_be_gone
        if task.dir is not None and task.dir not in world.disk.visible and not may_lack_it:
            yield f"{task.id} has lost its directory"


def _task(world: World, task: Task) -> Iterator[str]:
    if task.status is TaskStatus.RUNNING:
        return
    if not task.terminated:
        yield f"{task.id} stays {task.status.value}"
    elif not task.released:
        yield f"{task.id} is terminated and not released"
    story = world.stories.get(task.id)
    if story is not None and task.terminated:
        record = task.record
        world.stories.check_outcome(story, record.termination_reason, record.termination_message)
