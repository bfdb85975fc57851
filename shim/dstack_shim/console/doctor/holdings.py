"""What tasks hold of the host, against what is there: containers, GPUs, volumes, keys. Pure.

Without an engine nobody knows the tasks, and nothing is said: it would all look like nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator

from dstack_shim_contracts.record import TaskRecord

from dstack_shim.console.doctor.facts import Facts
from dstack_shim.console.doctor.findings import Check, Cure, Fix, broken, ok, warning
from dstack_shim.engine.protocol import Container
from dstack_shim.resources.volume_names import volumes_from_mounts
from dstack_shim.tasks.leaks import Held, host_keys, leaks

_ENDED_RUNS = "a running shim stops it within seconds; if none does, see dstack-shim events"
_TWO_RUN = "stop one of them: two jobs write to the same volumes"


def of_containers(facts: Facts) -> Iterator[Check]:
    """Those that run and should not."""
    if facts.sources is None or facts.sources.containers is None or facts.seen.plan is None:
        return
    home = str(facts.sources.home)
    tasks = {item.task.id: item.task for item in facts.seen.plan.restore}
    for container in facts.sources.containers:
        if container.home != home or not container.state.alive:
            continue  # another's, or dstack's own shim's, which is not ours beyond doubt
        task = tasks.get(container.task_id)
        if task is None:
            continue
        what, stop = f"container {container.name}", Fix(Cure.STOP, container.id)
        if task.container_id != container.id:
            words = f"runs as a second one of task {task.id}"
            yield broken(what, words, _TWO_RUN, stop)
        elif task.over and task.released:
            words = f"runs, but task {task.id} has ended and holds nothing any more"
            yield broken(what, words, _ENDED_RUNS, stop)
    yield ok("containers", f"{len(facts.sources.containers)} of tasks")


def of_gpus(facts: Facts) -> Iterator[Check]:
    """GPUs that a task holds and the host does not have."""
    if facts.seen.plan is None:
        return
    lost = 0
    for record in facts.holders:
        for gpu in record.gpus or ():
            if gpu not in facts.gpus:
                lost += 1
                yield broken(
                    f"GPU {gpu}",
                    f"task {record.id} holds it, and this host has none of that id",
                    "see the vendor's tool and dmesg; a device that fell off the bus needs a reboot",
                )
    if not lost:
        held = sum(len(record.gpus or ()) for record in facts.holders)
        yield ok("GPUs", f"{len(facts.gpus)} here, {held} held by tasks")


def of_volumes(facts: Facts) -> Iterator[Check]:
    """Mounts that no task needs, and tasks whose mount is missing."""
    if facts.seen.plan is None:
        return
    in_use = _mounted_by_containers(facts)
    for leak in leaks(facts.holders, Held({}, facts.mounted, {})):
        if leak.what not in in_use:
            yield warning(
                f"volume {leak.what}",
                f"{facts.mounted[leak.what]} is mounted and no task needs it",
                "unmount it, or its disk cannot be detached",
                _unless_shared(facts, Fix(Cure.UNMOUNT, leak.what)),
            )
    needed = {volume.name: record for record in facts.holders for volume in record.config.volumes}
    for name, record in needed.items():
        if name not in facts.mounted and _runs(facts, record):
            yield broken(
                f"volume {name}",
                f"task {record.id} runs with it, and it is not mounted",
                "what the job writes goes on in its container's own mount; do not detach the disk "
                "before it ends",
            )
    yield ok("volumes", f"{len(facts.mounted)} mounted")


def of_keys(facts: Facts) -> Iterator[Check]:
    """Lines of ours that no task needs, and keys of tasks that have no line."""
    if facts.seen.plan is None:
        return
    for user, present in facts.keys.items():
        extra = leaks(facts.holders, Held({}, (), {user: present}))
        if extra:
            names = ", ".join(leak.what for leak in extra[:3])
            yield warning(
                f"keys of {user}",
                f"{len(extra)} of a task that is gone can still log in: {names}",
                "remove the lines that end in '# added by dstack-shim'",
                _unless_shared(facts, Fix(Cure.FORGET_KEYS, user)),
            )
    for record in facts.holders:
        user = record.config.host_ssh_user
        if any(key not in facts.keys.get(user, ()) for _, key in host_keys(record)):
            yield warning(
                f"keys of {user}",
                f"a key of task {record.id} is not in authorized_keys",
                "its server cannot reach the job over SSH; submit the job anew",
            )
    yield ok("keys", f"{sum(map(len, facts.keys.values()))} on lines of the shim")


def _unless_shared(facts: Facts, fix: Fix) -> Fix | None:
    # Without the containers, or beside another shim's, nobody knows whose it is.
    knows = facts.sources is not None and facts.sources.engine_answers
    return fix if knows and not facts.shares_host else None


def _mounted_by_containers(facts: Facts) -> set[str]:
    containers = (facts.sources.containers if facts.sources else None) or ()
    sources = (mount.source for box in containers if box.state.alive for mount in box.mounts)
    return {volume.name for volume in volumes_from_mounts(sources)}


def _runs(facts: Facts, record: TaskRecord) -> bool:
    containers = (facts.sources.containers if facts.sources else None) or ()
    return any(_is_of(container, record) for container in containers)


def _is_of(container: Container, record: TaskRecord) -> bool:
    return container.task_id == record.id and container.state.alive
