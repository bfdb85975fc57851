"""What dstack's own shim leaves on a host, in the three layouts that exist.

Written from the protocol page alone. Its containers carry two labels and no more; its lists are
null when they are empty; its records end in a newline and are its owner's only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
from dstack_shim_contracts.naming import container_name


@attrs.frozen
class Layout:
    """A range of releases: whether there is a record, and whether the job can write it."""

    releases: str
    has_record: bool
    is_mounted_whole: bool

    def __str__(self) -> str:
        return self.releases


BEFORE_RECORDS = Layout("before 0.21.3", has_record=False, is_mounted_whole=True)
WRITABLE_RECORD = Layout("0.21.3", has_record=True, is_mounted_whole=True)
RECORD_BESIDE = Layout("0.21.4 and later", has_record=True, is_mounted_whole=False)
LAYOUTS = (BEFORE_RECORDS, WRITABLE_RECORD, RECORD_BESIDE)


def config(task_id: str, **changes: Any) -> dict[str, Any]:
    """A submit body as it is kept in a record: defaults applied, no credentials."""
    return {
        "id": task_id,
        "name": f"{task_id}-0-0",
        "registry_username": "",
        "registry_password": "",
        "image_name": "runs-on",
        "container_user": "root",
        "privileged": False,
        "gpu": 1,
        "cpu": 0,
        "memory": 0,
        "shm_size": 0,
        "network_mode": "host",
        "volumes": None,
        "volume_mounts": None,
        "instance_mounts": None,
        "gpu_devices": None,
        "host_ssh_user": "",
        "host_ssh_keys": None,
        "container_ssh_keys": None,
        **changes,
    }


def make_task_dir(home: Path, layout: Layout, config: dict[str, Any], **decided: Any) -> Path:
    """The task directory in that layout; returns what is mounted as ``/tmp/runner``."""
    task_dir = home / "runners" / container_name(config["name"], config["id"])
    task_dir.mkdir(parents=True, mode=0o755 if layout.is_mounted_whole else 0o700)
    if layout.has_record:
        document = {
            "version": 1,
            "id": config["id"],
            "config": config,
            "termination_reason": "",
            "termination_message": "",
            "cleaned_up": False,
            **decided,
        }
        record = task_dir / "task.json"
        record.write_bytes(json.dumps(document, separators=(",", ":")).encode() + b"\n")
        record.chmod(0o600)
    if layout.is_mounted_whole:
        return task_dir
    (task_dir / "runner").mkdir(mode=0o755)
    return task_dir / "runner"


def labels(task_id: str) -> dict[str, str]:
    """Those of its containers."""
    return {"ai.dstack.shim.is-task": "true", "ai.dstack.shim.task-id": task_id}
