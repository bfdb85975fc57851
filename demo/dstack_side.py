"""dstack's own code, asked line by line: run by the Python of a stock dstack environment.

Reads one JSON question a line from stdin and answers with one JSON line. The questions go to
dstack's real ``ShimClient`` and to the real function of its instance check that decides about
restarts; nothing of either is changed here. With ``--extension`` our plugin is loaded first, the
way dstack's server loads it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

CHECK = "dstack._internal.server.background.pipeline_tasks.instances.check"
CLIENT = "dstack._internal.server.services.runner.client"


class DstackSide:
    """The few things the demo asks of dstack."""

    def __init__(self, port: int) -> None:
        self._port = port

    def _client(self) -> Any:
        return importlib.import_module(CLIENT).ShimClient(port=self._port)

    def submit(self, task_id: str, name: str, image: str) -> None:
        """Submit a job's task as dstack does."""
        network = importlib.import_module("dstack._internal.core.models.common").NetworkMode
        self._client().submit_task(
            task_id=task_id,
            name=name,
            registry_username="",
            registry_password="",
            image_name=image,
            container_user="root",
            privileged=False,
            gpu=0,
            cpu=None,
            memory=None,
            shm_size=None,
            network_mode=network.HOST,
            volumes=[],
            volume_mounts=[],
            instance_mounts=[],
            gpu_devices=[],
            host_ssh_user="",
            host_ssh_keys=[],
            container_ssh_keys=[],
            instance_id="demo",
        )

    def tasks(self) -> dict[str, str]:
        """Task id → status, as dstack's models read the list."""
        tasks = self._client().list_tasks().tasks
        return {str(task.id): task.status.value for task in tasks}

    def task(self, task_id: str) -> dict[str, Any]:
        """One task, as dstack's models read it."""
        info = self._client().get_task(task_id)
        return {
            "status": info.status.value,
            "reason": str(getattr(info.termination_reason, "value", info.termination_reason)),
            "message": info.termination_message,
        }

    def end(self, task_id: str) -> None:
        """Terminate and remove, in the order and with the timeout dstack uses."""
        client = self._client()
        client.terminate_task(task_id=task_id, reason="terminated_by_user", timeout=0)
        client.remove_task(task_id=task_id)

    def decide(self) -> None:
        """One run of the part of the instance check that restarts shims."""
        instance = SimpleNamespace(id="demo", name="demo-instance", jobs=[])
        check = importlib.import_module(CHECK)
        check._maybe_install_components(instance, self._client())  # noqa: SLF001 - the decision


def main() -> None:
    """Answer until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--extension", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.extension:
        importlib.import_module("dstack_shim_server.plugin").ShimRestartPlugin()
    importlib.import_module(CHECK)
    side = DstackSide(options.port)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"answer": getattr(side, name)(*arguments)}
        except Exception as error:  # noqa: BLE001 - whoever asked shall show it
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
