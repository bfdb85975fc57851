"""A record of ours with every key, and version 1 records as another shim writes them."""

from __future__ import annotations

import json
from typing import Any

from dstack_shim_contracts.api import TaskConfig, VolumeInfo, VolumeMount
from dstack_shim_contracts.record import Intent, Step, TaskRecord, read_record

CONFIG = TaskConfig(
    id="t1",
    name="train",
    image_name="alpine",
    cpu=1.5,
    volumes=(VolumeInfo(backend="aws", name="data", volume_id="vol-1"),),
    volume_mounts=(VolumeMount("data", "/data"),),
    host_ssh_keys=("ssh-ed25519 AAAA",),
).with_defaults()
RECORD = TaskRecord(
    id="t1",
    config=CONFIG,
    intent=Intent(Step.STARTING, 1764433500.25, handover=True),
    boot_id="6d1a1a3e",
    gpus=("GPU-1",),
    stop_by=1764433560.0,
    ended_at=1764433570.5,
    written_by="dstack-shim 0.1.0",
    extra={"later": {"deep": [1, None, "é"]}},
    config_extra={"also_later": True},
)


def document(**changes: object) -> dict[str, Any]:
    """A version 1 record as another shim writes it, changed."""
    config = {"id": "t1", "name": "train", "image_name": "alpine", "volumes": None}
    stock = {
        "version": 1,
        "id": "t1",
        "config": config,
        "termination_reason": "",
        "termination_message": "",
        "cleaned_up": False,
    }
    return {**stock, **changes}


def read(document: object) -> TaskRecord:
    return read_record(json.dumps(document).encode())
