"""What the tests of the resources share: claims, keys, a clock that does not wait, a log to read."""

from __future__ import annotations

import base64
import logging
import os
import pwd
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import frozen
from dstack_shim_contracts.api import InstanceMount, TaskConfig, VolumeInfo

from dstack_shim.log import EventLog
from dstack_shim.resources.authorized_keys import Account
from dstack_shim.resources.protocol import Claim, Others

T = TypeVar("T")
MARKER = b" # added by dstack-shim"


@frozen
class Wish:
    """A claim."""

    id: str
    config: TaskConfig


def wish(
    owner: str,
    *,
    volumes: Sequence[VolumeInfo] = (),
    keys: Sequence[str] = (),
    user: str = "ubuntu",
    paths: Sequence[str] = (),
) -> Wish:
    return Wish(
        owner,
        TaskConfig(
            id=owner,
            volumes=tuple(volumes),
            host_ssh_user=user if keys else "",
            host_ssh_keys=tuple(keys),
            instance_mounts=tuple(InstanceMount(path, "/data") for path in paths),
        ),
    )


def others(*claims: Claim) -> Others:
    return lambda: claims


async def at_once(call: Callable[..., T], /, *args: object) -> T:
    return call(*args)


class Log:
    """An event log whose lines can be read."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        logger = logging.Logger("resources")  # noqa: LOG001 - one per test, known to nobody else
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]  # the shortest handler
        logger.addHandler(handler)
        self.events = EventLog(logger)

    def __contains__(self, text: str) -> bool:
        return any(text in line for line in self.lines)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.time = 0.0
        self.at: dict[float, Callable[[], object]] = {}

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        for moment in [moment for moment in self.at if moment <= self.time]:
            self.at.pop(moment)()


def string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def key(number: int, comment: str = "") -> str:
    """An ed25519 public key that nobody has the private part of."""
    blob = string(b"ssh-ed25519") + string(number.to_bytes(32, "big"))
    words = ["ssh-ed25519", base64.b64encode(blob).decode(), comment]
    return " ".join(word for word in words if word)


def line(text: str) -> bytes:
    """How a key looks as a line of ours."""
    return text.encode() + MARKER


def me(home: Path, name: str = "ubuntu") -> Account:
    """An account of the user who runs the tests."""
    return Account(name, os.getuid(), os.getgid(), str(home))


def passwd(**homes: Path) -> Callable[[str], pwd.struct_passwd]:
    """A user database: name → home, all with the ids of the user who runs the tests."""

    def look_up(name: str) -> pwd.struct_passwd:
        entry: Any = (name, "x", os.getuid(), os.getgid(), "", str(homes[name]), "/bin/sh")
        return pwd.struct_passwd(entry)

    return look_up
