"""What lies in a cell's task directory where its record belongs, written without the shim."""

from __future__ import annotations

import json
from typing import Any

from tests.contracts import stock_reader
from tests.matrix import cells
from tests.matrix.cells import Cell

USER = "alice"


def config(cell: Cell, image: str, key: str) -> dict[str, Any]:
    """The body that was submitted, with its defaults."""
    volume = {"backend": "gcp", "name": cell.task_id, "volume_id": "v", "init_fs": False}
    return {
        "id": cell.task_id,
        "name": cell.task_id,
        "registry_username": "",
        "registry_password": "",
        "image_name": image,
        "container_user": "root",
        "privileged": False,
        "gpu": 1,
        "cpu": 0.0,
        "memory": 0,
        "shm_size": 0,
        "network_mode": "host",
        "volumes": [{**volume, "device_name": cell.task_id}],
        "volume_mounts": [{"name": cell.task_id, "path": "/data"}],
        "instance_mounts": [],
        "gpu_devices": [],
        "host_ssh_user": USER,
        "host_ssh_keys": [key],
        "container_ssh_keys": [],
    }


def record(
    cell: Cell, config: dict[str, Any], *, gpu: str, boot_id: str, now: float
) -> bytes | None:
    """The file's content, None for no file."""
    if cell.record == cells.NONE:
        return None
    whole = json.dumps(_document(cell, config, gpu, boot_id, now)).encode() + b"\n"
    if cell.record == cells.DAMAGED:
        return whole[: len(whole) // 2]
    if cell.record == cells.KEYS_LOST:
        return stock_reader.rewrite(whole)
    return whole


def _document(
    cell: Cell, config: dict[str, Any], gpu: str, boot_id: str, now: float
) -> dict[str, Any]:
    has_reason = cell.task in ("terminating", "terminated")
    version = 2 if cell.record == cells.OTHER_VERSION else 1
    document = {
        "version": version,
        "id": cell.task_id,
        "config": config,
        "termination_reason": cells.REASON if has_reason else "",
        "termination_message": cells.MESSAGE if has_reason else "",
        "cleaned_up": cell.gave_back,
        "terminated": cell.task in cells.DECIDED,
        "intent": {"step": cells.STEPS[cell.task], "at": now, "handover": False},
        "boot_id": boot_id,
        "min_reader": version,
        "written_by": "dstack-shim-py 0.0.0",
    }
    if cell.task != "pending":
        document["gpus"] = [gpu]
    if cell.task in ("terminated", "terminated, no reason"):
        document["ended_at"] = now
    return document
