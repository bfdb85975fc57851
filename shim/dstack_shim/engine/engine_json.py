"""The engine's JSON, both ways: what it answers becomes our models, a spec becomes its body.

Pure. Answers are read as hostile: engines from 20.10 to 29 differ in what they leave out or
write as null, and a container is described partly in words its own user chose. A part that
cannot be read is taken as absent, unless something would be concluded from it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any, TypeGuard

from dstack_shim_contracts.api import PortMapping

from dstack_shim.engine.protocol import (
    LABEL_HOME,
    LABEL_TASK_ID,
    Container,
    ContainerDetails,
    ContainerSpec,
    ContainerState,
    Mount,
    PortBinding,
)

Json = dict[str, Any]

_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", re.ASCII
)
_PORT_KEY = re.compile(r"(\d{1,5})/tcp", re.ASCII)


class Unreadable(Exception):
    """A part of an answer that something depends on is missing or of another kind."""


def container_from_list(item: object) -> Container:
    """One entry of the container list.

    Raises :class:`Unreadable` when it does not say which container or which task it is.
    """
    entry = _object(item)
    labels = _texts(entry.get("Labels"))
    task_id = labels.get(LABEL_TASK_ID, "")
    if not task_id:
        raise Unreadable(f"no {LABEL_TASK_ID} label")
    container_id = _needed_text(entry, "Id")
    created = entry.get("Created")
    return Container(
        id=container_id,
        name=_own_name(_list(entry.get("Names"))) or container_id,
        state=_state(entry.get("State")),
        created=float(created) if _is_whole(created) else 0.0,
        task_id=task_id,
        home=labels.get(LABEL_HOME),
        labels=labels,
        mounts=_mounts(entry.get("Mounts")),
        network_mode=_text(_object(entry.get("HostConfig")).get("NetworkMode")),
        ports=_ports(
            (port.get("IP"), port.get("PrivatePort"), port.get("PublicPort"))
            for port in map(_object, _list(entry.get("Ports")))
            if port.get("Type") == "tcp"
        ),
    )


def details_from_inspect(answer: object) -> ContainerDetails:
    """The answer to an inspect.

    Raises :class:`Unreadable` without an id, or when a container that ended has no exit code:
    a task's success hangs on that number, so it is never guessed.
    """
    entry = _object(answer)
    state, host = _object(entry.get("State")), _object(entry.get("HostConfig"))
    container = _inspected_container(entry)
    exit_code = state.get("ExitCode")
    if not _is_whole(exit_code):
        if container.state.finished:
            raise Unreadable("no State.ExitCode")
        exit_code = 0
    requests = _list(host.get("DeviceRequests"))
    ids = _list(_object(requests[0]).get("DeviceIDs")) if len(requests) == 1 else []
    devices = (_object(device).get("PathOnHost") for device in _list(host.get("Devices")))
    return ContainerDetails(
        container=container,
        exit_code=exit_code,
        oom_killed=state.get("OOMKilled") is True,
        error=_text(state.get("Error")),
        started_at=unix_time(state.get("StartedAt")),
        finished_at=unix_time(state.get("FinishedAt")),
        gpu_device_ids=tuple(text for text in ids if isinstance(text, str)),
        devices=tuple(path for path in devices if isinstance(path, str)),
        env=_environment(_object(entry.get("Config")).get("Env")),
    )


def _inspected_container(entry: Json) -> Container:
    labels = _texts(_object(entry.get("Config")).get("Labels"))
    container_id = _needed_text(entry, "Id")
    networks = _object(entry.get("NetworkSettings"))
    return Container(
        id=container_id,
        name=_own_name([entry.get("Name")]) or container_id,
        state=_state(_object(entry.get("State")).get("Status")),
        created=unix_time(entry.get("Created")) or 0.0,
        task_id=labels.get(LABEL_TASK_ID, ""),
        home=labels.get(LABEL_HOME),
        labels=labels,
        mounts=_mounts(entry.get("Mounts")),
        network_mode=_text(_object(entry.get("HostConfig")).get("NetworkMode")),
        ports=_ports(
            (binding.get("HostIp"), int(key[1]), binding.get("HostPort"))
            for port, bindings in _object(networks.get("Ports")).items()
            if (key := _PORT_KEY.fullmatch(port))
            for binding in map(_object, _list(bindings))
        ),
    )


def create_body(spec: ContainerSpec) -> Json:
    """The body that creates a container as specified.

    Sources of bind mounts must exist (``Mounts``; the older ``Binds`` would create them).
    """
    return {
        "Image": spec.image,
        "Entrypoint": list(spec.entrypoint),
        "Cmd": list(spec.command),
        "Env": [f"{name}={value}" for name, value in spec.env.items()],
        "User": spec.user,
        "Labels": dict(spec.labels),
        "ExposedPorts": {_port_key(port): {} for port in spec.ports},
        # An empty value means "as if not given" for each of these, in every engine.
        "HostConfig": {key: value for key, value in _host_config(spec).items() if value},
    }


def _host_config(spec: ContainerSpec) -> Json:
    return {
        "NetworkMode": spec.network_mode,
        "Mounts": [
            {"Type": mount.type, "Source": mount.source, "Target": mount.target}
            for mount in spec.mounts
        ],
        "PortBindings": {
            _port_key(port): [{"HostIp": port.host_ip, "HostPort": str(port.host or "")}]
            for port in spec.ports
        },
        "Privileged": spec.privileged,
        "NanoCpus": spec.nano_cpus,
        "Memory": spec.memory,
        "ShmSize": spec.shm_size,
        "Tmpfs": dict(spec.tmpfs),
        "CapAdd": list(spec.cap_add),
        "SecurityOpt": list(spec.security_opt),
        "IpcMode": spec.ipc_mode,
        "Runtime": spec.runtime,
        "Devices": [
            {
                "PathOnHost": device.path_on_host,
                "PathInContainer": device.path_in_container,
                "CgroupPermissions": device.permissions,
            }
            for device in spec.devices
        ],
        "DeviceRequests": [
            {"DeviceIDs": list(wish.device_ids), "Capabilities": [list(wish.capabilities)]}
            for wish in spec.device_requests
        ],
        "Ulimits": [
            {"Name": limit.name, "Soft": limit.soft, "Hard": limit.hard} for limit in spec.ulimits
        ],
    }


def _port_key(port: PortBinding) -> str:
    return f"{port.container}/tcp"


def unix_time(stamp: object) -> float | None:
    """Unix seconds of an RFC 3339 time; None if it is none, or Go's zero time (year 1)."""
    found = _TIME.fullmatch(stamp) if isinstance(stamp, str) else None
    if found is None or found[1] == "0001":
        return None
    zone = "+00:00" if found[8] == "Z" else found[8]
    try:
        whole = datetime.fromisoformat(
            f"{found[1]}-{found[2]}-{found[3]}T{found[4]}:{found[5]}:{found[6]}{zone}"
        )
    except ValueError:
        return None
    # By hand: nanoseconds are more digits than Python 3.10 reads.
    fraction = float(f"0.{found[7]}") if found[7] else 0.0
    return (whole - datetime(1970, 1, 1, tzinfo=timezone.utc)).total_seconds() + fraction


def last_log_lines(stream: bytes, n: int) -> str:
    """The last ``n`` lines of a container's log as the engine sends it.

    Frames of a kind byte, three zeroes, a length and the payload; what does not follow that is
    taken as it is (the log of a container with a terminal has no frames).
    """
    payload = bytearray()
    at = 0
    while at + 8 <= len(stream):
        if stream[at] > 2 or stream[at + 1 : at + 4] != b"\0\0\0":
            return _last_lines(stream, n)
        length = int.from_bytes(stream[at + 4 : at + 8], "big")
        payload += stream[at + 8 : at + 8 + length]
        at += 8 + length
    return _last_lines(bytes(payload) if at else stream, n)


def _last_lines(text: bytes, n: int) -> str:
    lines = text.decode("utf-8", "replace").replace("\r\n", "\n").rstrip("\n").split("\n")
    return "\n".join(lines[-n:])


def _ports(mappings: Iterable[tuple[object, object, object]]) -> tuple[PortMapping, ...]:
    """Mappings from (host address, container port, host port), each port of IPv4 once."""
    found: dict[int, int] = {}
    for address, inner, outer in mappings:
        container, host = _port(inner), _port(outer)
        if container and host and _is_ipv4(address):
            found.setdefault(container, host)
    return tuple(PortMapping(host=found[port], container=port) for port in sorted(found))


def _port(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 5:
        value = int(value)
    return value if _is_whole(value) and 0 < value < 65536 else 0


def _is_ipv4(address: object) -> bool:
    try:
        return isinstance(address, str) and ipaddress.ip_address(address).version == 4
    except ValueError:
        return False


def _mounts(value: object) -> tuple[Mount, ...]:
    return tuple(
        Mount(
            _text(entry.get("Source")), _text(entry.get("Destination")), _text(entry.get("Type"))
        )
        for entry in map(_object, _list(value))
        if entry
    )


def _environment(value: object) -> dict[str, str]:
    pairs = (text.partition("=") for text in _list(value) if isinstance(text, str))
    return {name: content for name, _, content in pairs}


def _state(value: object) -> ContainerState:
    try:
        return ContainerState(value)
    except ValueError:
        return ContainerState.UNKNOWN


def _own_name(names: list[Any]) -> str:
    """The container's name: the one without a second slash (links add names with two)."""
    texts = [name.removeprefix("/") for name in names if isinstance(name, str)]
    return next((name for name in texts if name and "/" not in name), "")


def _needed_text(entry: Json, key: str) -> str:
    text = _text(entry.get(key))
    if not text:
        raise Unreadable(f"no {key}")
    return text


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: object) -> dict[str, str]:
    return {key: text for key, text in _object(value).items() if isinstance(text, str)}


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
