"""What to make of a host after a restart: a pure function from what is there to a plan.

Nothing here does I/O. The plan is logged before it is carried out
(:mod:`dstack_shim.tasks.restore`), and can be printed without being carried out.

Who is believed: the container for its id, state, ports, mounts and GPUs; the record for what
was asked, decided and released; neither more than that. A record the job itself could have
written is believed only as far as the container and the host confirm it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping

import attrs
from dstack_shim_contracts.api import PortMapping, TaskConfig, VolumeInfo
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.record import TaskRecord
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.container import LABEL_BOOT, gpus_from_labels, host_keys_from_labels
from dstack_shim.engine.protocol import Container
from dstack_shim.records import FoundDir, RecordKind
from dstack_shim.resources.volume_names import volumes_from_mounts
from dstack_shim.tasks.task import Saving, Task

RUNNER_MOUNT = "/tmp/runner"  # noqa: S108 - a path inside the container, fixed by every runner

_STATUS_OF_STEP = {
    "preparing": TaskStatus.PREPARING,
    "pulling": TaskStatus.PULLING,
    "creating": TaskStatus.CREATING,
    "starting": TaskStatus.CREATING,
}


@attrs.frozen
class Restore:
    """Make this task known again. ``gpus`` None: only an inspect of its container tells."""

    task: Task
    gpus: tuple[str, ...] | None
    why: str


@attrs.frozen
class SetAside:
    """Rename the damaged record in this directory."""

    dir: str
    why: str


@attrs.frozen
class LeaveAlone:
    """Not ours to touch, or not to be understood; told so that somebody can look."""

    what: str
    why: str


@attrs.frozen
class Plan:
    """What a restart would do on this host, in the order it is done."""

    set_aside: tuple[SetAside, ...] = ()
    restore: tuple[Restore, ...] = ()
    leave: tuple[LeaveAlone, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """The plan in words, a line an action."""
        return (
            *(f"set aside the record in {item.dir}: {item.why}" for item in self.set_aside),
            *(
                f"restore task {item.task.id} as {item.task.status.value}: {item.why}"
                for item in self.restore
            ),
            *(f"leave alone {item.what}: {item.why}" for item in self.leave),
        )


@attrs.frozen
class HostFacts:
    """What the host says of the things doubtful records claim.

    ``confirmed_keys``: for each directory of :func:`doubtful`, those of its record's keys that
    stand on our lines of the user's authorized_keys already.
    """

    confirmed_keys: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)


def plan(
    found: Iterable[FoundDir], containers: Iterable[Container], home: str, host: HostFacts
) -> Plan:
    """What to do with these directories and labelled containers of the home at ``home``."""
    dirs = {item.name: item for item in found}
    leave: list[LeaveAlone] = []
    mine = _one_per_task(containers, home, leave)
    dir_of = {task_id: _mounted_dir(container, home) for task_id, container in mine.items()}
    dirs = _without_false_ids(dirs, dir_of)
    by_id = _by_id(dirs.values(), dir_of, leave)
    set_aside = [
        SetAside(item.name, item.problem)
        for item in dirs.values()
        if item.kind is RecordKind.DAMAGED
    ]
    restore = [
        _with_record(record_dir, container, home, host)
        if (record_dir := by_id.get(task_id)) is not None
        else _adopted(container, dirs.get(dir_of[task_id][0] or container.name))
        for task_id, container in _running_first(mine)
    ]
    restore += [_tombstone(item) for task_id, item in sorted(by_id.items()) if task_id not in mine]
    claimed = {item.task.dir for item in restore}
    leave += [
        LeaveAlone(f"directory {item.name}", item.problem or "no record and no container")
        for item in dirs.values()
        if item.name not in claimed and item.kind in (RecordKind.NONE, RecordKind.UNREADABLE)
    ]
    return Plan(tuple(set_aside), tuple(restore), tuple(leave))


def doubtful(
    found: Iterable[FoundDir], containers: Iterable[Container], home: str
) -> tuple[FoundDir, ...]:
    """The directories whose record the job could have written, and that claim host keys."""
    believed = {
        name
        for name, writable_by_job in (_mounted_dir(c, home) for c in containers)
        if not writable_by_job
    }
    return tuple(
        item
        for item in found
        if item.record is not None
        and item.record.config.host_ssh_keys
        and item.name not in believed
    )


def _one_per_task(
    containers: Iterable[Container], home: str, leave: list[LeaveAlone]
) -> dict[str, Container]:
    """The container that is the task, for each id; the rest is left alone."""
    groups: dict[str, list[Container]] = {}
    for container in containers:
        if container.home not in (None, home):
            leave.append(_left(container, f"it belongs to the shim home {container.home}"))
        else:
            groups.setdefault(container.task_id, []).append(container)
    chosen = {}
    for task_id, group in groups.items():
        first, *rest = sorted(group, key=lambda c: (not c.state.alive, c.created, c.id))
        chosen[task_id] = first
        leave += [
            _left(other, f"task {task_id} is container {first.id[:12]} already") for other in rest
        ]
    return chosen


def _running_first(mine: Mapping[str, Container]) -> list[tuple[str, Container]]:
    """In the order in which they claim their GPUs: one that two claim stays in use by the task
    that runs on it, whatever a container says that has ended and whose record is lost.
    """
    return sorted(mine.items(), key=lambda item: (not item[1].state.alive, item[0]))


def _left(container: Container, why: str) -> LeaveAlone:
    return LeaveAlone(f"container {container.name} ({container.id[:12]})", why)


def _mounted_dir(container: Container, home: str) -> tuple[str, bool]:
    """The task directory mounted into the container, and whether the job can write all of it."""
    runners = posixpath.join(home, "runners")
    for mount in container.mounts:
        if mount.target != RUNNER_MOUNT:
            continue
        parent, name = posixpath.split(mount.source)
        if parent == runners:
            return name, True
        grandparent, dir = posixpath.split(parent)
        if grandparent == runners and name == "runner":
            return dir, False
    return "", True


def _without_false_ids(
    dirs: Mapping[str, FoundDir], dir_of: Mapping[str, tuple[str, bool]]
) -> dict[str, FoundDir]:
    """The directories, those whose record names another task than their container as damaged."""
    owner = {name: task_id for task_id, (name, _) in dir_of.items() if name}
    return {name: _checked_id(item, owner.get(name)) for name, item in dirs.items()}


def _checked_id(item: FoundDir, owner: str | None) -> FoundDir:
    if item.record is None or owner in (None, item.record.id):
        return item
    problem = f"it names task {item.record.id}, but its container is of task {owner}"
    return FoundDir(item.name, RecordKind.DAMAGED, problem=problem)


def _by_id(
    dirs: Iterable[FoundDir], dir_of: Mapping[str, tuple[str, bool]], leave: list[LeaveAlone]
) -> dict[str, FoundDir]:
    """The directory that is the task's, for each id: the container's own, else the first."""
    groups: dict[str, list[FoundDir]] = {}
    for item in dirs:
        if item.record is None:
            continue
        groups.setdefault(item.record.id, []).append(item)
    by_id = {}
    for task_id, group in groups.items():
        mounted = dir_of.get(task_id, ("", True))[0]
        first, *rest = sorted(group, key=lambda item: (item.name != mounted, item.name))
        by_id[task_id] = first
        leave += [
            LeaveAlone(f"directory {other.name}", f"task {task_id} is in {first.name} already")
            for other in rest
        ]
    return by_id


def _with_record(found: FoundDir, container: Container, home: str, host: HostFacts) -> Restore:
    """A task with both: its record tells what was decided, its container how it stands."""
    assert found.record is not None
    record = found.record
    mounted, writable_by_job = _mounted_dir(container, home)
    if writable_by_job or mounted != found.name:
        record = _confirmed(record, container, host.confirmed_keys.get(found.name, ()))
    decided = record.terminated or record.termination_reason != ""
    gpus = record.gpus if record.gpus is not None else gpus_from_labels(container.labels)
    boot_id = record.boot_id or container.labels.get(LABEL_BOOT)
    task = Task(
        attrs.evolve(record, gpus=gpus, boot_id=boot_id),
        _status(record),
        container.name,
        dir=found.name,
        container_id=container.id,
        ports=_ports(container),
    )
    why = f"container {container.id[:12]} is {container.state.value}"
    if decided:
        why += f", ended by {record.termination_reason or 'a terminate without reason'}"
    return Restore(task, () if record.cleaned_up else gpus, why)


def _confirmed(record: TaskRecord, container: Container, keys: tuple[str, ...]) -> TaskRecord:
    """The record as far as container and host bear it out: the job could have written it.

    It must not plant a key, unmount what it does not use, or give back a GPU it runs on.
    """
    return attrs.evolve(
        record,
        config=attrs.evolve(
            record.config, volumes=_mounted_volumes(container), host_ssh_keys=keys
        ),
        gpus=None,
        cleaned_up=record.cleaned_up and not container.state.alive,
    )


def _adopted(container: Container, found: FoundDir | None) -> Restore:
    """A task without a usable record: what its container shows and says is all there is."""
    saving = Saving.ON_CHANGE
    if found is not None and found.kind is RecordKind.UNREADABLE:
        saving = Saving.HANDS_OFF
    gpus = gpus_from_labels(container.labels)
    user, keys = host_keys_from_labels(container.labels)
    record = TaskRecord(
        id=container.task_id,
        config=TaskConfig(
            id=container.task_id,
            name=container.name.rpartition("-")[0],
            network_mode="host" if container.network_mode == "host" else "bridge",
            volumes=_mounted_volumes(container),
            host_ssh_user=user,
            host_ssh_keys=keys,
        ),
        gpus=gpus,
        boot_id=container.labels.get(LABEL_BOOT),
    )
    task = Task(
        record,
        TaskStatus.RUNNING,
        container.name,
        dir=found.name if found is not None else None,
        saving=saving,
        container_id=container.id,
        ports=_ports(container),
    )
    problem = f" ({found.problem})" if found is not None and found.problem else ""
    return Restore(task, gpus, f"container {container.id[:12]} has no usable record{problem}")


def _tombstone(found: FoundDir) -> Restore:
    """A task without a container: the background step gives it its end before the first answer."""
    assert found.record is not None
    record = found.record
    step = record.intent.step if record.intent else ""
    task = Task(
        record,
        _status(record),
        container_name(record.config.name, record.id),
        dir=found.name,
    )
    gpus = () if record.cleaned_up else record.gpus or ()
    return Restore(task, gpus, f"no container{f', its start was {step}' if step else ''}")


def _status(record: TaskRecord) -> TaskStatus:
    """Where a task stands by its record; one that nobody saw running is shown so by the step."""
    if record.terminated or record.termination_reason:
        return TaskStatus.TERMINATED
    step = record.intent.step if record.intent else ""
    return _STATUS_OF_STEP.get(step, TaskStatus.RUNNING)


def _ports(container: Container) -> tuple[PortMapping, ...] | None:
    """None where they are not known, as for a container that ended: an empty list would send
    servers to the host's own ports, perhaps to the runner of another job.
    """
    return () if container.network_mode == "host" else container.ports or None


def _mounted_volumes(container: Container) -> tuple[VolumeInfo, ...]:
    return volumes_from_mounts(mount.source for mount in container.mounts)
