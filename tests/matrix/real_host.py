"""Cells on a real engine, a real shim's home, real mounts and a real key file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from docker.types import HostConfig
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.census import MARKER, VOLUMES, mounted_volumes
from tests.lab.host import Host, public_key, run
from tests.lab.images import Images
from tests.matrix import records
from tests.matrix.cells import LINES, Cell, Seen
from tests.matrix.kept import kept_record

POSSIBLE = ("none", "created", "running", "paused", "exited 0", "exited 7", "OOM", "two")
"""What can be made of a container on a real engine."""
_SCRIPTS = {
    "exited 0": "exit 0",
    "exited 7": "; ".join([*(f"echo '{line}'" for line in LINES), "exit 7"]),
    "OOM": "exec tail /dev/zero 2>/dev/null",
}
_RUNS_ON = "while true; do sleep 3600; done"
_TRIES = 20
_MEMORY = 16 << 20  # bytes; less, and the engine cannot start it


class RealHost:
    """A host on which a shim was killed; all its cells are restored at once."""

    def __init__(
        self, host: Host, client: docker.APIClient, cells: Sequence[Cell], home: str
    ) -> None:
        host.user(records.USER)
        host.gpus(*map(_gpu, cells))
        self.shim = host.shim(home=home)
        self._host = host
        self._client = client
        self._image = Images(client).plain()
        self._cells = tuple(cells)
        self._raw: dict[Cell, bytes | None] = {}
        self._boxes: dict[Cell, str] = {}
        self._before: dict[Cell, Mapping[str, Any]] = {}
        keys = "".join(f"{_key(cell)}{MARKER}\n" for cell in cells if cell.has_things)
        host.write_keys(records.USER, keys.encode())
        # What must not be old when the shim starts comes last.
        for cell in sorted(cells, key=lambda cell: cell.container == "created"):
            self._place(cell)

    def _place(self, cell: Cell) -> None:
        config = records.config(cell, self._image, _key(cell))
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        raw = records.record(cell, config, gpu=_gpu(cell), boot_id=boot_id, now=time.time())
        (self._dir(cell) / "runner").mkdir(parents=True)
        if raw is not None:
            (self._dir(cell) / "task.json").write_bytes(raw)
        self._raw[cell] = raw
        Path(VOLUMES, cell.task_id).mkdir(parents=True)
        if cell.has_things:
            run("mount", "-t", "tmpfs", cell.task_id, VOLUMES + cell.task_id)
        if cell.container == "none":
            return
        if cell.container == "two":
            self._client.wait(self._made(cell, "exited 7", f"{cell.task_id}-other"))
        self._boxes[cell] = self._ready(cell)
        self._before[cell] = self._state(cell)

    def _ready(self, cell: Cell) -> str:
        """Its container, ended if that is what it shall be."""
        for _ in range(_TRIES):
            box = self._made(cell, cell.container, self._dir(cell).name)
            if cell.container not in _SCRIPTS:
                return box
            self._client.wait(box)
            state = self._client.inspect_container(box)["State"]
            if cell.container != "OOM" or state["OOMKilled"]:
                return box
            # The kernel's word of it got lost: the container's group went first.
            self._client.remove_container(box)
        raise AssertionError("no container is known to have run out of memory")

    def _made(self, cell: Cell, what: str, name: str) -> str:
        prefix = "ai.dstack.shim."
        keys = {"user": records.USER, "keys": [_key(cell)]}
        box: str = self._client.create_container(
            self._image,
            ["/bin/sh", "-c", _SCRIPTS.get(what, _RUNS_ON)],
            name=name,
            labels={
                f"{prefix}is-task": "true",
                f"{prefix}task-id": cell.task_id,
                f"{prefix}home": str(self.shim.home),
                f"{prefix}gpus": json.dumps([_gpu(cell)]),
                f"{prefix}host-ssh-keys": json.dumps(keys),
            },
            host_config=self._host_config(cell, what),
        )["Id"]
        if what != "created":
            self._client.start(box)
        if what == "paused":
            self._client.pause(box)
        return box

    def _host_config(self, cell: Cell, what: str) -> HostConfig:
        binds = [f"{self._dir(cell)}/runner:/tmp/runner", f"{VOLUMES}{cell.task_id}:/data"]
        return self._client.create_host_config(
            binds=binds, network_mode="host", mem_limit=_MEMORY if what == "OOM" else 0
        )

    # Looking at it.

    def look(self) -> None:
        """Ask for what all cells have in common."""
        self.statuses = self.shim.statuses()
        self._idle = self._idle_gpus()
        self._mounted = mounted_volumes()
        self._keys = self._host.keys_of(records.USER).decode()

    def seen(self, cell: Cell) -> Seen:
        """How the cell looked at the last :meth:`look`; the rest is asked for now."""
        told = ("unknown", "", "")
        if cell.task_id in self.statuses:
            info = self.shim.client.task(cell.task_id)
            told = (info.status.value, info.termination_reason, info.termination_message)
        return Seen(
            *told,
            has_gpu=_gpu(cell) not in self._idle,
            has_volume=cell.task_id in self._mounted,
            has_key=f"{_key(cell)}{MARKER}\n" in self._keys,
            container=self._container(cell),
            record=kept_record(self._dir(cell), self._raw[cell]),
        )

    def _container(self, cell: Cell) -> str:
        if cell not in self._boxes:
            return "none"
        try:
            now = self._state(cell)
        except docker.errors.NotFound:
            return "gone"
        if now == self._before[cell]:
            return "as it was"
        if now["Status"] == "running" and self._before[cell]["Status"] == "created":
            return "started"
        return "stopped" if now["Status"] == "exited" else str(now)

    def _state(self, cell: Cell) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._client.inspect_container(self._boxes[cell])["State"]
        return {name: state[name] for name in ("Status", "StartedAt", "FinishedAt", "ExitCode")}

    def remove_all(self) -> None:
        """As a server that knows none of these tasks."""
        for task_id in self.shim.statuses():
            self.shim.client.terminate(task_id)
            self.shim.client.remove(task_id)

    def left(self) -> set[str]:
        """Which cells anything is left of: a task, directory, container or mount."""
        runners = self.shim.home / "runners"
        names = {self._dir(cell).name: cell.task_id for cell in self._cells}
        prefix = "ai.dstack.shim.task-id"
        return {
            *self.shim.statuses(),
            *(names.get(dir.name, dir.name) for dir in runners.iterdir()),
            *(box["Labels"][prefix] for box in self._client.containers(all=True)),
            *mounted_volumes(),
        }

    def close(self) -> None:
        """Take away what stays for ``doctor`` to tell."""
        self.shim.close()
        for name in mounted_volumes():
            run("umount", VOLUMES + name)

    def _idle_gpus(self) -> set[str]:
        """What a new task is given that asks for all GPUs: the locks are in no answer.

        Its key makes the shim set the user's key file right.
        """
        name, keys = "asks-for-all", (public_key(1),)
        self.shim.submit(
            name, "nobody/has:this", gpu=-1, host_ssh_user=records.USER, host_ssh_keys=keys
        )
        gpus = self.shim.wait_for(name, TaskStatus.TERMINATED).gpus_ids
        self.shim.client.remove(name)
        return set(gpus)

    def _dir(self, cell: Cell) -> Path:
        return self.shim.home / "runners" / container_name(cell.task_id, cell.task_id)


def _gpu(cell: Cell) -> str:
    return f"GPU-{cell.number:08}-1111-2222-3333-444444444444"


def _key(cell: Cell) -> str:
    return public_key(1000 + cell.number)
