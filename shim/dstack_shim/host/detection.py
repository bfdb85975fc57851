"""Which GPUs a host has: never an error, at worst none."""

from __future__ import annotations

from pathlib import Path

from dstack_shim.errors import CommandError
from dstack_shim.host import amd, intel, nvidia, tenstorrent
from dstack_shim.host.commands import Runner
from dstack_shim.host.gpus import DetectionError, Gpu, GpuInventory, GpuVendor, vendor_of
from dstack_shim.log import EventLog


async def detect_gpus(run: Runner, log: EventLog, *, root: Path = Path("/")) -> GpuInventory:
    """Find the host's GPUs with its vendor's tool.

    A tool that is missing, fails or prints nonsense means no GPUs, and a log line: a host
    that runs CPU jobs is worth more than a shim that does not start. May take minutes on
    AMD and Tenstorrent hosts, whose tool comes as an image.
    """
    vendor = vendor_of(root)
    if vendor is GpuVendor.NONE:
        return GpuInventory()
    try:
        gpus, driver = await _ask(vendor, run, root)
    except (DetectionError, CommandError) as error:
        log.warning("gpus.not_detected", vendor=vendor.value, error=error)
        return GpuInventory()
    except Exception as error:  # noqa: BLE001 - a parser's fault must not keep the shim down
        log.fault("gpus.not_detected", error, vendor=vendor.value)
        return GpuInventory()
    if not gpus:
        log.warning("gpus.not_detected", vendor=vendor.value, error="the tool lists none")
        return GpuInventory()
    log.info("gpus.detected", vendor=vendor.value, count=len(gpus), driver=driver or "")
    return GpuInventory(vendor, gpus, driver)


async def _ask(vendor: GpuVendor, run: Runner, root: Path) -> tuple[tuple[Gpu, ...], str | None]:
    if vendor is GpuVendor.NVIDIA:
        return await nvidia.detect(run, root)
    if vendor is GpuVendor.AMD:
        return await amd.detect(run, root)
    if vendor is GpuVendor.TENSTORRENT:
        return await tenstorrent.detect(run, root)
    return await intel.detect(run)
