"""The instance the daemon runs on: its GPUs and devices, its boot, its runner."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import attrs

from dstack_shim.engine.container import ContainerSettings
from dstack_shim.engine.runner_command import RunnerFlags
from dstack_shim.host import machine
from dstack_shim.host.boot import boot_time
from dstack_shim.host.commands import Runner
from dstack_shim.host.detection import detect_gpus
from dstack_shim.host.gpus import GpuInventory
from dstack_shim.log import EventLog
from dstack_shim.settings import Settings
from dstack_shim.tasks.outcomes import Boot


@attrs.frozen
class Instance:
    """What was found when the daemon started; none of it changes while it runs."""

    inventory: GpuInventory
    boot: Boot
    has_infiniband: bool
    has_hugepages: bool

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """The ids that lock its GPUs, in the order they are given out."""
        return tuple(gpu.id for gpu in self.inventory.gpus)

    def container_settings(
        self, settings: Settings, home: Path, environ: Mapping[str, str] = os.environ
    ) -> ContainerSettings:
        """What every container here has in common."""
        names = (name.strip() for name in settings.pass_env.split(","))
        return ContainerSettings(
            home=str(home),
            runner_path=settings.runner_binary_path,
            runner_flags=RunnerFlags(
                http_port=settings.runner_http_port,
                ssh_port=settings.runner_ssh_port,
                log_level=settings.runner_log_level,
                ssh_log_level=settings.runner_ssh_log_level,
            ),
            pass_env={name: environ[name] for name in names if name in environ},
            privileged=settings.privileged,
            pjrt_device=settings.pjrt_device,
            gpu_vendor=self.inventory.vendor.value,
            has_infiniband=self.has_infiniband,
            has_hugepages=self.has_hugepages,
            boot_id=self.boot.id,
        )


def this_boot() -> Boot:
    """Which boot this is, as the kernel tells."""
    return Boot(machine.boot_id(), boot_time())


async def look_around(
    run: Runner, boot: Boot, log: EventLog, inventory: GpuInventory | None = None
) -> Instance:
    """Find out what this host is. Tools that fail mean "no GPUs", never an error.

    With an ``inventory`` its GPUs are known and no tool is asked.
    """
    return Instance(
        inventory=await detect_gpus(run, log) if inventory is None else inventory,
        boot=boot,
        has_infiniband=machine.has_infiniband(),
        has_hugepages=machine.has_huge_pages(),
    )
