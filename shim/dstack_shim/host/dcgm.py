"""What NVIDIA's DCGM tells of this host, as far as it is there: health, and tasks' metrics."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from attrs import frozen
from dstack_shim_contracts.api import InstanceHealth

from dstack_shim.errors import NoExporter
from dstack_shim.host.dcgm_exporter import DcgmExporter
from dstack_shim.host.dcgm_health import DcgmHealth
from dstack_shim.host.gpus import GpuVendor
from dstack_shim.log import EventLog


@frozen
class GpuTelemetry:
    """DCGM's two parts; on a host without NVIDIA GPUs both are None."""

    exporter: DcgmExporter | None = None
    health: DcgmHealth | None = None

    async def instance_health(self) -> InstanceHealth:
        """Return the health of the GPUs; ``dcgm`` is None while it is not known."""
        return InstanceHealth(await self.health.check() if self.health else None)

    async def task_metrics(self, gpu_ids: Collection[str]) -> str:
        """Return the Prometheus text of a task's GPUs.

        Raises:
            NoExporter: there is none on this host.
            ExporterFailed: it gave no answer.
        """
        if self.exporter is None:
            raise NoExporter("no dcgm-exporter on this host")
        return await self.exporter.task_metrics(gpu_ids)

    async def close(self) -> None:
        """End both processes."""
        if self.health is not None:
            await self.health.stop()
        if self.exporter is not None:
            await self.exporter.stop()


def open_telemetry(
    vendor: GpuVendor,
    *,
    home: Path,
    exporter_port: int,
    exporter_interval_ms: int,
    dcgm_address: str,
    log: EventLog,
) -> GpuTelemetry:
    """Start what this host has of DCGM; a missing part is no error.

    Must be called where an event loop runs.
    """
    if vendor is not GpuVendor.NVIDIA:
        return GpuTelemetry()
    health = DcgmHealth(log, address=dcgm_address)
    health.start()
    if not DcgmExporter.is_installed():
        return GpuTelemetry(health=health)
    exporter = DcgmExporter(
        port=exporter_port, interval_ms=exporter_interval_ms, home=home, log=log
    )
    try:
        exporter.start()
    except OSError as error:
        log.warning("dcgm_exporter.not_started", error=error)
        return GpuTelemetry(health=health)
    return GpuTelemetry(exporter, health)
