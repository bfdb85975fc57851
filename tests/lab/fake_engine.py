"""An engine in memory: seeded, on the event loop's clock, with a fault at every call if wanted.

It passes the same suite as the real one (``tests/engine/test_engine_suite.py``), so what a
simulation concludes with it holds for engines. What it knows of a container is its image's
:class:`Program`; what it cannot do (namespaces, file systems, devices) it takes as done.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import attrs
from dstack_shim_contracts.api import ImagePullProgress, PortMapping

from dstack_shim.clock import Clock, SystemClock
from dstack_shim.engine.protocol import (
    LABEL_HOME,
    LABEL_IS_TASK,
    LABEL_TASK_ID,
    Container,
    ContainerDetails,
    ContainerEvent,
    ContainerSpec,
    ContainerState,
    Credentials,
    EngineInfo,
    Sink,
)
from dstack_shim.engine.pull import PullStream
from dstack_shim.engine.reference import parse_reference
from dstack_shim.errors import (
    ContainerNotFound,
    EngineError,
    EngineUnreachable,
    ImageNotFound,
    NameConflict,
    PullCancelled,
    PullFailed,
    StartFailed,
)
from tests.lab.fake_events import TellsEvents

_FIRST_EPHEMERAL_PORT = 32768
_KILLED = 137
_POWER_CUT = 255


@attrs.frozen
class Program:
    """What the containers of an image do once started.

    Runs for ``after`` seconds, None: until stopped. ``on_term`` is its exit code when told to
    terminate, None: it does not listen. With a ``start_error`` it never starts and the engine
    says that.
    """

    lines: tuple[str, ...] = ()
    after: float | None = 0.0
    code: int = 0
    on_term: int | None = None
    start_error: str = ""


@attrs.frozen
class RemoteImage:
    """An image in a registry: layers in bytes, one a ``pace`` seconds."""

    program: Program = Program()
    layers: tuple[int, ...] = (1000,)
    pace: float = 0.0
    login: Credentials | None = None
    error_midway: str = ""


@attrs.frozen
class Call:
    """One call of the engine: the method's name and the container or image it is about."""

    name: str
    subject: str = ""


class Faults(Protocol):
    """What goes wrong. Raising before a call: it never arrives; after: only its answer is lost."""

    async def before(self, call: Call) -> None: ...

    async def after(self, call: Call) -> None: ...


class NoFaults:
    """Nothing goes wrong."""

    async def before(self, call: Call) -> None: ...

    async def after(self, call: Call) -> None: ...


@attrs.define(eq=False)
class FakeContainer:
    """One container, as the engine has it on its own disk."""

    id: str
    spec: ContainerSpec
    created: float
    state: ContainerState = ContainerState.CREATED
    exit_code: int = 0
    oom_killed: bool = False
    error: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    ports: tuple[PortMapping, ...] = ()
    output: list[str] = attrs.Factory(list)
    starts: int = 0
    ended: asyncio.Event = attrs.Factory(asyncio.Event)


class FakeEngine(TellsEvents):
    """Implements :class:`dstack_shim.engine.protocol.Engine`.

    The attributes are the engine's world, for a test to look at and to change: ``images`` that
    are here, the ``registry``, ``containers`` by id, ``taken_ports`` of the host, and whether it
    answers at all.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        clock: Clock | None = None,
        faults: Faults | None = None,
        has_path: Callable[[str], bool] = lambda path: True,
        latency: Callable[[random.Random], float] = lambda random: 0.0,
    ) -> None:
        self.images: dict[str, Program] = {}
        self.registry: dict[str, RemoteImage] = {}
        self.containers: dict[str, FakeContainer] = {}
        self.taken_ports: set[int] = set()
        self.runtimes = {"", "habana"}
        self.is_unreachable = False
        self.calls: list[Call] = []
        self.list_lags = 0.0
        """Seconds for which the list is behind what was told of a container's end."""
        self._behind: dict[str, tuple[float, Container]] = {}
        super().__init__()
        self._random = random.Random(seed)
        self._clock = clock or SystemClock()
        self._faults = faults or NoFaults()
        self._has_path = has_path
        self._latency = latency
        self._next_port = _FIRST_EPHEMERAL_PORT

    # What happens without the shim.

    def exit(self, container_id: str, code: int, *, oom_killed: bool = False) -> None:
        """Its process ends by itself."""
        container = self.containers[container_id]
        if not container.state.alive:
            return
        if lag := self.list_lags:
            self._behind[container_id] = self._clock.now() + lag, _describe(container)
        container.state = ContainerState.EXITED
        container.exit_code = code
        container.oom_killed = oom_killed
        container.finished_at = self._clock.now()
        container.ports = ()
        container.ended.set()
        self._happened("die", container)

    def pause(self, container_id: str) -> None:
        """Somebody pauses it by hand."""
        self.containers[container_id].state = ContainerState.PAUSED

    def delete(self, container_id: str) -> None:
        """Somebody removes it by hand."""
        self.exit(container_id, _KILLED)
        self._happened("destroy", self.containers.pop(container_id))

    def power_off(self) -> None:
        """The host loses power and comes back: whatever ran ended with code 255."""
        for container in self.containers.values():
            self.exit(container.id, _POWER_CUT)

    # What the shim asks.

    async def ping(self) -> EngineInfo:
        async with self._call("ping"):
            return EngineInfo("0.0", "1.41", "/var/lib/docker")

    async def list_task_containers(self) -> tuple[Container, ...]:
        async with self._call("list_task_containers"):
            return tuple(
                self._listed(container)
                for container in self.containers.values()
                if container.spec.labels.get(LABEL_IS_TASK) == "true"
            )

    async def events(
        self,
        since: float,
        on_begin: Callable[[], None],
        on_event: Callable[[ContainerEvent], None],
    ) -> None:
        async with self._call("events"):
            await self._follow(since, on_begin, on_event)

    async def inspect(self, ref: str) -> ContainerDetails:
        async with self._call("inspect", ref):
            container = self._find(ref)
            requests = container.spec.device_requests
            return ContainerDetails(
                container=_describe(container),
                exit_code=container.exit_code,
                oom_killed=container.oom_killed,
                error=container.error,
                started_at=container.started_at,
                finished_at=container.finished_at,
                gpu_device_ids=requests[0].device_ids if len(requests) == 1 else (),
                devices=tuple(device.path_on_host for device in container.spec.devices),
                env=container.spec.env,
            )

    async def create(self, spec: ContainerSpec) -> str:
        async with self._call("create", spec.name):
            for other in self.containers.values():
                if other.spec.name == spec.name:
                    raise NameConflict(
                        f'Conflict. The container name "/{spec.name}" is already in use by '
                        f'container "{other.id}". You have to remove (or rename) that container '
                        "to be able to reuse that name.",
                        other.id,
                    )
            if _full(spec.image) not in self.images:
                raise ImageNotFound(f"No such image: {spec.image}")
            if spec.runtime not in self.runtimes:
                raise EngineError(f"Unknown runtime specified {spec.runtime}")
            for mount in spec.mounts:
                if mount.type == "bind" and not self._has_path(mount.source):
                    raise EngineError(
                        'invalid mount config for type "bind": bind source path does not exist: '
                        f"{mount.source}"
                    )
            container_id = f"{self._random.getrandbits(256):064x}"
            now = self._clock.now()
            self.containers[container_id] = FakeContainer(container_id, spec, now)
            return container_id

    async def start(self, container_id: str) -> None:
        async with self._call("start", container_id):
            container = self._find(container_id)
            if container.state is ContainerState.RUNNING:
                return
            program = self.images[_full(container.spec.image)]
            try:
                self._check_startable(container.spec, program)
                ports = self._bind_ports(container.spec)
            except _CannotStart as problem:
                container.exit_code, container.error = problem.code, str(problem)
                raise StartFailed(str(problem)) from None
            container.ports = ports
            self._run(container, program)

    async def stop(self, container_id: str, timeout: int) -> None:
        async with self._call("stop", container_id):
            with suppress(ContainerNotFound):
                container = self._find(container_id)
                if not container.state.alive:
                    return
                on_term = self.images[_full(container.spec.image)].on_term
                if on_term is not None and timeout > 0:
                    self.exit(container.id, on_term)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(container.ended.wait(), max(timeout, 0))
                if container.id in self.containers:  # nobody has removed it meanwhile
                    self.exit(container.id, _KILLED)

    async def remove(self, container_id: str) -> None:
        async with self._call("remove", container_id):
            with suppress(ContainerNotFound):
                self.delete(self._find(container_id).id)

    async def last_lines(self, container_id: str, n: int) -> str:
        async with self._call("last_lines", container_id):
            return "\n".join(self._find(container_id).output[-n:])

    async def has_image(self, ref: str) -> bool:
        parse_reference(ref)
        async with self._call("has_image", ref):
            return _full(ref) in self.images

    async def pull(
        self,
        ref: str,
        credentials: Credentials | None,
        log: Sink | None,
        on_progress: Callable[[ImagePullProgress], None],
        cancel: asyncio.Event,
    ) -> None:
        reference = parse_reference(ref)
        async with self._call("pull", ref):
            image = self.registry.get(_full(ref))
            if image is None:
                raise PullFailed(f"manifest for {ref} not found: manifest unknown")
            if image.login is not None and credentials is None:
                raise PullFailed(f"Head {reference.name}: no basic auth credentials")
            if image.login not in (None, credentials):
                raise PullFailed(f"Head {reference.name}: unauthorized: authentication required")
            stream = PullStream(log)
            for message in _pull_messages(ref, image):
                if message["status"] == "Downloading":
                    await self._wait_unless(cancel, image.pace)
                self._must_answer()
                if cancel.is_set():
                    raise PullCancelled(f"the pull of {ref} was cancelled")
                stream.feed(json.dumps(message).encode() + b"\r\n")
                if stream.progress is not None:
                    on_progress(stream.progress)
            stream.finish()
            self.images[_full(ref)] = image.program

    async def close(self) -> None:
        """Nothing to give up."""

    # How it works.

    def _listed(self, container: FakeContainer) -> Container:
        until, behind = self._behind.get(container.id, (0.0, None))
        if behind is not None and self._clock.now() < until and not container.state.alive:
            return behind
        return _describe(container)

    def _happened(self, action: str, container: FakeContainer) -> None:
        if container.spec.labels.get(LABEL_IS_TASK) == "true":
            self.happened(ContainerEvent(container.id, action, self._clock.now()))

    @asynccontextmanager
    async def _call(self, name: str, subject: str = "") -> AsyncIterator[None]:
        call = Call(name, subject)
        self.calls.append(call)
        await asyncio.sleep(self._latency(self._random))
        await self._faults.before(call)
        self._must_answer()
        yield
        await asyncio.sleep(self._latency(self._random))
        await self._faults.after(call)
        self._must_answer()

    def _must_answer(self) -> None:
        if self.is_unreachable:
            raise EngineUnreachable("no answer from the engine: Connection refused")

    def _find(self, ref: str) -> FakeContainer:
        for container in self.containers.values():
            if ref in (container.id, container.spec.name):
                return container
        raise ContainerNotFound(f"No such container: {ref}")

    def _check_startable(self, spec: ContainerSpec, program: Program) -> None:
        if program.start_error:
            raise _CannotStart(128, program.start_error)
        first = spec.entrypoint[0] if spec.entrypoint else "/bin/sh"
        if first == "/etc/passwd":
            raise _CannotStart(126, f'exec: "{first}": permission denied')
        if first != "/bin/sh":
            raise _CannotStart(127, f'exec: "{first}": stat {first}: no such file or directory')

    def _bind_ports(self, spec: ContainerSpec) -> tuple[PortMapping, ...]:
        if spec.network_mode == "host":
            return ()
        taken = {*self.taken_ports}
        for other in self.containers.values():
            taken |= {mapping.host for mapping in other.ports}
        mappings = []
        for binding in sorted(spec.ports, key=lambda binding: binding.container):
            host = binding.host
            if host in taken:
                raise _CannotStart(
                    128, f"Bind for 127.0.0.1:{host} failed: port is already allocated"
                )
            while not host or host in taken:
                host = self._next_port
                self._next_port += 1
            taken.add(host)
            mappings.append(PortMapping(host=host, container=binding.container))
        return tuple(mappings)

    def _run(self, container: FakeContainer, program: Program) -> None:
        container.state = ContainerState.RUNNING
        container.starts += 1
        container.exit_code, container.error, container.oom_killed = 0, "", False
        container.started_at, container.finished_at = self._clock.now(), None
        container.ended.clear()
        container.output += program.lines
        self._happened("start", container)
        if program.after is not None:
            loop, start = asyncio.get_running_loop(), container.starts

            def end() -> None:
                if container.starts == start and container.id in self.containers:
                    self.exit(container.id, program.code)

            loop.call_later(program.after, end)

    @staticmethod
    async def _wait_unless(cancel: asyncio.Event, seconds: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(cancel.wait(), seconds)


class _CannotStart(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def _describe(container: FakeContainer) -> Container:
    labels: Mapping[str, str] = container.spec.labels
    return Container(
        id=container.id,
        name=container.spec.name,
        state=container.state,
        created=container.created,
        task_id=labels.get(LABEL_TASK_ID, ""),
        home=labels.get(LABEL_HOME),
        labels=labels,
        mounts=container.spec.mounts,
        network_mode=container.spec.network_mode,
        ports=container.ports,
    )


def _full(ref: str) -> str:
    """The reference with what the engine adds to it."""
    reference = parse_reference(ref)
    return f"{reference.name}{'@' if reference.digest else ':'}{reference.version}"


def _pull_messages(ref: str, image: RemoteImage) -> list[dict[str, object]]:
    """The stream of a pull, as engines with the classic image store write it."""
    reference = parse_reference(ref)
    messages: list[dict[str, object]] = [
        {"status": f"Pulling from {reference.name}", "id": reference.version}
    ]
    layers = {f"{index:012x}": size for index, size in enumerate(image.layers)}
    messages += [
        {"status": "Pulling fs layer", "progressDetail": {}, "id": layer} for layer in layers
    ]
    for layer, size in layers.items():
        for current in (size // 2, size):
            detail = {"current": current, "total": size}
            messages.append({"status": "Downloading", "progressDetail": detail, "id": layer})
        if image.error_midway:
            error = {"errorDetail": {"message": image.error_midway}, "error": image.error_midway}
            return [*messages, {"status": "", **error}]
        messages += [
            {"status": status, "progressDetail": {}, "id": layer}
            for status in ("Download complete", "Pull complete")
        ]
    return [*messages, {"status": f"Status: Downloaded newer image for {ref}"}]
