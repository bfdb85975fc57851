"""A strict reader of version 1 of ``task.json``, as dstack's own shims since 0.21.3 read it.

Written from the protocol alone and sharing nothing with the contracts, so that it can judge what
they write: version must be 1, known keys match in any letter case, types are exact (null is zero),
unknown keys are ignored on reading and gone after a rewrite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

Shape = Mapping[str, Any]

VOLUME: Final[Shape] = {
    "backend": str,
    "name": str,
    "volume_id": str,
    "init_fs": bool,
    "device_name": str,
}
CONFIG: Final[Shape] = {
    "id": str,
    "name": str,
    "registry_username": str,
    "registry_password": str,
    "image_name": str,
    "container_user": str,
    "privileged": bool,
    "gpu": int,
    "cpu": float,
    "memory": int,
    "shm_size": int,
    "network_mode": str,
    "volumes": [VOLUME],
    "volume_mounts": [{"name": str, "path": str}],
    "instance_mounts": [{"instance_path": str, "path": str}],
    "gpu_devices": [{"path_on_host": str, "path_in_container": str}],
    "host_ssh_user": str,
    "host_ssh_keys": [str],
    "container_ssh_keys": [str],
}
RECORD: Final[Shape] = {
    "version": int,
    "id": str,
    "config": CONFIG,
    "termination_reason": str,
    "termination_message": str,
    "cleaned_up": bool,
}


class Refused(Exception):
    """The stock shim would not take this record."""


def read(raw: bytes) -> dict[str, Any]:
    """The record with every key present, or Refused."""
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise Refused(str(error)) from error
    record = _object(RECORD, document, "")
    if record["version"] != 1:
        raise Refused(f"version {record['version']}")
    return record


def rewrite(raw: bytes) -> bytes:
    """The record as it stands after a stock shim has changed and written it."""
    return json.dumps(_with_null_for_empty(read(raw))).encode() + b"\n"


def _with_null_for_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_null_for_empty(item) for key, item in value.items()}
    return None if value == [] else value


def _value(shape: Any, value: object, path: str) -> Any:
    if isinstance(shape, list):
        if value is not None and not isinstance(value, list):
            raise Refused(f"{path}: {value!r}")
        return [_value(shape[0], item, f"{path}[]") for item in value or []]
    if isinstance(shape, Mapping):
        return _object(shape, {} if value is None else value, path)
    if value is None:
        return None if path.endswith("device_name") else shape()
    if shape is float and type(value) is int:
        return float(value)
    if type(value) is not shape:
        raise Refused(f"{path}: {value!r}")
    return value


def _object(shape: Shape, value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{path}: {value!r}")
    given = {key.lower(): item for key, item in value.items()}
    return {key: _value(part, given.get(key), f"{path}.{key}") for key, part in shape.items()}
