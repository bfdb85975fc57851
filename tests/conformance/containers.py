"""What cases read from a task's container."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conformance.shim import Task
from tests.eventually import eventually

ContainerOf = Callable[[Task], Any]


def mount_of(container: Any, target: str) -> dict[str, Any]:
    """The bind mount on this path; there must be exactly one."""
    (found,) = [mount for mount in container.attrs["Mounts"] if mount["Destination"] == target]
    assert found["Type"] == "bind"
    return dict(found)


def runner_arguments(container: Any) -> list[str]:
    """What the runner in the container was started with."""
    file = Path(mount_of(container, "/tmp/runner")["Source"]) / "argv"
    eventually(file.exists, within=10, saying="the runner has started")
    return file.read_text(encoding="utf-8").split("\0")[:-1]


def environment_of(container: Any) -> dict[str, str]:
    """The container's variables."""
    return dict(word.split("=", 1) for word in container.attrs["Config"]["Env"])
