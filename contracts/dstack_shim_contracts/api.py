"""Bodies of the shim's HTTP API (version 2). Names of attributes are the JSON keys.

Sources are the public behaviour of dstack 0.18.34 to 0.22.5; what dstack's own shim lacks is
marked "ours". Models are immutable; lists are tuples. ``codec`` turns them into JSON and back.
"""

from enum import Enum
from typing import Final

import attrs
from dstack_shim_contracts.statuses import TaskStatus
from dstack_shim_contracts.wire import left_out_if_empty, left_out_if_none, wire

SHIM: Final = "dstack-shim"
"""Name of the shim: as a service, as a component, and in its ``--version``."""

RUNNER: Final = "dstack-runner"
"""Name of the runner as a component and in its ``--version``."""

DEFAULT_PORT: Final = 10998
"""Port of the API on the loopback interface of an instance."""

MAX_BODY_BYTES: Final = 1024 * 1024
"""A request body over this is answered 413."""

DCGM_RESULTS: Final = (0, 10, 20)
"""DCGM's verdicts: pass, warn, fail. Any other makes servers call the instance unreachable."""


@attrs.frozen
class LastUpgrade:
    """Ours: how a replacement in place went. ``outcome`` is a word for programs (``trying``
    while it goes on, ``done``, ``refused``, ``rolled-back``, ``died``, ``interrupted``; more may
    come), ``reason`` for people.
    """

    from_version: str
    to_version: str
    outcome: str
    reason: str
    at: str
    """RFC 3339."""


@attrs.frozen
class Implementation:
    """Ours: which program answers, apart from the dstack release it stands in for."""

    name: str
    version: str
    generation: int
    """Counts the replacements in place since the process was started; 0 for the first."""
    started_at: str
    """RFC 3339, when this generation began to serve."""
    uptime: int | None = attrs.field(
        default=None, metadata=wire(minimum=0, left_out=left_out_if_none)
    )
    """Whole seconds since then."""
    last_upgrade: LastUpgrade | None = attrs.field(
        default=None, metadata=wire(left_out=left_out_if_none)
    )
    """What became of the latest attempt to replace this shim in place, also by an earlier
    process; None if there was none."""


@attrs.frozen
class HealthcheckResponse:
    """Answer of ``GET /api/healthcheck``; service and version are compatible for ever.

    ``features`` (ours) is absent in dstack's own shim, here None.
    """

    service: str
    version: str
    features: tuple[str, ...] | None = attrs.field(
        default=None, metadata=wire(left_out=left_out_if_none)
    )
    implementation: Implementation | None = attrs.field(
        default=None, metadata=wire(left_out=left_out_if_none)
    )


@attrs.frozen
class ShutdownRequest:
    """Body of ``POST /api/shutdown``.

    ``only_if_safe`` is ours (feature ``guarded-shutdown``): nothing happens and the answer is 409
    with a :class:`ShutdownRefusal` unless every task survives.
    """

    force: bool = False
    only_if_safe: bool = attrs.field(default=False, metadata=wire(left_out=left_out_if_empty))


@attrs.frozen
class Obstacle:
    """What is in the way of a shutdown: a ``task`` that would not survive it, the ``target``
    that would start next and keeps no state, or an ``install`` under way.

    ``id`` and ``status`` are those of the task, or name and status of the component.
    """

    kind: str
    id: str
    status: str
    why: str


@attrs.frozen
class ShutdownRefusal:
    """Answer 409 of a shutdown ``only_if_safe``: everything that is in the way of it."""

    in_the_way: tuple[Obstacle, ...]


@attrs.frozen
class Incident:
    """One finding of DCGM's health watch."""

    system: int
    health: int = attrs.field(metadata=wire(choices=DCGM_RESULTS))
    error_message: str
    error_code: int
    entity_group_id: int
    entity_id: int


@attrs.frozen
class Dcgm:
    """What DCGM says about the GPUs of the host."""

    overall_health: int = attrs.field(metadata=wire(choices=DCGM_RESULTS))
    incidents: tuple[Incident, ...]


@attrs.frozen
class InstanceHealth:
    """Answer of ``GET /api/instance/health``; ``dcgm`` is null without DCGM."""

    dcgm: Dcgm | None


@attrs.frozen
class InstanceInfo:
    """Answer of ``GET /api/instance/info``; what is not known is left out."""

    gpu_vendor: str | None = attrs.field(default=None, metadata=wire(left_out=left_out_if_none))
    gpu_driver_version: str | None = attrs.field(
        default=None, metadata=wire(left_out=left_out_if_none)
    )


class ComponentStatus(str, Enum):
    """What is known of an installed component."""

    NOT_INSTALLED = "not-installed"
    INSTALLED = "installed"
    INSTALLING = "installing"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


def _tells_no_features(component: "Component", _features: object) -> bool:
    return component.name != SHIM or isinstance(component, FeaturelessComponent)


@attrs.frozen
class Component:
    """An installed program: the file on disk, not the process that runs.

    ``version`` is "" when unknown. ``features`` (ours) are those of the file and stand on the wire
    only for the shim, null when unknown.
    """

    name: str
    version: str
    status: ComponentStatus
    features: tuple[str, ...] | None = attrs.field(
        default=None, metadata=wire(left_out=_tells_no_features)
    )


@attrs.frozen
class FeaturelessComponent(Component):
    """A file of a kind that has no features to list, as dstack's own shim.

    On the wire it has no such key; whoever reads it goes by its version.
    """


@attrs.frozen
class Components:
    """Answer of ``GET /api/components``."""

    components: tuple[Component, ...]


@attrs.frozen
class ComponentInstallRequest:
    """Body of ``POST /api/components/install``. ``sha256`` is ours: hexadecimal, "" for none."""

    name: str = ""
    url: str = ""
    sha256: str = attrs.field(default="", metadata=wire(left_out=left_out_if_empty))


@attrs.frozen
class TaskListItem:
    """A task as ``GET /api/tasks`` shows it."""

    id: str
    status: TaskStatus


@attrs.frozen
class TaskList:
    """Answer of ``GET /api/tasks``, terminated tasks included."""

    tasks: tuple[TaskListItem, ...]


@attrs.frozen
class PortMapping:
    """A TCP port of the container and where the host offers it on 127.0.0.1."""

    host: int
    container: int


@attrs.frozen
class ImagePullProgress:
    """Bytes over all layers of an image; none of the sums ever falls."""

    downloaded_bytes: int
    extracted_bytes: int
    total_bytes: int
    is_total_bytes_final: bool
    """False while the size of a layer is still unknown."""


@attrs.frozen
class TaskInfo:
    """Answer of ``GET /api/tasks/{id}`` and of terminate.

    ``ports`` is None before the task runs, empty in host mode. ``gpus_ids`` is the real key,
    whatever public texts say.
    """

    id: str
    status: TaskStatus
    termination_reason: str = ""
    termination_message: str = ""
    ports: tuple[PortMapping, ...] | None = None
    image_pull_progress: ImagePullProgress | None = None
    container_name: str = ""
    container_id: str = ""
    gpus_ids: tuple[str, ...] = ()


@attrs.frozen
class TerminateRequest:
    """Body of ``POST /api/tasks/{id}/terminate``; ``timeout`` in seconds, 0 kills at once."""

    termination_reason: str = ""
    termination_message: str = ""
    timeout: int = attrs.field(default=0, metadata=wire(minimum=0))


@attrs.frozen
class VolumeInfo:
    """A network volume to mount on the host."""

    backend: str = ""
    """``aws`` or ``gcp``."""
    name: str = ""
    volume_id: str = ""
    init_fs: bool = False
    """Whether a blank disk gets a file system."""
    device_name: str | None = None


@attrs.frozen
class VolumeMount:
    """A volume of the task, by name, and its place in the container."""

    name: str = ""
    path: str = ""


@attrs.frozen
class InstanceMount:
    """A directory of the host and its place in the container."""

    instance_path: str = ""
    path: str = ""


@attrs.frozen
class GpuDevice:
    """A device node to pass instead of the vendor's own way."""

    path_on_host: str = ""
    path_in_container: str = ""


@attrs.frozen
class TaskConfig:
    """Body of ``POST /api/tasks``, and the configuration kept in a record.

    ``gpu`` is -1 for all idle ones, else a number. ``cpu`` counts cores, ``memory`` and
    ``shm_size`` bytes; 0 stands for no limit and for the engine's default.
    """

    id: str = ""
    name: str = ""
    registry_username: str = attrs.field(default="", repr=False)
    registry_password: str = attrs.field(default="", repr=False)
    image_name: str = ""
    container_user: str = ""
    privileged: bool = False
    gpu: int = 0
    cpu: float = 0.0
    memory: int = 0
    shm_size: int = 0
    network_mode: str = ""
    volumes: tuple[VolumeInfo, ...] = ()
    volume_mounts: tuple[VolumeMount, ...] = ()
    instance_mounts: tuple[InstanceMount, ...] = ()
    gpu_devices: tuple[GpuDevice, ...] = ()
    host_ssh_user: str = ""
    host_ssh_keys: tuple[str, ...] = ()
    container_ssh_keys: tuple[str, ...] = ()

    def with_defaults(self) -> "TaskConfig":
        """The same with user and network mode filled in."""
        return attrs.evolve(
            self,
            container_user=self.container_user or "root",
            network_mode=self.network_mode or "host",
        )

    def without_credentials(self) -> "TaskConfig":
        """The same without the registry's user name and password: for disk, labels and logs."""
        return attrs.evolve(self, registry_username="", registry_password="")
