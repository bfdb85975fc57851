"""NVIDIA GPUs, as ``nvidia-smi`` lists them."""

from __future__ import annotations

import csv
from pathlib import Path

from dstack_shim.errors import CommandMissing
from dstack_shim.host.commands import Finished, Runner
from dstack_shim.host.gpus import (
    DetectionError,
    Gpu,
    known_version,
    whole_number,
    wsl_nvidia_smi,
)

# Without the persistence daemon the driver initialises every card first: 8 of them can take
# half a minute.
TIMEOUT = 120.0

_QUERY = (
    "--query-gpu=name,memory.total,uuid,driver_version",
    "--format=csv,noheader,nounits",
)


async def detect(run: Runner, root: Path) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs and the driver's version.

    Raises:
        DetectionError: the tool exited with an error (9: no driver is loaded).
        CommandError: there is no tool, or it hangs.
    """
    try:
        finished = await run(["nvidia-smi", *_QUERY], timeout=TIMEOUT)
    except CommandMissing:
        tool = wsl_nvidia_smi(root)
        if not tool.exists():
            raise
        finished = await run([str(tool), *_QUERY], timeout=TIMEOUT)
    return read(finished)


def read(finished: Finished) -> tuple[tuple[Gpu, ...], str | None]:
    """Read the rows up to the first bad one: what follows it cannot be trusted."""
    if not finished.ok:
        raise DetectionError(f"nvidia-smi {finished.failure}")
    gpus: list[Gpu] = []
    driver: str | None = None
    try:
        for row in csv.reader(finished.out.splitlines(), skipinitialspace=True, strict=True):
            if not row:
                continue
            fields = [field.strip() for field in row]
            if len(fields) != 4 or not fields[0] or not fields[2]:
                break
            name, memory, uuid, version = fields
            # Memory is "[N/A]" where the GPU shares the host's (GB10, Jetson).
            gpus.append(Gpu(id=uuid, name=name, memory_mib=whole_number(memory)))
            driver = driver or known_version(version)
    except csv.Error:
        pass  # as any bad row: those before it stand
    return tuple(gpus), driver
