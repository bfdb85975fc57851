"""Intel Gaudi accelerators, as ``hl-smi`` lists them."""

from __future__ import annotations

import csv

from dstack_shim.host.commands import Finished, Runner
from dstack_shim.host.gpus import DetectionError, Gpu, whole_number

TIMEOUT = 60.0

_COMMAND = ("hl-smi", "--query-aip=name,memory.total,index", "--format=csv,noheader,nounits")


async def detect(run: Runner) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the accelerators; their driver's version is not asked for.

    Raises:
        DetectionError: the tool exited with an error.
        CommandError: there is no tool, or it hangs.
    """
    return read(await run(_COMMAND, timeout=TIMEOUT)), None


def read(finished: Finished) -> tuple[Gpu, ...]:
    """Read the rows up to the first bad one: what follows it cannot be trusted."""
    if not finished.ok:
        raise DetectionError(f"hl-smi {finished.failure}")
    gpus: list[Gpu] = []
    try:
        for row in csv.reader(finished.out.splitlines(), skipinitialspace=True, strict=True):
            if not row:
                continue
            fields = [field.strip() for field in row]
            # The index becomes part of HABANA_VISIBLE_DEVICES: a number or nothing.
            if len(fields) != 3 or not fields[0] or not _is_index(fields[2]):
                break
            name, memory, index = fields
            gpus.append(Gpu(id=str(int(index)), name=name, memory_mib=whole_number(memory)))
    except csv.Error:
        pass  # as any bad row: those before it stand
    return tuple(gpus)


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4
