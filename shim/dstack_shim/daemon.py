"""The daemon: wiring, and the order at start and stop. The only place that knows everybody.

Start: home locked → port bound → engine answered → records and containers restored → first
background step → requests answered. Nothing is written, nor read in order to be changed,
before lock and port are ours (dstack's own shim holds no lock, but it holds the port).

Stop: accept nobody → answer what is under way, end pulls with a recorded reason → go. What is
cut short is found by the next start, as after a crash.

For crash tests only: with ``DSTACK_SHIM_ONE_WORKER=1`` in the environment all calls to disk and
engine (but pulls and stops with grace) come from one thread, so that their system calls are in
the same order in every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TypeVar

import attrs
from dstack_shim_contracts.api import (
    RUNNER,
    SHIM,
    ComponentInstallRequest,
    Components,
    HealthcheckResponse,
    Implementation,
    InstanceHealth,
    InstanceInfo,
    ShutdownRefusal,
)
from dstack_shim_contracts.features import FEATURES
from dstack_shim_contracts.gate import decide

from dstack_shim import build
from dstack_shim.api.access import AccessCheck
from dstack_shim.api.app import make_app
from dstack_shim.api.server import Server, listen
from dstack_shim.cancelling import to_its_end
from dstack_shim.clock import Clock, SystemClock
from dstack_shim.components import InstalledComponents, Target
from dstack_shim.engine.docker import DockerEngine
from dstack_shim.engine.protocol import Engine, EngineInfo
from dstack_shim.engine.workers import Workers
from dstack_shim.errors import EngineError, ShutdownUnsafe, StartupError
from dstack_shim.guard import obstacles
from dstack_shim.home import check_home, lock_home
from dstack_shim.host.callers import Callers
from dstack_shim.host.commands import run as run_command
from dstack_shim.host.dcgm import GpuTelemetry, open_telemetry
from dstack_shim.host.gpus import GpuInventory, GpuVendor
from dstack_shim.host.info import host_info, write_host_info
from dstack_shim.instance import Instance, look_around
from dstack_shim.log import EventLog, open_log, parse_level
from dstack_shim.recipe import Recipe
from dstack_shim.resources.gpus import GpuLocks
from dstack_shim.resources.host_keys import HostKeys
from dstack_shim.resources.instance_mounts import InstanceMounts
from dstack_shim.resources.volumes import Volumes
from dstack_shim.settings import Settings
from dstack_shim.store import Store
from dstack_shim.tasks.core import Core
from dstack_shim.wiring import make_core

ENGINE_PATIENCE = 4.0
"""Seconds the engine gets to answer at the start; the supervisor starts us again."""
STEP_INTERVAL, QUIET_INTERVAL = 1.0, 10.0
"""Seconds between background steps: while there is something to look for, and while the engine's
events would tell."""
DRAIN = 5.0
"""Seconds given at a stop to what is under way."""
FORCED_DRAIN = 0.5
"""Seconds given when the stop was forced: enough to answer the request that asked for it."""
_DISK_WORKERS = 4
_ONE_WORKER = "DSTACK_SHIM_ONE_WORKER"

T = TypeVar("T")


@attrs.frozen
class Possessions:
    """What this process holds and a successor takes over: descriptors that outlive ``execve``."""

    socket: socket.socket
    lock: int


async def run(settings: Settings) -> int:
    """Be the shim until told to stop; returns the exit code.

    Raises ``StartupError`` when this host has no place for it.
    """
    home = check_home(settings.home())
    log = _open_log(settings, home)
    try:
        possessions = Possessions(lock=lock_home(home), socket=listen(settings.shim_http_port))
        log.info("daemon.starting", version=build.version(), pid=os.getpid(), home=home)
        daemon = Daemon(settings, home, possessions, log)
        await daemon.run()
    except StartupError as error:
        log.error("daemon.not_started", error=error)  # noqa: TRY400 - no fault of ours: no trace
        raise
    return 0


class Daemon:
    """One running shim. The API sees it as :class:`dstack_shim.api.app.Shim`."""

    tasks: Core

    def __init__(
        self, settings: Settings, home: Path, possessions: Possessions, log: EventLog
    ) -> None:
        self._settings = settings
        self._home = home
        self._possessions = possessions
        self._log = log
        self._clock: Clock = SystemClock()
        runner = Target(RUNNER, Path(settings.runner_binary_path))
        shim = Target(SHIM, Path(settings.shim_binary_path or build.own_path()))
        self._components = InstalledComponents((runner, shim), run_command, log)
        self._stop = asyncio.Event()
        self._forced = False
        self._implementation = Implementation(
            name=build.IMPLEMENTATION_NAME,
            version=build.IMPLEMENTATION_VERSION,
            generation=0,
            started_at=_rfc3339(self._clock.now()),
        )
        self._inventory = GpuInventory()
        self._telemetry = GpuTelemetry()

    async def run(self) -> None:
        """Start, serve until :meth:`shut_down` or a signal, stop."""
        self._handle_signals()
        disk, engine = self._make_workers()
        info = await self._greet(engine)
        await self._check_components()
        instance = await look_around(run_command, self._log)
        self._inventory = instance.inventory
        self.tasks = self._make_core(disk, engine, instance)
        self._telemetry = self._open_telemetry()
        if self._settings.service:
            self._tell_host_info(Path(info.root_dir))
        await self.tasks.restore()
        server = Server(self._guarded(), self._possessions.socket)
        server.start()
        step = asyncio.ensure_future(self.tasks.attend(STEP_INTERVAL, QUIET_INTERVAL))
        self._log.info("daemon.serving", port=self._settings.shim_http_port)
        try:
            await self._stop.wait()
        finally:
            await self._go(server, step, engine)

    def _guarded(self) -> AccessCheck:
        answers_jobs = self._settings.answer_jobs
        return AccessCheck(make_app(self), None if answers_jobs else Callers())

    async def _check_components(self) -> None:
        await self._components.check_at_start()
        if self._settings.runner_download_url:
            await self._components.fetch_if_missing(RUNNER, self._settings.runner_download_url)

    def _make_workers(self) -> tuple[Workers, DockerEngine]:
        """Threads for the disk, and the engine with its own, or both with the same one."""
        if os.environ.get(_ONE_WORKER) == "1":
            only = Workers(1)
            return only, DockerEngine(workers=only, log=self._log)
        return Workers(_DISK_WORKERS), DockerEngine(log=self._log)

    def _make_core(self, disk: Workers, engine: Engine, instance: Instance) -> Core:
        store = Store(self._home, self._log)
        store.open()

        def blocking(call: Callable[..., T], /, *args: object) -> Awaitable[T]:
            return to_its_end(disk.run(partial(call, *args)))

        recipe = Recipe(
            instance.container_settings(self._settings, self._home),
            engine,
            self._components.runner_version,
            store.runner_dir,
        )
        return make_core(
            home=self._home,
            boot=instance.boot,
            engine=engine,
            records=store,
            open_pull_log=store.open_pull_log,
            recipe=recipe,
            gpus=GpuLocks(instance.gpu_ids),
            host_keys=HostKeys(blocking, self._log),
            other_resources=(
                Volumes(run_command, blocking, self._log),
                InstanceMounts(blocking),
            ),
            blocking=blocking,
            clock=self._clock,
            log=self._log,
        )

    def healthcheck(self) -> HealthcheckResponse:
        """Who answers, and what it promises."""
        return HealthcheckResponse(
            service=build.NAME,
            version=build.version(),
            features=tuple(FEATURES),
            implementation=self._implementation,
        )

    async def instance_health(self) -> InstanceHealth:
        """What DCGM says of the GPUs."""
        return await self._telemetry.instance_health()

    async def task_metrics(self, task_id: str) -> str:
        """The Prometheus text of the task's GPUs.

        Raises ``TaskNotFound``, ``MetricsError``.
        """
        return await self._telemetry.task_metrics(self.tasks.info(task_id).gpus_ids)

    def instance_info(self) -> InstanceInfo:
        """Which GPUs this instance has."""
        vendor = self._inventory.vendor
        return InstanceInfo(
            gpu_vendor=None if vendor is GpuVendor.NONE else vendor.value,
            gpu_driver_version=self._inventory.driver_version,
        )

    async def components(self) -> Components:
        """What is installed."""
        return await self._components.list()

    def install(self, request: ComponentInstallRequest) -> None:
        """Begin to install a component."""
        self._components.install(request)

    async def shut_down(self, *, force: bool, only_if_safe: bool = False) -> None:
        """Begin to go away; called again it only adds force.

        Raises ``ShutdownUnsafe``; nothing has changed then.
        """
        if only_if_safe:
            await self._hold_if_safe()
        self._begin_to_stop(force=force)

    async def _hold_if_safe(self) -> None:
        listed = (await self._components.list()).components
        target = next(component for component in listed if component.name == SHIM)
        verdict = decide(self.healthcheck(), target)
        unsafe = await self.tasks.hold_if(verdict.statuses)
        found = obstacles(unsafe, verdict, target, self._components.installing)
        if found:
            self.tasks.admit()
            raise ShutdownUnsafe(ShutdownRefusal(found))

    def _begin_to_stop(self, *, force: bool) -> None:
        self._log.info("daemon.stopping", force=force)
        self._forced = self._forced or force
        self._stop.set()

    async def _greet(self, engine: Engine) -> EngineInfo:
        try:
            info = await asyncio.wait_for(engine.ping(), ENGINE_PATIENCE)
        except asyncio.TimeoutError as error:
            raise StartupError(
                f"the Docker Engine did not answer within {ENGINE_PATIENCE:g} s"
            ) from error
        except EngineError as error:
            raise StartupError(f"no Docker Engine: {error}") from error
        self._log.info("engine.found", version=info.version, api=info.api_version)
        return info

    def _open_telemetry(self) -> GpuTelemetry:
        return open_telemetry(
            self._inventory.vendor,
            home=self._home,
            exporter_port=self._settings.dcgm_exporter_http_port,
            exporter_interval_ms=self._settings.dcgm_exporter_interval,
            dcgm_address=self._settings.dcgm_address,
            log=self._log,
        )

    def _tell_host_info(self, docker_root: Path) -> None:
        """Write what an SSH fleet's server waits for; a full disk must not stop the shim."""
        try:
            if write_host_info(self._home, host_info(self._inventory, docker_root, self._log)):
                self._log.info("host_info.written")
        except OSError as error:
            self._log.error("host_info.not_written", error=error)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: self._begin_to_stop(force=False))

    async def _go(self, server: Server, step: asyncio.Future[None], engine: Engine) -> None:
        limit = FORCED_DRAIN if self._forced else DRAIN
        server.stop_accepting()
        step.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await step
        await asyncio.gather(
            self.tasks.drain(limit),
            server.drain(limit),
            self._components.close(),
            self._telemetry.close(),
        )
        await engine.close()
        self._log.info("daemon.stopped")


def _open_log(settings: Settings, home: Path) -> EventLog:
    level = parse_level("--shim-log-level", settings.shim_log_level)
    try:
        return open_log(level, home / "shim.log")
    except OSError as error:
        raise StartupError(f"cannot open {home / 'shim.log'}: {error.strerror}") from error


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
