"""One generation of the shim: the real core in a process that can die at any ``await``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Coroutine
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import attrs
from dstack_shim_contracts.api import TaskConfig

from dstack_shim.engine.container import LABEL_GPUS, LABEL_HOST_KEYS
from dstack_shim.engine.protocol import (
    LABEL_HOME,
    LABEL_IS_TASK,
    LABEL_TASK_ID,
    ContainerSpec,
    DeviceRequest,
    Engine,
    Mount,
    PortBinding,
)
from dstack_shim.errors import EngineError, ResourceError, StartFailed, StoreError
from dstack_shim.resources.gpus import GpuLocks
from dstack_shim.resources.host_keys import HostKeys
from dstack_shim.resources.protocol import Claim
from dstack_shim.resources.volume_names import ROOT
from dstack_shim.tasks.core import Core
from dstack_shim.tasks.outcomes import Boot
from dstack_shim.tasks.recovery import RUNNER_MOUNT
from dstack_shim.tasks.task import Task
from dstack_shim.wiring import Parts, make_core
from tests.simulation.disk import Disk, MemoryRecords
from tests.simulation.engine import EngineClient, SimEngine
from tests.simulation.faults import Faults
from tests.simulation.host import GPUS, Host, SimInstanceMounts, SimKeys, SimVolumes
from tests.simulation.log import SimLog
from tests.simulation.loop import Dead, LoopClock, Owner, VirtualLoop

T = TypeVar("T")

HOME = "/home/shim"
RUNNER_PORT = 10999
VOLUMES = f"{ROOT}/"
_HOME = Path(HOME)
SLOW = 20.0
"""Seconds that a slow call to the host takes."""


class Surroundings(Protocol):
    """What a shim of a simulated world lives in."""

    loop: VirtualLoop
    engine: SimEngine
    disk: Disk
    host: Host
    boot: Boot
    faults: Faults
    dice: random.Random

    def kill(self, shim: Shim) -> None:
        """Kill it here and now."""

    def cut_power(self) -> None:
        """The host loses power here and now."""

    def is_serving(self, shim: Shim) -> None:
        """Told when it answers requests."""

    def may_take(self, claim: Claim) -> None:
        """Told before something is taken for the claim."""

    def may_give(self, claim: Claim) -> None:
        """Told before something of the claim is given back."""

    def struck(self, shim: Shim, call: str, mode: str) -> None:
        """Told when a fault strikes a call of the shim."""


class Shim(Owner):
    """One process. Everything it reaches of the world, it reaches through this class."""

    def __init__(
        self, world: Surroundings, *, as_bytes: bool, interval: float, log: SimLog
    ) -> None:
        super().__init__()
        self.is_serving = False
        self.interval = interval
        self.gpus = GpuLocks(GPUS)
        self.step: asyncio.Future[None] | None = None
        self._world = world
        self._records = MemoryRecords(world.disk, as_bytes=as_bytes)
        self._struck: dict[str, str] = {}
        engine = EngineClient(world.engine, self)
        self.core: Core = self.context.run(
            lambda: make_core(
                Parts(
                    home=_HOME,
                    boot=world.boot,
                    engine=engine,
                    records=self._records,
                    open_pull_log=self.open_pull_log,
                    recipe=SimRecipe(engine),
                    gpus=self.gpus,
                    host_keys=cast("HostKeys", SimKeys(world.host, self)),
                    other_resources=(
                        SimVolumes(world.host, self),
                        SimInstanceMounts(world.host, self),
                    ),
                    blocking=self.blocking,
                    clock=LoopClock(world.loop),
                    log=log,
                )
            )
        )

    # Its life; the order is the daemon's.

    def begin(self) -> asyncio.Task[None]:
        """Start the process."""
        return self.in_context(self._live())

    async def _live(self) -> None:
        try:
            await self.core.restore()
        except (EngineError, StoreError):
            self._world.kill(self)  # it exits; the supervisor starts the next
            return
        self.is_serving = True
        self.step = asyncio.ensure_future(self.core.attend(self.interval, 5 * self.interval))
        self._world.is_serving(self)

    def request(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it answer one request; as behind the API, it runs to its end."""
        self.context.run(self.core.spawn, work)

    def stop(self, limit: float) -> asyncio.Task[None]:
        """Ask it to go, as a signal does."""
        self.is_serving = False
        return self.in_context(self._stop(limit))

    async def _stop(self, limit: float) -> None:
        await self.end_step()
        await self.core.drain(limit)
        self._world.kill(self)

    async def end_step(self) -> None:
        """Stop the background step and wait for its end."""
        if self.step is not None:
            self.step.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.step

    def round(self) -> asyncio.Task[None]:
        """One round of the background step."""
        return self.in_context(self.core.step.round())

    def in_context(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Let it do something; it ends with the process."""
        if self.dead:
            work.close()
            raise Dead
        return self.context.run(self._world.loop.create_task, work)

    # The way to the disk; see dstack_shim.resources.protocol.Blocking.

    async def blocking(self, call: Callable[..., T], /, *args: object) -> T:
        """A thread's work: done to its end even if nobody waits for it any more."""
        self._must_live()
        name: str = call.__name__
        mode = self._strike(f"records.{name}") if name != "close" else ""
        interrupted: asyncio.CancelledError | None = None
        try:
            await asyncio.sleep(self._pause())
        except asyncio.CancelledError as error:
            interrupted = error
        result = await self._done(name, mode, call, args)
        if interrupted is not None:
            raise interrupted
        return result

    async def _done(
        self, name: str, mode: str, call: Callable[..., T], args: tuple[object, ...]
    ) -> T:
        if mode == "refused":
            raise StoreError(f"cannot {name}: No space left on device")
        if mode == "crash before":
            await self._crash()
        change = self._records.changes(name, *args)
        if change is None:
            result = call(*args)
        else:
            change.visible()
            if mode == "flush fails":
                change.undo()
                raise StoreError(f"cannot {name} {change.dir}: Input/output error")
            await self._struck_here(mode, "half")
            change.certain()
            result = cast("T", self._name_set_aside(name, change.dir))
        await self._struck_here(mode, "after")
        return result

    async def _struck_here(self, mode: str, where: str) -> None:
        if mode == f"crash {where}":
            await self._crash()
        elif mode == f"power cut {where}":
            self._world.cut_power()
            await self._nothing()

    def _name_set_aside(self, name: str, dir: str) -> str | None:
        if name != "set_aside":
            return None
        return f".task.json.damaged-{self._world.disk.visible[dir].set_aside}"

    def open_pull_log(self, dir: str) -> BinaryIO:
        """Where the raw stream of a pull goes."""
        if dir not in self._world.disk.visible:
            raise StoreError(f"cannot open {dir}: No such file or directory")
        return BytesIO()

    # The way to the host; see tests.simulation.host.Gate.

    async def before(self, call: str) -> None:
        self._must_live()
        await asyncio.sleep(self._pause())
        mode = self._strike(call)
        if not mode:
            return
        if mode == "refused":
            raise ResourceError(f"{call} went wrong")
        if mode == "crash before":
            await self._crash()
        if mode == "slow":
            await asyncio.sleep(SLOW)
        self._struck[call] = mode

    async def half(self, call: str) -> None:
        if self._struck.get(call) == "refused after":
            del self._struck[call]
            raise ResourceError(f"{call} went wrong halfway")

    async def after(self, call: str) -> None:
        mode = self._struck.pop(call, "") if self._struck else ""
        if mode == "refused after":
            raise ResourceError(f"{call} went wrong at its end")
        if mode == "crash after":
            await self._crash()

    def may_take(self, claim: Claim) -> None:
        self._must_live()
        self._world.may_take(claim)

    def may_give(self, claim: Claim) -> None:
        self._must_live()
        self._world.may_give(claim)

    # Dying.

    def _strike(self, call: str) -> str:
        mode = self._world.faults.strike(call)
        if mode:
            self._world.struck(self, call, mode)
        return mode

    def _must_live(self) -> None:
        if self.dead:
            raise Dead

    async def _crash(self) -> None:
        self._world.kill(self)
        await self._nothing()

    async def _nothing(self) -> None:
        await self._world.loop.create_future()

    def _pause(self) -> float:
        roll = self._world.dice.random()
        return 0.0 if roll < 0.7 else roll * 0.01 if roll < 0.98 else 1.0


class SimRecipe:
    """How a task becomes a container here; see :class:`dstack_shim.tasks.start.Recipe`."""

    runner_port = RUNNER_PORT

    def __init__(self, engine: Engine, home: str = HOME) -> None:
        self._engine = engine
        self._home = home

    async def specify(self, task: Task) -> ContainerSpec:
        assert task.dir is not None
        config, gpus = task.record.config, task.record.gpus or ()
        return spec_of(config, task.container_name, task.dir, gpus, home=self._home)

    def retry(self, spec: ContainerSpec, error: StartFailed) -> ContainerSpec | None:
        """Once more without a device, as for hosts whose NVIDIA driver lacks a part."""
        if "no such device" in str(error) and spec.cap_add == ():
            return attrs.evolve(spec, cap_add=("RETRIED",))
        return None

    async def must_pull(self, image: str) -> bool:
        return not await self._engine.has_image(image)


def spec_of(
    config: TaskConfig,
    name: str,
    dir: str,
    gpus: tuple[str, ...],
    *,
    home: str = HOME,
    with_labels: bool = True,
) -> ContainerSpec:
    """A task's container; ``with_labels``: with those that dstack's own shim does not know."""
    labels = {LABEL_IS_TASK: "true", LABEL_TASK_ID: config.id}
    if with_labels:
        keys = {"user": config.host_ssh_user, "keys": config.host_ssh_keys}
        labels |= {
            LABEL_HOME: home,
            LABEL_GPUS: json.dumps(gpus),
            LABEL_HOST_KEYS: json.dumps(keys),
        }
    return ContainerSpec(
        name=name,
        image=config.image_name,
        labels=labels,
        entrypoint=("/bin/sh", "-c"),
        mounts=(
            Mount(f"{home}/runners/{dir}/runner", RUNNER_MOUNT),
            *(Mount(f"{VOLUMES}{mount.name}", mount.path) for mount in config.volume_mounts),
        ),
        network_mode=config.network_mode,
        ports=(PortBinding(RUNNER_PORT),),
        device_requests=(DeviceRequest(gpus, ("gpu",)),) if gpus else (),
    )
