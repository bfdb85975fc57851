"""Tasks as older releases left them: their folder itself is mounted into the container."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import docker

from tests.conformance.secrets import NO_LOGIN
from tests.conformance.shim import Shim, Task


@dataclass
class OldTask:
    """A running task of a release up to 0.21.3, made without any shim."""

    task: Task
    container: Any


def make_old_task(
    engine: docker.DockerClient,
    shim: Shim,
    image: str,
    *,
    name: str = "old-0-0",
    record: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    mounts: list[docker.types.Mount] | None = None,
) -> OldTask:
    """Start its container; with ``record``, put a ``task.json`` into the mounted folder (0.21.3).

    ``config`` is added to the one in the record, which is what a job could have written there.
    """
    task = shim.task(image, name=name)
    task.dir.mkdir(parents=True)
    if record is not None:
        whole = {
            "version": 1,
            "id": task.id,
            "config": task.body | NO_LOGIN | (config or {}),
            **record,
        }
        (task.dir / "task.json").write_text(json.dumps(whole) + "\n")
    bind = docker.types.Mount("/tmp/runner", str(task.dir), type="bind")
    script = "mkfifo /tmp/end; read code </tmp/end; exit $code"
    container = engine.containers.run(
        image,
        [script],
        entrypoint=["/bin/sh", "-c"],
        name=task.container_name,
        detach=True,
        network_mode="host",
        labels={"ai.dstack.shim.is-task": "true", "ai.dstack.shim.task-id": task.id},
        mounts=[bind, *(mounts or [])],
    )
    return OldTask(task, container)
