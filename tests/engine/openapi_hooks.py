"""Loaded by schemathesis: steers its requests to where there is something to find, and to no harm.

``LAB_IMAGE`` is an image that is here, ``LAB_FOLDER`` a directory in which instance mounts may be
made: a task makes the ones that are missing, and the root of the file system is the machine's own.
"""

from __future__ import annotations

import os
from typing import Any
from zlib import crc32

import schemathesis

IMAGE = os.environ["LAB_IMAGE"]
FOLDER = os.environ["LAB_FOLDER"]
IDS = 8  # few, so that requests meet


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Change a request before it is sent; the same request is always changed in the same way."""
    body = case.body
    if case.operation.label == "POST /api/shutdown":
        _spare_the_shim(body)
    if case.operation.label == "POST /api/tasks" and isinstance(body, dict):
        _let_it_get_far(body)
        _keep_its_mounts_in_a_folder(body)
    if case.meta is None or case.meta.phase.name.value != "stateful":
        # In that phase the ids already are those of tasks that were submitted.
        for part in (case.path_parameters, body):
            if isinstance(part, dict) and isinstance(part.get("id"), str) and part["id"]:
                part["id"] = _often_the_same(part["id"])


def _spare_the_shim(body: Any) -> None:
    """Make a valid shutdown invalid: it would end the run."""
    if isinstance(body, dict) and isinstance(body.get("force"), bool | None):
        body["force"] = "no"


def _let_it_get_far(body: dict[str, Any]) -> None:
    """Most tasks do without most of what ends a start early: there would be little else."""
    if body.get("image_name") and not _one_in(3, body):
        body["image_name"] = IMAGE
    if body.get("host_ssh_user") and not _one_in(3, body):
        body["host_ssh_user"] = "root"
    for name in ("gpu", "volumes", "volume_mounts"):
        if not _one_in(3, (name, body)):
            body.pop(name, None)


def _keep_its_mounts_in_a_folder(body: dict[str, Any]) -> None:
    mounts = body.get("instance_mounts")
    for mount in mounts if isinstance(mounts, list) else ():
        path = mount.get("instance_path") if isinstance(mount, dict) else None
        if isinstance(path, str) and path.startswith("/") and not path.startswith(FOLDER):
            mount["instance_path"] = FOLDER + path


def _often_the_same(task_id: str) -> str:
    return task_id if _one_in(4, task_id) else f"t{crc32(task_id.encode(errors='replace')) % IDS}"


def _one_in(number: int, of: object) -> bool:
    return crc32(repr(of).encode(errors="replace")) % number == 0
