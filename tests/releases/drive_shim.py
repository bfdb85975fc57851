"""
Drive a live shim with a release's own ShimClient, unmodified, one step or a whole life of a task.

Runs inside a release's environment; the shim listens on a port of this machine.

    drive_shim.py PORT life       [options]   submit, list, info until it runs, terminate, remove
    drive_shim.py PORT submit     [options]
    drive_shim.py PORT info|terminate|remove --id ID
    drive_shim.py PORT list|healthcheck|components

stdout: one JSON object: {"release", "steps": [{"step", "answer"} or {"step", "raised"}]}. Exit code
1 if a step raised; the steps before it are printed all the same. The step ``started`` also has
what was ``seen`` on the way: each status once, with its latest answer. ``--task JSON`` overrides
any argument of ``submit_task``; volumes, mounts and devices are written as in a submit body,
memory and shm_size in GiB. ``--hold FILE`` lets a life go on only once that file exists.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dstack._internal.core.models.common import NetworkMode
from dstack._internal.core.models.resources import Memory
from dstack._internal.core.models.volumes import InstanceMountPoint, VolumeMountPoint
from dstack._internal.server.schemas.runner import GPUDevice
from dstack._internal.server.services.runner.client import ShimClient
from dstack.version import __version__

POLL = 0.1  # seconds between questions while a task starts


class Driver:
    """Does steps and keeps what came of each, until one raises."""

    def __init__(self, client: Any, options: argparse.Namespace) -> None:
        self.client = client
        self.options = options
        self.steps: list[dict[str, Any]] = []

    def do(self, step: str, action: Callable[[], Any]) -> Any:
        try:
            answer = as_json(action())
        except Exception as error:
            self.steps.append({"step": step, "raised": f"{type(error).__name__}: {error}"})
            raise
        self.steps.append({"step": step, "answer": answer})
        return answer

    def healthcheck(self) -> Any:
        return self.do("healthcheck", lambda: self.client.healthcheck(unmask_exceptions=True))

    def components(self) -> Any:
        return self.do("components", lambda: list(self.client.get_components()))

    def list(self) -> Any:
        return self.do("list", self.client.list_tasks)

    def info(self) -> Any:
        return self.do("info", lambda: self.client.get_task(self.options.id))

    def submit(self) -> Any:
        return self.do("submit", lambda: self.client.submit_task(**task(self.options)))

    def terminate(self) -> Any:
        reason, message = self.options.reason, self.options.message
        timeout = self.options.timeout
        return self.do(
            "terminate",
            lambda: self.client.terminate_task(
                self.options.id, reason=reason, message=message, timeout=timeout
            ),
        )

    def remove(self) -> Any:
        return self.do("remove", lambda: self.client.remove_task(self.options.id))

    def wait(self) -> Any:
        """Ask for the task until it runs or has ended; the last answer is the step's."""
        seen: dict[str, Any] = {}
        try:
            return self.do("started", lambda: self._started(seen))
        finally:
            self.steps[-1]["seen"] = seen

    def hold(self) -> None:
        """Wait for a word from outside, if one was wanted."""
        deadline = time.monotonic() + self.options.within
        while self.options.hold and not Path(self.options.hold).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"there is no {self.options.hold}")
            time.sleep(POLL)

    def _started(self, seen: dict[str, Any]) -> Any:
        deadline = time.monotonic() + self.options.within
        while True:
            answer = self.client.get_task(self.options.id)
            seen[answer.status.value] = as_json(answer)
            if answer.status.value in {"running", "terminated"}:
                return answer
            if time.monotonic() > deadline:
                raise TimeoutError(f"still {answer.status.value}")
            time.sleep(POLL)

    def life(self) -> None:
        """What a server does with a task that runs until it is told to stop."""
        self.healthcheck()
        self.submit()
        self.list()
        self.wait()
        self.info()
        self.hold()
        self.terminate()
        self.info()
        self.remove()
        self.list()


def task(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``submit_task``."""
    arguments: dict[str, Any] = {
        "task_id": options.id,
        "name": options.name,
        "registry_username": "",
        "registry_password": "",
        "image_name": options.image,
        "container_user": "root",
        "privileged": False,
        "gpu": 0,
        "cpu": None,
        "memory": None,
        "shm_size": None,
        "network_mode": options.network,
        "volumes": [],
        "volume_mounts": [],
        "instance_mounts": [],
        "gpu_devices": [],
        "host_ssh_user": "",
        "host_ssh_keys": [],
        "container_ssh_keys": [],
        "instance_id": "instance",
        **json.loads(options.task),
    }
    arguments["network_mode"] = NetworkMode(arguments["network_mode"])
    shapes: dict[str, Callable[..., Any]] = {
        "volumes": volume,
        "volume_mounts": VolumeMountPoint,
        "instance_mounts": InstanceMountPoint,
        "gpu_devices": GPUDevice,
    }
    for name, shape in shapes.items():
        arguments[name] = [shape(**item) for item in arguments[name]]
    for name in ("memory", "shm_size"):
        if arguments[name] is not None:
            arguments[name] = Memory(arguments[name])
    return arguments


def volume(
    *, backend: str, name: str, volume_id: str, init_fs: bool, device_name: str | None
) -> Any:
    """A volume as far as the client reads one."""
    attachment = SimpleNamespace(device_name=device_name)
    return SimpleNamespace(
        configuration=SimpleNamespace(backend=SimpleNamespace(value=backend)),
        name=name,
        volume_id=volume_id,
        external=not init_fs,
        get_attachment_data_for_instance=lambda _: attachment,
    )


def as_json(answer: Any) -> Any:
    """Plain JSON of what a client method returned: a model, a list of them, or nothing."""
    if isinstance(answer, list):
        return [as_json(item) for item in answer]
    return json.loads(answer.json()) if hasattr(answer, "json") else answer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="drive a shim with dstack's own client")
    parser.add_argument("port", type=int)
    steps = ("life", "submit", "info", "terminate", "remove", "list", "healthcheck", "components")
    parser.add_argument("step", choices=steps)
    parser.add_argument("--id", default="00000000-0000-4000-8000-000000000001")
    parser.add_argument("--name", default="driven-0-0")
    parser.add_argument("--image", default="busybox")
    parser.add_argument("--network", choices=["host", "bridge"], default="host")
    parser.add_argument("--task", default="{}", metavar="JSON")
    parser.add_argument("--reason", default="terminated_by_user")
    parser.add_argument("--message", default="")
    parser.add_argument("--timeout", type=int, default=0)
    parser.add_argument("--hold", default="", metavar="FILE")
    parser.add_argument("--within", type=float, default=60.0, help="seconds for a task to start")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    driver = Driver(ShimClient(port=options.port), options)
    try:
        getattr(driver, options.step)()
    except Exception:  # noqa: BLE001  it stands in the last step
        return 1
    finally:
        json.dump({"release": __version__, "steps": driver.steps}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
