"""One host with a shim on it, in virtual time, where any call can be held or made to fail.

The core, the records and the GPU locks are the real ones, the disk is a real directory; the
engine is the tests' fake, keys and volumes are sets (see ``tests.simulation.host``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
from dstack_shim_contracts.api import TaskConfig, TaskInfo, VolumeInfo
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.record import TaskRecord, read_record
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.protocol import LABEL_TASK_ID
from dstack_shim.resources.gpus import GpuLocks
from dstack_shim.resources.host_keys import HostKeys
from dstack_shim.resources.protocol import Claim
from dstack_shim.store import Store
from dstack_shim.tasks.core import Core
from dstack_shim.tasks.outcomes import Boot
from dstack_shim.wiring import Parts, make_core
from tests.lab.fake_engine import Call, FakeContainer, FakeEngine, Program, RemoteImage
from tests.simulation.host import GPUS, Host, SimInstanceMounts, SimKeys, SimVolumes
from tests.simulation.log import SimLog
from tests.simulation.loop import START, Dead, LoopClock, Owner, VirtualLoop, nobody
from tests.simulation.shim import SimRecipe

T = TypeVar("T")

BOOT = Boot("this boot", START - 1000)
OFTEN, SELDOM, NEVER = 1.0, 10.0, 1e6
"""Seconds between rounds of the background step: as the daemon has it, and to be woken only."""
LONG = 100.0
"""Seconds in which everything short has long happened."""


class Hold:
    """A call that waits: ``reached`` when it is there, until ``let_go``."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    def let_go(self) -> None:
        """Let the call go on."""
        self.go.set()


@attrs.define
class _Interference:
    call: str
    is_after: bool
    error: Exception | None
    hold: Hold | None
    times: int


class Script:
    """What is to go wrong, and where; implements the fake engine's ``Faults``."""

    def __init__(self) -> None:
        self._interferences: list[_Interference] = []

    def fail(self, call: str, error: Exception, *, after: bool = False, times: int = 1) -> None:
        """Let the next ``times`` calls fail; ``after``: their effect takes place."""
        self._interferences.append(_Interference(call, after, error, None, times))

    def hold(self, call: str, *, after: bool = False) -> Hold:
        """Hold the next call, before its effect or after."""
        hold = Hold()
        self._interferences.append(_Interference(call, after, None, hold, 1))
        return hold

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self._interferences.clear()

    async def reach(self, call: str, *, is_after: bool) -> None:
        """A call comes by."""
        for item in list(self._interferences):
            if (item.call, item.is_after) != (call, is_after):
                continue
            item.times -= 1
            if item.times <= 0:
                self._interferences.remove(item)
            if item.hold is not None:
                item.hold.reached.set()
                await item.hold.go.wait()
            if item.error is not None:
                raise item.error

    async def before(self, call: Call | str) -> None:
        await self.reach(call if isinstance(call, str) else call.name, is_after=False)

    async def after(self, call: Call | str) -> None:
        await self.reach(call if isinstance(call, str) else call.name, is_after=True)

    async def half(self, call: str) -> None:
        """Nothing is wrong halfway here."""

    def may_take(self, claim: Claim) -> None:
        """Nobody watches here."""

    def may_give(self, claim: Claim) -> None:
        """Nobody watches here."""


class StageEngine(FakeEngine):
    """An engine that outlives the process which has started its containers."""

    def _run(self, container: FakeContainer, program: Program) -> None:
        nobody().run(super()._run, container, program)


class Stage:
    """The host. ``core`` is the shim's that runs now."""

    core: Core
    gpus: GpuLocks

    def __init__(self, home: Path) -> None:
        self.home = home
        self.loop = VirtualLoop()
        self.clock = LoopClock(self.loop)
        self.script = Script()
        self.host = Host()
        self.log: list[str] = []
        self.broken: list[str] = []
        self.boot = BOOT
        self.all_gpus: tuple[str, ...] = GPUS
        self.engine = StageEngine(clock=self.clock, faults=self.script)
        self.process = Owner()
        self.store = Store(home, SimLog(self.log.append, self.broken.append))

    # Time.

    def play(self, scene: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a scene to its end, in virtual time; no fault of the core goes unseen."""
        self.loop.run(self._started())
        result = self.loop.run(scene())
        self.kill()  # what is still going on has no end any more
        self.loop.forget()
        assert self.broken == []
        assert self.loop.broken == []
        return result

    async def _started(self) -> None:
        self.begin()
        await self.restored()

    # The shim.

    def begin(self) -> None:
        """A new process, nothing restored yet."""
        self.process = Owner()
        self.gpus = GpuLocks(self.all_gpus)
        self.store.open()
        log = SimLog(self.log.append, self.broken.append)
        self.core = self.process.context.run(
            lambda: make_core(
                Parts(
                    home=self.home,
                    boot=self.boot,
                    engine=self.engine,
                    records=self.store,
                    open_pull_log=self.store.open_pull_log,
                    recipe=SimRecipe(self.engine, str(self.home)),
                    gpus=self.gpus,
                    host_keys=cast("HostKeys", SimKeys(self.host, self.script)),
                    other_resources=(
                        SimVolumes(self.host, self.script),
                        SimInstanceMounts(self.host, self.script),
                    ),
                    blocking=self._blocking,
                    clock=self.clock,
                    log=log,
                )
            )
        )

    def kill(self) -> None:
        """The process is gone, wherever it stood."""
        self.process.die()
        self.process.bury()

    async def restored(self) -> None:
        """The process restores and has done its first round."""
        await self.ask(self.core.restore())

    async def restart(self) -> None:
        """Killed, and there again."""
        self.kill()
        self.begin()
        await self.restored()

    def ask(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A request: goes on whether or not somebody waits for it."""
        return self.process.context.run(self.core.spawn, work)

    async def round(self) -> None:
        """One round of the background step."""
        await self.ask(self.core.step.round())

    async def _blocking(self, call: Callable[..., T], /, *args: object) -> T:
        if self.process.dead:
            raise Dead
        name: str = getattr(call, "__name__", "")
        await self.script.reach(f"records.{name}", is_after=False)
        await asyncio.sleep(0)
        result = call(*args)
        await self.script.reach(f"records.{name}", is_after=True)
        return result

    # Requests.

    async def submit(self, config: TaskConfig) -> None:
        await self.ask(self.core.submit(config))

    async def run_task(self, config: TaskConfig) -> TaskInfo:
        """Submit it and let its start come to its end."""
        await self.submit(config)
        await self.started(config.id)
        return self.core.info(config.id)

    async def started(self, task_id: str) -> None:
        """Its start has come to its end, one way or another."""
        await self.core.book.get(task_id).start_done.wait()

    def begin_terminate(
        self, task_id: str, reason: str = "terminated_by_user", message: str = "", timeout: int = 0
    ) -> None:
        """A terminate nobody waits for."""
        self.ask(self.core.terminate(task_id, reason, message, timeout))

    async def terminate(
        self, task_id: str, reason: str = "terminated_by_user", message: str = "", timeout: int = 0
    ) -> TaskInfo:
        return await self.ask(self.core.terminate(task_id, reason, message, timeout))

    async def remove(self, task_id: str) -> None:
        await self.ask(self.core.remove(task_id))

    # What there is to see.

    def status(self, task_id: str) -> TaskStatus:
        return self.core.info(task_id).status

    def reason(self, task_id: str) -> str:
        return self.core.info(task_id).termination_reason

    def container(self, task_id: str) -> FakeContainer:
        """The one container of a task."""
        (container,) = self.containers(task_id)
        return container

    def containers(self, task_id: str) -> list[FakeContainer]:
        return [
            container
            for container in self.engine.containers.values()
            if container.spec.labels.get(LABEL_TASK_ID) == task_id
        ]

    def record(self, config: TaskConfig) -> TaskRecord:
        """What is on disk."""
        return read_record((self.dir(config) / "task.json").read_bytes())

    def dir(self, config: TaskConfig) -> Path:
        return self.home / "runners" / container_name(config.name, config.id)

    def holds(self, config: TaskConfig) -> set[str]:
        """What of all the task asked for is taken on the host."""
        held = set(self.gpus.held().get(config.id, ()))
        held |= {volume.name for volume in config.volumes} & set(self.host.mounted)
        lines = self.host.keys.get(config.host_ssh_user, ())
        return held | (set(config.host_ssh_keys) & set(lines))


def config(task_id: str = "t1", image: str = "runs-on", **more: Any) -> TaskConfig:
    """A task that takes something of every kind."""
    fields: dict[str, Any] = {
        "gpu": 1,
        "volumes": (VolumeInfo(name=f"volume-of-{task_id}"),),
        "host_ssh_user": "alice",
        "host_ssh_keys": (f"key-of-{task_id}",),
        **more,
    }
    return TaskConfig(id=task_id, name="job", image_name=image, **fields).with_defaults()


IMAGES = {
    "runs-on": Program(after=None, on_term=143),
    "deaf": Program(after=None),
    "ends": Program(after=10.0),
    "fails": Program(after=10.0, code=7, lines=tuple(f"line {n}" for n in range(9))),
    "fails-silently": Program(after=10.0, code=3),
    "cannot-start": Program(start_error="no such device"),
    "talks-and-cannot-start": Program(start_error="port is already allocated"),
}
REMOTE = {
    "remote": RemoteImage(Program(after=None), layers=(100,), pace=30.0),
    "broken": RemoteImage(Program(), error_midway="no space left on device"),
}


def stage(home: Path) -> Stage:
    """A host with images of every kind."""
    made = Stage(home)
    made.engine.images.update({f"{name}:latest": program for name, program in IMAGES.items()})
    made.engine.registry.update({f"{name}:latest": image for name, image in REMOTE.items()})
    return made


@asynccontextmanager
async def attended(
    host: Stage, interval: float = OFTEN, quiet: float = SELDOM
) -> AsyncIterator[None]:
    """With the step running and, unless that fails, the engine's events followed."""
    step = host.ask(host.core.attend(interval, quiet))
    await asyncio.sleep(0.5)
    try:
        yield
    finally:
        step.cancel()
        await asyncio.wait((step,))
    assert host.engine.followers == []


def lists(host: Stage) -> int:
    """How often the containers were listed."""
    return sum(call.name == "list_task_containers" for call in host.engine.calls)


async def soon(condition: Callable[[], object]) -> None:
    """Wait for it, in virtual time."""
    deadline = asyncio.get_running_loop().time() + LONG
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "not within a long time"
        await asyncio.sleep(0.01)


Scene = Callable[[], Awaitable[None]]
