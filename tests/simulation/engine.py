"""The engine of a simulated world: the tests' own fake, with outages, and its end of the wire.

The engine is a process of its own. What it was asked for goes on when the shim dies; what it was
doing stops when it is killed itself. Each call of a shim is a request of this kind: it takes time
both ways, and its answer may find nobody.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from dstack_shim_contracts.api import ImagePullProgress

from dstack_shim.engine.protocol import (
    Container,
    ContainerDetails,
    ContainerEvent,
    ContainerSpec,
    ContainerState,
    Credentials,
    EngineInfo,
    Sink,
)
from dstack_shim.errors import EngineError, EngineUnreachable
from tests.lab.fake_engine import Call, FakeContainer, FakeEngine, Program
from tests.simulation.loop import Dead, LoopClock, Owner, VirtualLoop, nobody, outside

T = TypeVar("T")

READ_TIMEOUT = 30.0
"""Seconds a shim waits for the engine's answer."""


class Watcher(Protocol):
    """Who is told what becomes of containers."""

    def container_created(self, container: FakeContainer, *, by_living: bool) -> None:
        """A create has taken effect; ``by_living``: of a shim that still lives."""

    def container_started(self, container: FakeContainer, *, by_living: bool) -> None:
        """It runs from now on; ``by_living``: a shim asked for it that still lives."""

    def container_exited(self, container: FakeContainer, by: str) -> None:
        """It does not run any more."""

    def start_failed(self, container: FakeContainer) -> None:
        """It cannot run."""

    def told_to_stop(self, container: FakeContainer, timeout: int) -> None:
        """A living shim asks for its end within ``timeout`` seconds."""


class SimEngine(FakeEngine):
    """The tests' fake engine in a simulated world."""

    def __init__(self, loop: VirtualLoop, random: random.Random, watcher: Watcher) -> None:
        self.outages = 0
        self.asked = 0
        """Calls so far."""
        self.hangs_until = 0.0
        self.exits_by = "itself"
        self.tells_events = True
        self.spoilt_events: deque[str] = deque()
        """What becomes of the next events: late, lost, twice."""
        self._loop = loop
        self._watcher = watcher
        self._dice = random
        self._requests: dict[asyncio.Task[None], Owner] = {}
        self.strike: Callable[[str], str] = lambda call: ""
        """Which fault strikes this call."""
        self.kill_shim: Callable[[], None] = lambda: None
        super().__init__(
            seed=random.getrandbits(32),
            clock=LoopClock(loop),
            faults=self,
        )
        self.containers = _Containers(self.created)
        self._struck: dict[object, str] = {}

    # An engine that is down.

    @property
    def is_down(self) -> bool:
        """Whether it answers nobody."""
        return self.is_unreachable or self.hangs_until > 0

    def go_down(self, *, hang_until: float | None = None) -> None:
        """Stop answering: refuse at once, or take requests and say nothing."""
        self.outages += 1
        self.is_unreachable = hang_until is None
        self.hangs_until = hang_until or 0.0
        if hang_until is None:  # killed: what it was doing ends here
            self.past.clear()
            for request in list(self._requests):
                request.cancel()

    def come_up(self, *, kill_containers: bool) -> None:
        """Answer again; without live-restore an engine that was killed ends its containers."""
        self.is_unreachable, self.hangs_until = False, 0.0
        if kill_containers:
            self.end_all(137, "outage")

    def end_all(self, code: int, by: str) -> None:
        """Everything that runs ends."""
        self.exits_by = by
        for container in list(self.containers.values()):
            self.exit(container.id, code)
        self.exits_by = "itself"

    def freeze(self, code: int, by: str) -> list[FakeContainer]:
        """Everything that runs stops with the power; returns what that was."""
        running = [container for container in self.containers.values() if container.state.alive]
        self.end_all(code, by)
        return running

    def heal(self) -> None:
        """What was to go wrong at the end of a request under way, or to an event, does not."""
        self._struck.clear()
        self.spoilt_events.clear()

    def abort_requests(self) -> None:
        """The host loses power."""
        for request in list(self._requests):
            request.cancel()

    def shim_died(self, owner: Owner) -> None:
        """A pull ends with the connection it streams to; a stop may; the rest is done."""
        for request, asked_by in list(self._requests.items()):
            if asked_by is owner and (
                request.get_name() in ("pull", "events")
                or (request.get_name() == "stop" and self._dice.random() < 0.5)
            ):
                request.cancel()

    # Requests.

    def _call(self, name: str, subject: str = "") -> _Passage:  # type: ignore[override]  # the same, several times as fast
        self.asked += 1
        return _Passage(self, Call(name, subject))

    def delay(self) -> float:
        """Seconds a message takes one way."""
        roll = self._dice.random()
        if roll < 0.6:
            return 0.0
        return self._dice.random() * (0.05 if roll < 0.97 else 3.0)

    def ask(self, owner: Owner, name: str, work: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Begin a request; the future is the shim's end of the connection."""
        answer: asyncio.Future[T] = self._loop.create_future()
        request = outside(self._loop, self._serve(work, answer))
        request.set_name(name)
        self._requests[request] = owner
        request.add_done_callback(partial(self._done, answer))
        if name == "events":  # who hangs up is told nothing more
            answer.add_done_callback(lambda _: request.cancel())
        return answer

    def _done(self, answer: asyncio.Future[Any], request: asyncio.Task[None]) -> None:
        del self._requests[request]
        self._struck.pop(request, None)
        if request.cancelled():
            _fail(answer, EngineUnreachable("no answer from the engine: Connection reset"))
        else:
            request.result()  # a fault of the fake's own must be seen

    async def _serve(self, work: Callable[[], Awaitable[T]], answer: asyncio.Future[T]) -> None:
        try:
            result = await work()
        except EngineError as error:
            _fail(answer, error)
        else:
            if not answer.done():
                answer.set_result(result)

    # Faults; see tests.lab.fake_engine.Faults.

    async def before(self, call: Call) -> None:
        if self.hangs_until:
            await self._hang()
        mode = self.strike(call.name)
        if not mode:
            return
        if mode == "refused":
            raise EngineError(f"the engine refuses to {call.name}: out of luck")
        if mode == "unreachable":
            raise EngineUnreachable("no answer from the engine: Connection refused")
        if mode == "hangs":
            await asyncio.sleep(READ_TIMEOUT)
            if self._dice.random() < 0.5:
                raise EngineUnreachable("no answer from the engine: Read timed out")
            mode = "answer lost"
        elif mode == "crash before":
            self.kill_shim()
            raise EngineUnreachable("nobody asks any more")
        elif mode == "crash during":
            self.kill_shim()
            await asyncio.sleep(self._dice.choice((0.0, 0.05, 2.0)))
        self._struck[asyncio.current_task()] = mode

    async def after(self, call: Call) -> None:
        mode = self._struck.pop(asyncio.current_task(), "") if self._struck else ""
        if mode == "refused after":
            raise EngineError(f"the engine failed to {call.name} to its end")
        if mode == "answer lost":
            raise EngineUnreachable("no answer from the engine: Connection reset by peer")
        if mode == "crash after":
            self.kill_shim()

    async def _hang(self) -> None:
        until = self.hangs_until - self._loop.time()
        await asyncio.sleep(min(READ_TIMEOUT, max(until, 0.0)))
        if self.hangs_until:
            raise EngineUnreachable("no answer from the engine: Read timed out")

    # What is told of containers.

    async def events(
        self,
        since: float,
        on_begin: Callable[[], None],
        on_event: Callable[[ContainerEvent], None],
    ) -> None:
        if not self.tells_events:
            await self._loop.create_future()
        await super().events(since, on_begin, on_event)

    def tell(self, event: ContainerEvent) -> None:
        fate = self.spoilt_events.popleft() if self.spoilt_events else ""
        if fate == "lost":
            return
        delay = max(self.delay(), self.hangs_until - self._loop.time())
        if fate == "late":
            delay += self._dice.choice((1.0, 5.0, 60.0))
        for _ in range(2 if fate == "twice" else 1):
            self._loop.call_later(delay, super().tell, event, context=nobody())

    # What becomes of containers.

    def _run(self, container: FakeContainer, program: Program) -> None:
        super()._run(container, program)
        self._watcher.container_started(container, by_living=self._is_asked_by_living())

    def created(self, container: FakeContainer) -> None:
        """A container has appeared."""
        self._watcher.container_created(container, by_living=self._is_asked_by_living())

    def _is_asked_by_living(self) -> bool:
        owner = self._requests.get(asyncio.current_task())  # type: ignore[arg-type]  # None is asked by nobody
        return owner is not None and not owner.dead

    async def start(self, container_id: str) -> None:
        try:
            await super().start(container_id)
        finally:
            container = self.containers.get(container_id)
            if container is not None and container.error:
                self._watcher.start_failed(container)

    async def stop(self, container_id: str, timeout: int) -> None:
        container = self.containers.get(container_id)
        if container is not None and self._is_asked_by_living():
            self._watcher.told_to_stop(container, timeout)
        await super().stop(container_id, timeout)

    def exit(self, container_id: str, code: int, *, oom_killed: bool = False) -> None:
        container = self.containers[container_id]
        alive = container.state.alive
        self.list_lags = self._dice.choice((0.0, 0.0, 0.05, 3.0))
        super().exit(container_id, code, oom_killed=oom_killed)
        if alive:
            self._watcher.container_exited(container, self.exits_by)

    def place(self, spec: ContainerSpec, *, run: bool = False) -> FakeContainer:
        """Somebody else makes a container, and runs it perhaps."""
        container = FakeContainer(f"{self._dice.getrandbits(256):064x}", spec, self._clock.now())
        self.containers[container.id] = container
        if run:
            container.ports = self._bind_ports(spec)
            self._run(container, self.images[f"{spec.image}:latest"])
        return container

    def resume(self, container_id: str) -> None:
        """Somebody unpauses it by hand."""
        self.containers[container_id].state = ContainerState.RUNNING


class _Passage:
    """One call's way to the engine and back; what it does stands in the ``async with``."""

    __slots__ = ("_call", "_engine")

    def __init__(self, engine: SimEngine, call: Call) -> None:
        self._engine = engine
        self._call = call

    async def __aenter__(self) -> None:
        await asyncio.sleep(self._engine.delay())
        await self._engine.before(self._call)
        self._engine._must_answer()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            delay = self._engine.delay()
            if delay:
                await asyncio.sleep(delay)
            await self._engine.after(self._call)
            self._engine._must_answer()


class _Containers(dict[str, FakeContainer]):
    """The engine's containers; it is told of each new one."""

    def __init__(self, created: Callable[[FakeContainer], None]) -> None:
        super().__init__()
        self._created = created

    def __setitem__(self, container_id: str, container: FakeContainer) -> None:
        super().__setitem__(container_id, container)
        self._created(container)


class EngineClient:
    """A process's end of the wire; implements :class:`dstack_shim.engine.protocol.Engine`."""

    def __init__(self, engine: SimEngine, owner: Owner) -> None:
        self._engine = engine
        self._owner = owner

    async def ping(self) -> EngineInfo:
        return await self._ask("ping", self._engine.ping)

    async def list_task_containers(self) -> tuple[Container, ...]:
        return await self._ask("list", self._engine.list_task_containers)

    async def events(
        self,
        since: float,
        on_begin: Callable[[], None],
        on_event: Callable[[ContainerEvent], None],
    ) -> None:
        await self._ask("events", self._engine.events, since, on_begin, on_event)

    async def inspect(self, ref: str) -> ContainerDetails:
        return await self._ask("inspect", self._engine.inspect, ref)

    async def create(self, spec: ContainerSpec) -> str:
        return await self._ask("create", self._engine.create, spec)

    async def start(self, container_id: str) -> None:
        await self._ask("start", self._engine.start, container_id)

    async def stop(self, container_id: str, timeout: int) -> None:
        await self._ask("stop", self._engine.stop, container_id, timeout)

    async def remove(self, container_id: str) -> None:
        await self._ask("remove", self._engine.remove, container_id)

    async def last_lines(self, container_id: str, n: int) -> str:
        return await self._ask("last_lines", self._engine.last_lines, container_id, n)

    async def has_image(self, ref: str) -> bool:
        return await self._ask("has_image", self._engine.has_image, ref)

    async def pull(
        self,
        ref: str,
        credentials: Credentials | None,
        log: Sink | None,
        on_progress: Callable[[ImagePullProgress], None],
        cancel: asyncio.Event,
    ) -> None:
        await self._ask("pull", self._engine.pull, ref, credentials, log, on_progress, cancel)

    async def close(self) -> None:
        """Nothing to give up."""

    async def _ask(
        self, name: str, method: Callable[..., Coroutine[Any, Any, T]], *args: object
    ) -> T:
        if self._owner.dead:
            raise Dead
        return await self._engine.ask(self._owner, name, partial(method, *args))


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # looked at: nobody may be left to look
