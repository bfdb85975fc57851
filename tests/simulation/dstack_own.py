"""dstack's own shim for a while on the same host: a strict reader and writer of version 1.

It keeps nothing of ours in a record that it writes, knows no tombstones, and makes containers
without our labels. What it does is done at once: it is not the one under test.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import attrs
from dstack_shim_contracts.record import TaskRecord, read_record, write_record
from dstack_shim_contracts.statuses import Reason

from dstack_shim.engine.protocol import LABEL_IS_TASK, LABEL_TASK_ID, ContainerState
from dstack_shim.records import RecordKind
from tests.lab.fake_engine import FakeContainer
from tests.simulation.disk import Content, records_on
from tests.simulation.host import GPUS
from tests.simulation.shim import VOLUMES, spec_of
from tests.simulation.stories import dir_of
from tests.simulation.watch import gpus_of

if TYPE_CHECKING:
    from tests.simulation.world import World

_VERSION_1: dict[str, type] = {
    "version": int,
    "id": str,
    "config": dict,
    "termination_reason": str,
    "termination_message": str,
    "cleaned_up": bool,
}
_CONFIG: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "name": (str,),
    "registry_username": (str,),
    "registry_password": (str,),
    "image_name": (str,),
    "container_user": (str,),
    "privileged": (bool,),
    "gpu": (int,),
    "cpu": (int, float),
    "memory": (int,),
    "shm_size": (int,),
    "network_mode": (str,),
    "volumes": (list, type(None)),
    "volume_mounts": (list, type(None)),
    "instance_mounts": (list, type(None)),
    "gpu_devices": (list, type(None)),
    "host_ssh_user": (str,),
    "host_ssh_keys": (list, type(None)),
    "container_ssh_keys": (list, type(None)),
}


class NotVersion1(Exception):
    """A strict reader of version 1 cannot read this."""


def read_strictly(raw: bytes) -> dict[str, Any]:
    """What version 1 knows of a record, with exactly its types.

    Raises :class:`NotVersion1`.
    """
    if not raw.endswith(b"\n"):
        raise NotVersion1("no newline at its end")
    document = json.loads(raw)
    for key, kind in _VERSION_1.items():
        if type(document.get(key)) is not kind:
            raise NotVersion1(f"{key} is {document.get(key)!r}")
    if document["version"] != 1:
        raise NotVersion1(f"version {document['version']}")
    folded = [key.lower() for key in document]
    if sorted(folded) != sorted(set(folded)):
        raise NotVersion1("one key in two letter cases")
    config = document["config"]
    for key, kinds in _CONFIG.items():
        if type(config.get(key)) not in kinds:
            raise NotVersion1(f"config.{key} is {config.get(key)!r}")
    if config["registry_username"] or config["registry_password"]:
        raise NotVersion1("config holds credentials")
    return {
        **{key: document[key] for key in _VERSION_1},
        "config": {key: config[key] for key in _CONFIG},
    }


def write_own(document: dict[str, Any]) -> bytes:
    """A record as dstack's own shim writes it: null for an empty list."""
    config = {
        key: item or None if item == [] else item for key, item in document["config"].items()
    }
    return json.dumps({**document, "config": config}).encode() + b"\n"


class DstackShim:
    """Has the host for a while."""

    def __init__(self, world: World, rewrites: str) -> None:
        self._world = world
        self._rewrites = rewrites
        self._dice = world.dice

    async def live(self) -> None:
        """Restore, do its background step, do a thing or two, go."""
        boot = self._world.boot
        self._world.tell("dstack's own shim begins")
        self._forget_what_has_no_container()
        self._step()
        await asyncio.sleep(self._dice.choice((0.5, 3.0, 30.0)))
        if self._world.boot is boot and not self._world.power_is_off:
            self._serve()
            self._step()
            self._world.tell("dstack's own shim goes")

    def _forget_what_has_no_container(self) -> None:
        owners = {box.spec.labels[LABEL_TASK_ID] for box in self._containers()}
        for dir, record in list(records_on(self._world.disk)):
            self._read(record)
            if record.id not in owners:
                self._forget(dir, record.id)
        self._give_back()

    def _forget(self, dir: str, task_id: str) -> None:
        story = self._world.stories.get(task_id)
        if story is not None:
            story.removals += 1
        self._world.disk.put(dir, None)
        self._world.disk.flush(dir)

    def _step(self) -> None:
        by_id = {box.spec.labels[LABEL_TASK_ID]: box for box in self._containers()}
        for dir, record in list(records_on(self._world.disk)):
            if record.id in by_id:
                self._bring_in_line(dir, record, by_id[record.id])
        self._give_back()

    def _bring_in_line(self, dir: str, record: TaskRecord, box: FakeContainer) -> None:
        document = self._read(record)
        if document["termination_reason"]:
            if box.state.alive:
                self._world.engine.exits_by = "dstack"
                self._world.engine.exit(box.id, 137)
                self._world.engine.exits_by = "itself"
            if not document["cleaned_up"]:
                self._write(dir, {**document, "cleaned_up": True})
        elif box.state.alive:
            chance = {"rewrites all": 1.0, "rewrites some": 0.5}.get(self._rewrites, 0.0)
            if self._dice.random() < chance:
                self._write(dir, document)
        elif self._dice.random() < 0.2:  # killed between the two writes of an end
            self._write(dir, {**document, "cleaned_up": True})
        else:
            reason, message = _outcome(box)
            ended = {"termination_reason": reason, "termination_message": message}
            story = self._world.stories.get(record.id)
            if story is not None:
                story.asked.append((reason, message))
            self._write(dir, {**document, **ended, "cleaned_up": True})

    def _serve(self) -> None:
        running = [
            (dir, record)
            for dir, record in records_on(self._world.disk)
            if not record.termination_reason
        ]
        if running and self._dice.random() < 0.5:
            dir, record = self._dice.choice(running)
            document = self._read(record)
            asked = ("terminated_by_server", "said to dstack's own")
            story = self._world.stories.get(record.id)
            if story is not None:
                story.asked.append(asked)
            reason, message = asked
            ended = {"termination_reason": reason, "termination_message": message}
            self._write(dir, {**document, **ended})
        unknown = [
            number
            for number, config in enumerate(self._world.schedule.configs)
            if self._world.stories.get(config.id) is None
            and dir_of(number) not in self._world.disk.visible
            and all(box.spec.name != dir_of(number) for box in self._all())
        ]
        if unknown and self._dice.random() < 0.5:
            self._submit(self._dice.choice(unknown))

    def _submit(self, task: int) -> None:
        config = self._world.schedule.configs[task].without_credentials()
        in_use = {gpu for box in self._containers() if box.state.alive for gpu in gpus_of(box)}
        idle = tuple(gpu for gpu in GPUS if gpu not in in_use)
        if config.gpu > len(idle):
            return
        gpus = idle if config.gpu == -1 else idle[: config.gpu]
        dir = dir_of(task)
        world = self._world
        record = TaskRecord(config.id, config)
        story = world.stories.begin(config.id, dir, config)
        story.is_accepted = story.is_loose = True
        story.excuses.add("dstack's own shim may not have started it")
        self._write(dir, self._read(record))
        world.host.mounted.update(dict.fromkeys(volume.name for volume in config.volumes))
        self._give_back()
        world.engine.images.setdefault(
            f"{config.image_name}:latest", world.schedule.programs[task]
        )
        spec = spec_of(config, dir, dir, gpus, with_labels=False)
        world.engine.place(spec, run=not world.schedule.programs[task].start_error)

    def _give_back(self) -> None:
        """What is taken on the host is what unreleased tasks need."""
        world = self._world
        records = [record for _, record in records_on(world.disk) if not record.cleaned_up]
        with_record = {record.id for _, record in records_on(world.disk)}
        kept = {
            mount.source.removeprefix(VOLUMES)
            for box in self._containers()
            if box.spec.labels[LABEL_TASK_ID] not in with_record
            for mount in box.spec.mounts
            if mount.source.startswith(VOLUMES)
        } & set(world.host.mounted)
        kept |= {volume.name for record in records for volume in record.config.volumes}
        world.host.mounted = {name: None for name in world.host.mounted if name in kept}
        for user in list(world.host.keys):
            world.host.keys[user] = tuple(
                dict.fromkeys(
                    key
                    for record in records
                    if record.config.host_ssh_user == user
                    for key in record.config.host_ssh_keys
                )
            )

    def _read(self, record: TaskRecord) -> dict[str, Any]:
        try:
            return read_strictly(write_record(record))
        except NotVersion1 as error:
            self._world.violate(f"{record.id} is no record of version 1: {error}")
            raise

    def _write(self, dir: str, document: dict[str, Any]) -> None:
        raw = write_own(document)
        content = self._world.disk.visible.get(dir, Content())
        story = self._world.stories.get(document["id"])
        if story is not None:
            story.is_loose = True
        self._world.disk.put(
            dir, attrs.evolve(content, kind=RecordKind.GOOD, record=read_record(raw))
        )
        self._world.disk.flush(dir)

    def _containers(self) -> list[FakeContainer]:
        return [box for box in self._all() if LABEL_IS_TASK in box.spec.labels]

    def _all(self) -> list[FakeContainer]:
        return list(self._world.engine.containers.values())


def _outcome(box: FakeContainer) -> tuple[str, str]:
    if box.state is ContainerState.CREATED:
        return Reason.EXECUTOR_ERROR, "container was not started"
    if box.exit_code == 0:
        return Reason.DONE_BY_RUNNER, ""
    return Reason.CONTAINER_EXITED_WITH_ERROR, "\n".join(box.output[-5:])
