"""
Have a release's own ShimClient send everything it can send, and print what went out.

Runs inside the release's environment. stdout: [{"method", "path", "type", "body"}], the body as
text or null. Nothing is listening: an adapter in place of the network notes the request and gives
an answer the client is content with.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import requests
from dstack._internal.core.models.resources import Memory
from dstack._internal.core.models.volumes import InstanceMountPoint, VolumeMountPoint
from dstack._internal.server.schemas.runner import GPUDevice
from dstack._internal.server.services.runner.client import NetworkMode, ShimClient
from requests.adapters import BaseAdapter

ANSWERS = {
    "/api/healthcheck": {"service": "dstack-shim", "version": "0.22.5"},
    "/api/instance/health": {"dcgm": None},
    "/api/instance/info": {},
    "/api/components": {"components": []},
    "/api/tasks": {"tasks": []},
}
TASK = {"id": "t", "status": "running", "termination_reason": "", "termination_message": ""}


class Recorder(BaseAdapter):
    """Stands where the network would be."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[dict[str, Any]] = []

    def send(self, request: Any, *_: Any, **__: Any) -> requests.Response:
        path = request.path_url
        body = request.body
        self.sent.append(
            {
                "method": request.method,
                "path": path,
                "type": request.headers.get("Content-Type"),
                "body": body.decode() if isinstance(body, bytes) else body,
            }
        )
        response = requests.Response()
        response.status_code = 200
        response.request = request
        response._content = json.dumps(ANSWERS.get(path, TASK)).encode()
        return response

    def close(self) -> None:
        """Nothing is open."""


def volume(backend: str, *, external: bool, device: str | None, attached: bool = True) -> Any:
    """A volume as far as the client reads one."""
    attachment = SimpleNamespace(device_name=device) if attached else None
    return SimpleNamespace(
        configuration=SimpleNamespace(backend=SimpleNamespace(value=backend)),
        name=f"{backend}-volume",
        volume_id="vol-0123456789abcdef0",
        external=external,
        get_attachment_data_for_instance=lambda _: attachment,
    )


LEAST: dict[str, Any] = {
    "task_id": "3f0e5a57-3b8f-4d3a-9d0e-1f9f0b7f0001",
    "name": "run-0-0",
    "registry_username": "",
    "registry_password": "",
    "image_name": "busybox",
    "container_user": "root",
    "privileged": False,
    "gpu": None,
    "cpu": None,
    "memory": None,
    "shm_size": None,
    "network_mode": NetworkMode.HOST,
    "volumes": [],
    "volume_mounts": [],
    "instance_mounts": [],
    "gpu_devices": [],
    "host_ssh_user": "",
    "host_ssh_keys": [],
    "container_ssh_keys": [],
    "instance_id": "i-1",
}
MOST = {
    **LEAST,
    "registry_username": "user",
    "registry_password": 'p"a\\ss\u00e9\n',
    "image_name": "registry.example:5000/team/image:1@sha256:" + "0" * 64,
    "privileged": True,
    "gpu": 2,
    "cpu": 1.5,
    "memory": Memory(8.5),
    "shm_size": Memory(0.25),
    "network_mode": NetworkMode.BRIDGE,
    "volumes": [
        volume("aws", external=False, device="/dev/sdf"),
        volume("gcp", external=True, device=None),
        volume("aws", external=True, device=None, attached=False),
    ],
    "volume_mounts": [VolumeMountPoint(name="aws-volume", path="/data")],
    "instance_mounts": [InstanceMountPoint(instance_path="/mnt/a", path="/a")],
    "gpu_devices": [GPUDevice(path_on_host="/dev/nvidia0", path_in_container="/dev/nvidia0")],
    "host_ssh_user": "ubuntu",
    "host_ssh_keys": ["ssh-ed25519 AAAA host"],
    "container_ssh_keys": ["ssh-ed25519 AAAA one", "ssh-rsa BBBB two"],
}


def main() -> None:
    client, recorder = ShimClient(port=1), Recorder()
    client._session.mount("http://", recorder)
    client.healthcheck()
    client.get_instance_health()
    if hasattr(client, "get_instance_info"):
        client.get_instance_info()
    client.get_components()
    client.install_runner("https://example.test/runner")
    client.install_shim("https://example.test/shim")
    client.list_tasks()
    client.get_task("t")
    for task in (LEAST, MOST, {**MOST, "gpu": 0}, {**LEAST, "cpu": 2, "memory": Memory(1)}):
        client.submit_task(**task)
    client.terminate_task("t", reason=None, message=None, timeout=0)
    client.terminate_task("t", reason="terminated_by_user", message="by \u00fcser")
    client.remove_task("t")
    client.get_task_metrics("t")
    client.is_safe_to_restart()
    client.shutdown(force=False)
    client.shutdown(force=True)
    json.dump(recorder.sent, sys.stdout)


if __name__ == "__main__":
    main()
