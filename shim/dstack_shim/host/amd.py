"""AMD GPUs, as ``amd-smi`` in dstack's image lists them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from dstack_shim.host.commands import Finished, Runner
from dstack_shim.host.gpus import DetectionError, Gpu, known_version, whole_number

TIMEOUT = 120.0  # s, the pull of the image included

_COMMAND = (
    *("docker", "run", "--rm", "--device", "/dev/kfd", "--device", "/dev/dri"),
    *("dstackai/amd-smi:latest", "static", "--json", "--asic", "--vram", "--bus"),
)
_DRIVER = "--driver"  # not known to every amd-smi
_BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RENDER_NODE = re.compile(r"renderD[0-9]+")


async def detect(run: Runner, root: Path) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs and the driver's version.

    Raises:
        DetectionError: the tool exited with an error or printed no list of GPUs.
        CommandError: there is no docker command line, or it hangs.
    """
    finished = await run([*_COMMAND, _DRIVER], timeout=TIMEOUT)
    if not finished.ok:
        finished = await run(_COMMAND, timeout=TIMEOUT)
    return read(finished, root)


def read(finished: Finished, root: Path) -> tuple[tuple[Gpu, ...], str | None]:
    """Read the list of ROCm 6, or the object of ROCm 7; a GPU without render node is skipped."""
    if not finished.ok:
        raise DetectionError(f"amd-smi {finished.failure}")
    gpus: dict[str, Gpu] = {}
    driver: str | None = None
    for entry in _entries(finished.out):
        driver = driver or _driver_version(entry)
        node = _render_node(_text(entry, "bus", "bdf"), root)
        name = _text(entry, "asic", "market_name")
        if node is None or not name:
            continue
        # Two partitions of one card share its bus address: one node, one lock, one GPU.
        gpus.setdefault(node, Gpu(id=node, name=name, memory_mib=_memory(entry)))
    return tuple(gpus.values()), driver


def _entries(text: str) -> Iterator[Mapping[str, object]]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DetectionError(f"amd-smi printed no JSON: {error}") from error
    entries = document.get("gpu_data") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise DetectionError("amd-smi printed no list of GPUs")
    return (entry for entry in entries if isinstance(entry, dict))


def _section(entry: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = entry.get(name)
    return section if isinstance(section, dict) else {}


def _text(entry: Mapping[str, object], section: str, key: str) -> str:
    value = _section(entry, section).get(key)
    return value.strip() if isinstance(value, str) else ""


def _memory(entry: Mapping[str, object]) -> int:
    size = _section(entry, "vram").get("size")
    return whole_number(size.get("value") if isinstance(size, dict) else None)


def _driver_version(entry: Mapping[str, object]) -> str | None:
    driver = _section(entry, "driver")
    return known_version(driver.get("version")) or known_version(driver.get("driver_version"))


def _render_node(bdf: str, root: Path) -> str | None:
    """Return the node udev links to a PCI address: what a container is given."""
    address = bdf.lower()
    if not _BDF.fullmatch(address):
        return None
    try:
        name = (root / f"dev/dri/by-path/pci-{address}-render").readlink().name
    except OSError:
        return None
    return f"/dev/dri/{name}" if _RENDER_NODE.fullmatch(name) else None
