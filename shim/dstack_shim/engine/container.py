"""What a task's container looks like: pure, from the task and this host's facts to a spec.

The labels say what a restore needs to know of a container of ours even if its record is lost, so
that one list of containers is enough: whose it is, which GPUs and host keys it was given, in which
boot, what was intended with it, and where its runner listens. dstack's own shim ignores them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.naming import container_name

from dstack_shim.engine.protocol import (
    LABEL_HOME,
    LABEL_IS_TASK,
    LABEL_PREFIX,
    LABEL_TASK_ID,
    ContainerDetails,
    ContainerSpec,
    Device,
    DeviceRequest,
    Mount,
    PortBinding,
    Ulimit,
)
from dstack_shim.engine.runner_command import (
    RUNNER_DIR_IN_CONTAINER,
    RUNNER_IN_CONTAINER,
    RunnerFlags,
    runner_command,
)
from dstack_shim.errors import ResourceError
from dstack_shim.resources.volume_names import ROOT as VOLUMES_ROOT

LABEL_GPUS: Final = LABEL_PREFIX + "gpus"
"""A JSON list of the ids locked for the task."""
LABEL_HOST_KEYS: Final = LABEL_PREFIX + "host-ssh-keys"
"""A JSON object, the ``user`` and its public ``keys``; only if there are any."""
LABEL_PORTS: Final = LABEL_PREFIX + "ports"
"""A JSON list: the container's ports of the runner and of the job's sshd."""
LABEL_INTENT: Final = LABEL_PREFIX + "intent"
LABEL_BOOT: Final = LABEL_PREFIX + "boot-id"
"""The kernel's boot id when it was made; only if there is one."""
START: Final = "start"
"""The intent: whoever made it was going to start it at once."""

INFINIBAND: Final = "/dev/infiniband"
HUGEPAGES: Final = "/dev/hugepages-1G"

_NVIDIA_CAPABILITIES: Final = (
    "gpu",
    "utility",
    "compute",
    "graphics",
    "video",
    "display",
    "compat32",
)
_RENDER_NODES: Final = "/dev/dri/renderD"
_TENSTORRENT_NODES: Final = "/dev/tenstorrent/"
_HABANA_DEVICES: Final = "HABANA_VISIBLE_DEVICES"
_UNLIMITED: Final = -1
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


@attrs.frozen
class ContainerSettings:
    """What every container of this shim has in common: its flags and the host's facts."""

    home: str
    runner_path: str
    """The runner's file on the host."""
    runner_flags: RunnerFlags = attrs.field(factory=RunnerFlags)
    pass_env: Mapping[str, str] = attrs.field(default=_NOTHING, repr=False)
    """Host variables that are handed on, those that are set. A proxy's may hold a password."""
    privileged: bool = False
    pjrt_device: str = ""
    gpu_vendor: str = "none"
    has_infiniband: bool = False
    has_hugepages: bool = False
    boot_id: str | None = None


def container_spec(
    config: TaskConfig,
    settings: ContainerSettings,
    *,
    runner_version: str,
    runner_dir: str,
    gpus: Sequence[str] = (),
) -> ContainerSpec:
    """The whole container of a task.

    ``runner_dir`` is the host directory that becomes ``/tmp/runner``. ``gpus`` are the ids
    locked for the task.

    Raises ``ComponentError`` if the runner cannot do its part, ``ResourceError`` for GPUs of a
    vendor nobody knows how to pass in.
    """
    config = config.with_defaults()
    command = runner_command(
        settings.runner_flags,
        version=runner_version,
        on_host_network=config.network_mode == "host",
        ssh_keys=config.container_ssh_keys,
    )
    flags = settings.runner_flags
    env = dict(settings.pass_env)
    if settings.pjrt_device:
        env["PJRT_DEVICE"] = settings.pjrt_device
    spec = ContainerSpec(
        name=container_name(config.name, config.id),
        image=config.image_name,
        labels=_labels(config, settings, gpus),
        entrypoint=("/bin/sh", "-c"),
        command=(command,),
        env=env,
        mounts=_mounts(config, settings, runner_dir),
        network_mode=config.network_mode,
        user=config.container_user,
        privileged=config.privileged or settings.privileged,
        shm_size=config.shm_size,
        # The engine's own default for /dev/shm is noexec; only a tmpfs of ours can be exec.
        tmpfs={"/dev/shm": f"exec,size={config.shm_size}"} if config.shm_size else {},  # noqa: S108 - in the container
        nano_cpus=round(config.cpu * 1e9),
        memory=config.memory,
        ports=(PortBinding(flags.http_port), PortBinding(flags.ssh_port)),
    )
    return _with_gpus(_with_infiniband(spec, settings), config, settings, tuple(gpus))


def without_display(spec: ContainerSpec) -> ContainerSpec:
    """The same for an NVIDIA host whose driver lacks the display part.

    Such a host fails the start with an error that names ``/dev/nvidia-modeset``.
    """
    requests = tuple(
        attrs.evolve(
            request,
            capabilities=tuple(word for word in request.capabilities if word != "display"),
        )
        for request in spec.device_requests
    )
    return attrs.evolve(spec, device_requests=requests)


def lacks_display(spec: ContainerSpec, error: str) -> bool:
    """Whether this start failed for want of the display part, and it was asked for."""
    asked = any("display" in request.capabilities for request in spec.device_requests)
    return asked and "/dev/nvidia-modeset" in error


def gpus_from_labels(labels: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs a container was given, as it says itself; None if it does not (dstack's own)."""
    return _texts(_json(labels, LABEL_GPUS))


def host_keys_from_labels(labels: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The user of the host and the public keys let in for it; empty if none are named."""
    value = _json(labels, LABEL_HOST_KEYS)
    if not isinstance(value, dict):
        return "", ()
    user, keys = value.get("user"), _texts(value.get("keys"))
    return (user, keys) if isinstance(user, str) and keys else ("", ())


def runner_port_from_labels(labels: Mapping[str, str]) -> int | None:
    """Where the runner listens inside, whatever flags its shim had; None if it is not said."""
    value = _json(labels, LABEL_PORTS)
    port = value[0] if isinstance(value, list) and value else None
    return port if type(port) is int else None


def gpus_from_details(details: ContainerDetails) -> tuple[str, ...]:
    """The GPUs a container was given, as the engine tells: for those without our labels."""
    if details.gpu_device_ids:
        return details.gpu_device_ids
    render = tuple(path for path in details.devices if path.startswith(_RENDER_NODES))
    if render:
        return render
    boards = tuple(
        index
        for path in details.devices
        if path.startswith(_TENSTORRENT_NODES)
        and (index := path[len(_TENSTORRENT_NODES) :]).isdecimal()
    )
    if boards:
        return boards
    indices = details.env.get(_HABANA_DEVICES, "").split(",")
    return tuple(index.strip() for index in indices if index.strip().isdecimal())


def _labels(
    config: TaskConfig, settings: ContainerSettings, gpus: Sequence[str]
) -> dict[str, str]:
    flags = settings.runner_flags
    keys = {"user": config.host_ssh_user, "keys": list(config.host_ssh_keys)}
    return {
        LABEL_IS_TASK: "true",
        LABEL_TASK_ID: config.id,
        LABEL_HOME: settings.home,
        LABEL_GPUS: json.dumps(list(gpus)),
        LABEL_PORTS: json.dumps([flags.http_port, flags.ssh_port]),
        LABEL_INTENT: START,
        **({LABEL_HOST_KEYS: json.dumps(keys)} if config.host_ssh_keys else {}),
        **({LABEL_BOOT: settings.boot_id} if settings.boot_id else {}),
    }


def _json(labels: Mapping[str, str], name: str) -> object:
    """What the label holds; None if it is missing or somebody else's."""
    try:
        return json.loads(labels.get(name, "null"))
    except (ValueError, RecursionError):
        return None


def _texts(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        return None
    return tuple(value)


def _mounts(config: TaskConfig, settings: ContainerSettings, runner_dir: str) -> tuple[Mount, ...]:
    return (
        Mount(runner_dir, RUNNER_DIR_IN_CONTAINER),
        Mount(settings.runner_path, RUNNER_IN_CONTAINER),
        *(Mount(f"{VOLUMES_ROOT}/{mount.name}", mount.path) for mount in config.volume_mounts),
        *(Mount(mount.instance_path, mount.path) for mount in config.instance_mounts),
    )


def _with_infiniband(spec: ContainerSpec, settings: ContainerSettings) -> ContainerSpec:
    if not settings.has_infiniband:
        return spec
    return attrs.evolve(
        spec,
        devices=(*spec.devices, Device(INFINIBAND, INFINIBAND)),
        ulimits=(*spec.ulimits, Ulimit("memlock", _UNLIMITED, _UNLIMITED)),
    )


def _with_gpus(
    spec: ContainerSpec, config: TaskConfig, settings: ContainerSettings, gpus: tuple[str, ...]
) -> ContainerSpec:
    if not gpus:
        return spec
    if config.gpu_devices:
        devices = (
            Device(device.path_on_host, device.path_in_container) for device in config.gpu_devices
        )
        return attrs.evolve(spec, devices=(*spec.devices, *devices))
    add = {
        "nvidia": _with_nvidia,
        "amd": _with_amd,
        "tenstorrent": _with_tenstorrent,
        "intel": _with_intel,
    }.get(settings.gpu_vendor)
    if add is None:
        raise ResourceError(f"GPUs of vendor {settings.gpu_vendor!r} cannot be passed in")
    return add(spec, settings, gpus)


def _with_nvidia(
    spec: ContainerSpec, _settings: ContainerSettings, gpus: tuple[str, ...]
) -> ContainerSpec:
    request = DeviceRequest(device_ids=gpus, capabilities=_NVIDIA_CAPABILITIES)
    return attrs.evolve(spec, device_requests=(request,))


def _with_amd(
    spec: ContainerSpec, _settings: ContainerSettings, gpus: tuple[str, ...]
) -> ContainerSpec:
    return attrs.evolve(
        spec,
        devices=(*spec.devices, *(Device(path, path) for path in ("/dev/kfd", *gpus))),
        ipc_mode="host",
        cap_add=("SYS_PTRACE",),
        security_opt=("seccomp=unconfined",),
    )


def _with_tenstorrent(
    spec: ContainerSpec, settings: ContainerSettings, gpus: tuple[str, ...]
) -> ContainerSpec:
    nodes = (f"{_TENSTORRENT_NODES}{index}" for index in gpus)
    hugepages = (Mount(HUGEPAGES, HUGEPAGES),) if settings.has_hugepages else ()
    return attrs.evolve(
        spec,
        devices=(*spec.devices, *(Device(path, path) for path in nodes)),
        mounts=(*spec.mounts, *hugepages),
    )


def _with_intel(
    spec: ContainerSpec, _settings: ContainerSettings, gpus: tuple[str, ...]
) -> ContainerSpec:
    return attrs.evolve(
        spec,
        runtime="habana",
        ipc_mode="host",
        cap_add=("SYS_NICE",),
        env={**spec.env, _HABANA_DEVICES: ",".join(gpus)},
    )
