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
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

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
from dstack_shim_contracts.upgrade import Handover

from dstack_shim import build, takeover
from dstack_shim.api.access import AccessCheck
from dstack_shim.api.app import make_app
from dstack_shim.api.server import HOST, Server, listen
from dstack_shim.boots import note_boot
from dstack_shim.cancelling import to_its_end
from dstack_shim.clock import Clock, SystemClock
from dstack_shim.components import InstalledComponents, Target
from dstack_shim.departure import Departure
from dstack_shim.engine.docker import DockerEngine
from dstack_shim.engine.protocol import Engine, EngineInfo
from dstack_shim.engine.workers import Workers
from dstack_shim.errors import EngineError, ShutdownUnsafe, StartupError, UpgradeRefused
from dstack_shim.home import check_home, lock_home
from dstack_shim.host.callers import Callers
from dstack_shim.host.commands import run as run_command
from dstack_shim.host.dcgm import GpuTelemetry, open_telemetry
from dstack_shim.host.gpus import GpuInventory, GpuVendor
from dstack_shim.host.info import host_info, write_host_info
from dstack_shim.instance import Instance, look_around, this_boot
from dstack_shim.log import EventLog, open_log, parse_level
from dstack_shim.metrics import EventCounts, Meter
from dstack_shim.obstacles import obstacles
from dstack_shim.recipe import Recipe
from dstack_shim.resources.gpus import GpuLocks
from dstack_shim.resources.host_keys import HostKeys
from dstack_shim.resources.instance_mounts import InstanceMounts
from dstack_shim.resources.volumes import Volumes
from dstack_shim.settings import Settings
from dstack_shim.shim_files import ShimFiles, shim_target
from dstack_shim.store import Store
from dstack_shim.takeover import Possessions, Watchdog
from dstack_shim.tasks.core import Core
from dstack_shim.upgrade import Upgrades, rfc3339
from dstack_shim.upgrade_state import UpgradeFile
from dstack_shim.wiring import Parts, make_core

ENGINE_PATIENCE = 4.0
"""Seconds the engine gets to answer at the start; the supervisor starts us again."""
STEP_INTERVAL, QUIET_INTERVAL = 1.0, 10.0
"""Seconds between background steps: while there is something to look for, and while the engine's
events would tell."""
DRAIN = 5.0
"""Seconds given at a stop to what is under way."""
FORCED_DRAIN = 0.5
"""Seconds given when the stop was forced: enough to answer the request that asked for it."""
LAST_DRAIN = 1.0
"""Seconds given to requests under way when a successor waits: its clients wait as long."""
_DISK_WORKERS = 4
_ONE_WORKER = "DSTACK_SHIM_ONE_WORKER"

T = TypeVar("T")


async def run(settings: Settings) -> int:
    """Be the shim until told to stop; returns the exit code.

    Raises ``StartupError`` when this host has no place for it.
    """
    home = check_home(settings.home())
    log = _open_log(settings, home)
    received = takeover.receive(os.environ, home, (HOST, settings.shim_http_port), log)
    given, possessions = received or (None, None)
    watchdog = Watchdog(given, log) if given is not None and not given.rolled_back else None
    try:
        if possessions is None:
            possessions = Possessions(lock=lock_home(home), socket=listen(settings.shim_http_port))
        log.info("daemon.starting", version=build.version(), pid=os.getpid(), home=home)
        await Daemon(settings, home, possessions, log, given, watchdog).run()
    except Exception as error:
        if watchdog is not None:
            watchdog.go_back(f"it did not start: {error}")
        if isinstance(error, StartupError):
            log.error("daemon.not_started", error=error)  # noqa: TRY400 - no fault of ours: no trace
        raise
    return 0


class Daemon:
    """One running shim. The API sees it as :class:`dstack_shim.api.app.Shim`."""

    tasks: Core
    _meter: Meter

    def __init__(
        self,
        settings: Settings,
        home: Path,
        possessions: Possessions,
        log: EventLog,
        given: Handover | None,
        watchdog: Watchdog | None,
    ) -> None:
        self._settings = settings
        self._home = home
        self._possessions = possessions
        self._log = log
        self._clock: Clock = SystemClock()
        runner = Target(RUNNER, Path(settings.runner_binary_path))
        path = given.path if given is not None else settings.shim_binary_path or build.own_path()
        shim = shim_target(Path(path), takes_over=given is not None)
        self._components = InstalledComponents((runner, shim), run_command, log)
        self._given = given
        self._watchdog = watchdog
        self._files = ShimFiles(shim, log)
        self._upgrades = Upgrades(
            self._files,
            self._components,
            UpgradeFile(home, log),
            run_command,
            self._clock.now,
            log,
        )
        self._departure = Departure(self._upgrades, log)
        self._generation = given.generation if given is not None else 0
        self._started = self._clock.now()
        self._inventory = GpuInventory()
        self._telemetry = GpuTelemetry()
        self._events = EventCounts.attached()

    async def run(self) -> None:
        """Start, serve until :meth:`shut_down` or a signal, stop."""
        self._handle_signals()
        await self._begin_upgrades()
        disk, engine = self._make_workers()
        boot = await disk.run(partial(note_boot, self._home, this_boot(), self._log))
        info = await self._greet(engine)
        await self._check_components()
        known = takeover.inventory_of(self._given) if self._given is not None else None
        instance = await look_around(run_command, boot, self._log, known)
        self._inventory = instance.inventory
        self.tasks = self._make_core(disk, engine, instance)
        self._telemetry = self._open_telemetry()
        if self._settings.service:
            self._tell_host_info(Path(info.root_dir))
        await self.tasks.restore()
        server = Server(self._guarded(), self._possessions.socket)
        server.start()
        step = asyncio.ensure_future(self.tasks.attend(STEP_INTERVAL, QUIET_INTERVAL))
        settling: asyncio.Future[None] | None = None
        self._log.info("daemon.serving", port=self._settings.shim_http_port)
        try:
            await self._enter_service()
            settling = asyncio.ensure_future(self._settle())
            await self._departure.wait()
        finally:
            if settling is not None:
                settling.cancel()
            await self._leave(server, step, engine)
        if self._departure.successor is not None:
            self._upgrades.execute(self._possessions, self._generation, self._inventory)

    async def _begin_upgrades(self) -> None:
        """Find out how the last replacement went, and watch the one under way."""
        if self._watchdog is not None:
            self._watchdog.start()
            # Until it has taken its place, the file that waits is this one.
            await self._components.reserve(SHIM)
        self._upgrades.begin(self._given, self._possessions)

    async def _enter_service(self) -> None:
        """Take the place of the file before this one, where this process took over."""
        if self._watchdog is not None and self._departure.is_under_way:
            self._watchdog.settle(self._upgrades.interrupt)
        elif self._watchdog is not None:
            try:
                await self._upgrades.prove((HOST, self._settings.shim_http_port), self._generation)
                await asyncio.to_thread(self._watchdog.settle, self._upgrades.take_place)
            except (UpgradeRefused, OSError) as error:
                self._watchdog.go_back(str(error))
            self._components.release(SHIM)
        signal.alarm(0)  # of a roll-back

    async def _settle(self) -> None:
        """What nobody waits for once this process serves."""
        await asyncio.to_thread(self._files.keep_running)
        await self._upgrades.end_probation()

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
        gpus, host_keys = GpuLocks(instance.gpu_ids), HostKeys(blocking, self._log)
        volumes = Volumes(run_command, blocking, self._log)
        core = make_core(
            Parts(
                home=self._home,
                boot=instance.boot,
                engine=engine,
                records=store,
                open_pull_log=store.open_pull_log,
                recipe=recipe,
                gpus=gpus,
                host_keys=host_keys,
                other_resources=(volumes, InstanceMounts(blocking)),
                blocking=blocking,
                clock=self._clock,
                log=self._log,
            )
        )
        set_aside = partial(blocking, store.set_aside_before)
        self._meter = Meter(core, gpus, volumes, host_keys, set_aside, self._events, self._log)
        return core

    def healthcheck(self) -> HealthcheckResponse:
        """Who answers, and what it promises."""
        return HealthcheckResponse(
            service=build.NAME,
            version=build.version(),
            features=tuple(FEATURES),
            implementation=Implementation(
                name=build.IMPLEMENTATION_NAME,
                version=build.IMPLEMENTATION_VERSION,
                generation=self._generation,
                started_at=rfc3339(self._started),
                uptime=max(0, int(self._clock.now() - self._started)),
                last_upgrade=self._upgrades.last,
            ),
        )

    async def instance_health(self) -> InstanceHealth:
        """What DCGM says of the GPUs."""
        return await self._telemetry.instance_health()

    async def task_metrics(self, task_id: str) -> str:
        """The Prometheus text of the task's GPUs.

        Raises ``TaskNotFound``, ``MetricsError``.
        """
        return await self._telemetry.task_metrics(self.tasks.info(task_id).gpus_ids)

    async def metrics(self) -> str:
        """Prometheus text about the shim itself."""
        return await self._meter.read(self.healthcheck(), self._started)

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
        if only_if_safe and not self._departure.is_under_way:
            await self._hold_if_safe()
        if force:
            self._departure.exit(force=True)
        else:
            self._departure.begin(self.tasks)

    async def _hold_if_safe(self) -> None:
        listed = (await self._components.list()).components
        target = next(component for component in listed if component.name == SHIM)
        verdict = decide(self.healthcheck(), target)
        unsafe = await self.tasks.hold_if(verdict.statuses)
        found = obstacles(unsafe, verdict, target, self._components.installing)
        if found:
            self.tasks.admit()
            raise ShutdownUnsafe(ShutdownRefusal(found))

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
            loop.add_signal_handler(number, lambda: self._departure.exit(force=False))

    async def _leave(self, server: Server, step: asyncio.Future[None], engine: Engine) -> None:
        if self._departure.successor is not None:
            await self._let_go(server, step)
        else:
            await self._go(server, step)
            self._upgrades.confirm()
        await engine.close()
        self._log.info("daemon.stopped")

    async def _go(self, server: Server, step: asyncio.Future[None]) -> None:
        """Accept nobody, and finish what is under way."""
        limit = FORCED_DRAIN if self._departure.forced else DRAIN
        server.stop_accepting()
        await _stopped(step)
        await asyncio.gather(
            self.tasks.drain(limit),
            server.drain(limit),
            self._components.close(),
            self._telemetry.close(),
        )

    async def _let_go(self, server: Server, step: asyncio.Future[None]) -> None:
        """Finish all work first, answering meanwhile: clients wait only for the rest."""
        server.say_goodbye()
        await asyncio.gather(
            asyncio.wait({asyncio.ensure_future(_stopped(step))}, timeout=DRAIN),
            self.tasks.drain(DRAIN),
            self._components.close(),
            self._telemetry.close(),
        )
        server.stop_accepting()
        await server.drain(LAST_DRAIN)


def _open_log(settings: Settings, home: Path) -> EventLog:
    level = parse_level("--shim-log-level", settings.shim_log_level)
    try:
        return open_log(level, home / "shim.log")
    except OSError as error:
        raise StartupError(f"cannot open {home / 'shim.log'}: {error.strerror}") from error


async def _stopped(step: asyncio.Future[None]) -> None:
    step.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await step
