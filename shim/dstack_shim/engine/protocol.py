"""What the core may ask of a container engine, in words that are not Docker's.

The models are facts about one moment; nothing here does I/O. Two things implement
:class:`Engine`: ``engine.docker`` against the Docker Engine, and the tests' seeded fake, which
passes the same suite.

Errors are those of :mod:`dstack_shim.errors`. One difference carries the whole recovery:
:class:`~dstack_shim.errors.EngineUnreachable` means *no answer* and says nothing about any
container; every other :class:`~dstack_shim.errors.EngineError` is an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Protocol

import attrs
from dstack_shim_contracts.api import ImagePullProgress, PortMapping

LABEL_PREFIX = "ai.dstack.shim."
LABEL_IS_TASK = LABEL_PREFIX + "is-task"
LABEL_TASK_ID = LABEL_PREFIX + "task-id"
LABEL_HOME = LABEL_PREFIX + "home"

_NOTHING: Mapping[str, str] = MappingProxyType({})


class ContainerState(str, Enum):
    """The engine's word for what a container is doing; ``UNKNOWN`` for a word we don't know."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    RESTARTING = "restarting"
    REMOVING = "removing"
    EXITED = "exited"
    DEAD = "dead"
    UNKNOWN = "unknown"

    @property
    def alive(self) -> bool:
        """Its process exists, or will again without anybody's doing."""
        return self in _ALIVE

    @property
    def finished(self) -> bool:
        """It ran and does not any more: its exit code is final."""
        return self in _FINISHED


_ALIVE = frozenset({ContainerState.RUNNING, ContainerState.PAUSED, ContainerState.RESTARTING})
_FINISHED = frozenset({ContainerState.EXITED, ContainerState.DEAD, ContainerState.REMOVING})


@attrs.frozen
class Mount:
    """One mount of a container: ``type`` is the engine's word (bind, volume, tmpfs …)."""

    source: str
    target: str
    type: str = "bind"


@attrs.frozen
class Container:
    """One task's container as the list tells it.

    ``created`` is unix seconds. ``home`` is the shim home that made it, None for containers of
    dstack's own shim, which carry no such label. ``ports`` has IPv4 tcp mappings only.
    """

    id: str
    name: str
    state: ContainerState
    created: float
    task_id: str
    home: str | None = None
    labels: Mapping[str, str] = _NOTHING
    mounts: tuple[Mount, ...] = ()
    network_mode: str = ""
    ports: tuple[PortMapping, ...] = ()


@attrs.frozen
class ContainerDetails:
    """What only an inspect tells. Times are unix seconds, None if it did not happen yet."""

    container: Container
    exit_code: int
    oom_killed: bool = False
    error: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    gpu_device_ids: tuple[str, ...] = ()
    """NVIDIA: the ids of the device request, if there is exactly one."""
    devices: tuple[str, ...] = ()
    """Paths on the host of the devices passed in."""
    env: Mapping[str, str] = attrs.field(default=_NOTHING, repr=False)
    """The whole environment, the image's too: it may hold the user's secrets, hence no repr."""


@attrs.frozen
class Device:
    """A device node to pass in."""

    path_on_host: str
    path_in_container: str
    permissions: str = "rwm"


@attrs.frozen
class DeviceRequest:
    """Devices asked for by id from the engine's own device driver (NVIDIA)."""

    device_ids: tuple[str, ...]
    capabilities: tuple[str, ...]


@attrs.frozen
class Ulimit:
    """A resource limit; -1 is unlimited."""

    name: str
    soft: int
    hard: int


@attrs.frozen
class PortBinding:
    """A tcp port of the container, bound on the host; host port 0 lets the engine choose."""

    container: int
    host: int = 0
    host_ip: str = "127.0.0.1"


@attrs.frozen
class ContainerSpec:
    """A container to be made, whole. Sizes are bytes; 0 or empty means the engine's default."""

    name: str
    image: str
    labels: Mapping[str, str] = _NOTHING
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(default=_NOTHING, repr=False)
    mounts: tuple[Mount, ...] = ()
    network_mode: str = "host"
    user: str = ""
    privileged: bool = False
    shm_size: int = 0
    nano_cpus: int = 0
    memory: int = 0
    ports: tuple[PortBinding, ...] = ()
    """Exposed and bound alike; an engine ignores the bindings on the host's network."""
    devices: tuple[Device, ...] = ()
    device_requests: tuple[DeviceRequest, ...] = ()
    cap_add: tuple[str, ...] = ()
    security_opt: tuple[str, ...] = ()
    ipc_mode: str = ""
    runtime: str = ""
    ulimits: tuple[Ulimit, ...] = ()
    tmpfs: Mapping[str, str] = _NOTHING
    """Mount point to mount options."""


@attrs.frozen
class Credentials:
    """A registry login; lives for one pull and appears nowhere else."""

    username: str = attrs.field(repr=False)
    password: str = attrs.field(repr=False)


@attrs.frozen
class ContainerEvent:
    """What has become of a task's container, as the engine tells it when it happens.

    ``action`` is the engine's word: ``start``, ``die`` (its process ended), ``destroy`` (it was
    removed). ``at`` is unix seconds on the engine's clock. Both the id and the time may be
    missing ("" and 0): that something happened is told all the same.
    """

    container_id: str
    action: str
    at: float

    @property
    def is_end(self) -> bool:
        """Whether it says that the container does not run any more."""
        return self.action in ("die", "destroy")


@attrs.frozen
class EngineInfo:
    """Who answered: ``root_dir`` is where images and containers take their disk space."""

    version: str
    api_version: str
    root_dir: str


class Sink(Protocol):
    """Where the raw pull stream goes: any binary file opened for writing."""

    def write(self, data: bytes, /) -> object:
        """Take the bytes; an exception never fails the pull, it only ends the copying."""


class Engine(Protocol):
    """A container engine. Every method may raise ``EngineUnreachable`` or ``EngineError``."""

    async def ping(self) -> EngineInfo:
        """Ask who is there."""

    async def list_task_containers(self) -> tuple[Container, ...]:
        """All containers labelled as tasks, whatever their state, in one request.

        A container the answer describes in a way nobody can read is left out and logged.
        """

    async def events(
        self,
        since: float,
        on_begin: Callable[[], None],
        on_event: Callable[[ContainerEvent], None],
    ) -> None:
        """Tell what becomes of task containers, from ``since`` (unix seconds) on, until it ends.

        ``on_begin`` is called when the engine has taken the request, then ``on_event`` for each
        event, both on the event loop; some may come twice. Returns when the engine ends the
        stream and raises when it breaks; whatever happens afterwards is told to nobody. To be
        cancelled by whoever does not want it any more: the connection is closed then.
        """

    async def inspect(self, ref: str) -> ContainerDetails:
        """Everything about the container of this id or name.

        Raises ``ContainerNotFound``.
        """

    async def create(self, spec: ContainerSpec) -> str:
        """Make the container and return its id; nothing runs yet.

        Raises ``NameConflict`` with the id of the container that has the name, and
        ``ImageNotFound``.
        """

    async def start(self, container_id: str) -> None:
        """Run it; fine if it runs already.

        Raises ``StartFailed`` if its command cannot run here (no such file, port taken, no such
        GPU), ``ContainerNotFound``.
        """

    async def stop(self, container_id: str, timeout: int) -> None:
        """Return once it does not run: TERM, then KILL after ``timeout`` seconds; 0 = KILL at once.

        Stopped already or gone is fine.
        """

    async def remove(self, container_id: str) -> None:
        """Remove it, running or not, with its anonymous volumes; gone is fine."""

    async def last_lines(self, container_id: str, n: int) -> str:
        """The last ``n`` lines of its output, both streams in order.

        Raises ``ContainerNotFound``.
        """

    async def has_image(self, ref: str) -> bool:
        """Whether the image is here already."""

    async def pull(
        self,
        ref: str,
        credentials: Credentials | None,
        log: Sink | None,
        on_progress: Callable[[ImagePullProgress], None],
        cancel: asyncio.Event,
    ) -> None:
        """Fetch the image; return when the engine says it has it.

        ``on_progress`` is called on the event loop, from the first layer on. Raises
        ``PullFailed`` with the engine's words, ``PullCancelled`` within a second of ``cancel``.
        """

    async def close(self) -> None:
        """Give up connections and threads; nothing is called afterwards."""
