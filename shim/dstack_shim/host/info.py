"""``host_info.json``: what an SSH fleet's server reads once, right after the service starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from attrs import asdict, frozen

from dstack_shim.host import machine
from dstack_shim.host.gpus import GpuInventory
from dstack_shim.log import EventLog

FILE_NAME = "host_info.json"

Value = TypeVar("Value")


@frozen
class HostInfo:
    """The file's keys; name and memory are those of the first GPU."""

    gpu_vendor: str
    gpu_name: str
    gpu_memory: int  # MiB
    gpu_count: int
    addresses: tuple[str, ...]  # CIDR, without loopback
    disk_size: int  # bytes free to non-root users where the engine keeps its data
    cpus: int
    memory: int  # bytes


def host_info(inventory: GpuInventory, docker_root: Path, log: EventLog) -> HostInfo:
    """Look at the host; what cannot be read is 0 or empty, and logged."""
    first = inventory.gpus[0] if inventory.gpus else None
    return HostInfo(
        gpu_vendor=inventory.vendor.value,
        gpu_name=first.name if first else "",
        gpu_memory=first.memory_mib if first else 0,
        gpu_count=len(inventory.gpus),
        addresses=_or(machine.addresses, (), "addresses", log),
        disk_size=_or(lambda: machine.available_disk(docker_root), 0, "disk_size", log),
        cpus=machine.cpu_count(),
        memory=machine.total_memory(),
    )


def write_host_info(home: Path, info: HostInfo) -> bool:
    """Write the file unless something has that name already; tell whether it was written.

    The server reads it in a loop while we write, and an empty file is a final error for it:
    it appears whole or not at all.

    Raises:
        OSError: the home cannot be written to.
    """
    path = home / FILE_NAME
    if os.path.lexists(path):
        return False
    new = home / f".{FILE_NAME}.new"
    new.unlink(missing_ok=True)  # of a crash; and O_EXCL below follows no link planted there
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(info), file)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return True


def _or(read: Callable[[], Value], otherwise: Value, field: str, log: EventLog) -> Value:
    try:
        return read()
    except OSError as error:
        log.warning("host_info.incomplete", field=field, error=error)
        return otherwise
