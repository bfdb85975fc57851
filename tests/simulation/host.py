"""What tasks take on the host: key lines, mounts, directories. The host outlives every shim.

The adapters keep the rules of :mod:`dstack_shim.resources` (claims that stand, one lock for each
user and volume, releases that leave what another needs) on sets instead of files and mounts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs

from dstack_shim.errors import ResourceError
from dstack_shim.resources.protocol import Claim, Ending, Others

GPUS = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


@attrs.define
class Host:
    """Our lines in each user's key file, mounted volumes, and directories made for mounts."""

    keys: dict[str, tuple[str, ...]] = attrs.Factory(dict)
    mounted: dict[str, None] = attrs.Factory(dict)
    instance_dirs: dict[str, None] = attrs.Factory(dict)

    def reboot(self) -> None:
        """Mounts are gone, files are not."""
        self.mounted.clear()


class Gate(Protocol):
    """The way of one process to the host: every call passes it, and may be struck there."""

    async def before(self, call: str) -> None:
        """Raises what strikes before anything is changed."""

    async def after(self, call: str) -> None:
        """Raises what strikes once all is changed."""

    async def half(self, call: str) -> None:
        """Raises what strikes after the first of several changes."""

    def may_take(self, claim: Claim) -> None:
        """Told before something is taken for the claim."""

    def may_give(self, claim: Claim) -> None:
        """Told before something of the claim is given back."""


class SimKeys:
    """Stands for ``HostKeys``: per user, our lines are the union of the claims that stand."""

    name = "host_keys"

    def __init__(self, host: Host, gate: Gate) -> None:
        self._host = host
        self._gate = gate
        self._ending = Ending()
        self._locks: dict[str, asyncio.Lock] = {}

    async def acquire(self, record: Claim, others: Others) -> None:
        if not record.config.host_ssh_keys:
            return
        self._ending.revoke(record.id)
        async with self._lock(record):
            await self._gate.before("keys.acquire")
            self._gate.may_take(record)
            self._reconcile(record, [*self._standing(record, others), record])
            await self._gate.after("keys.acquire")

    async def release(self, record: Claim, others: Others) -> None:
        self._ending.begin(record.id)
        if not record.config.host_ssh_keys:
            return
        async with self._lock(record):
            await self._gate.before("keys.release")
            self._gate.may_give(record)
            self._reconcile(record, self._standing(record, others))
            await self._gate.after("keys.release")

    async def confirmed(self, record: Claim) -> tuple[str, ...]:
        await self._gate.before("keys.confirm")
        present = self._host.keys.get(record.config.host_ssh_user, ())
        return tuple(key for key in record.config.host_ssh_keys if key in present)

    def _reconcile(self, record: Claim, claims: Sequence[Claim]) -> None:
        wanted = (key for claim in claims for key in claim.config.host_ssh_keys)
        self._host.keys[record.config.host_ssh_user] = tuple(dict.fromkeys(wanted))

    def _standing(self, record: Claim, others: Others) -> list[Claim]:
        user = record.config.host_ssh_user
        claims = self._ending.standing(record.id, others)
        return [claim for claim in claims if claim.config.host_ssh_user == user]

    def _lock(self, record: Claim) -> asyncio.Lock:
        return self._locks.setdefault(record.config.host_ssh_user, asyncio.Lock())


class SimVolumes:
    """Stands for ``Volumes``: one mount for each name, undone by the last who needs it."""

    name = "volumes"

    def __init__(self, host: Host, gate: Gate) -> None:
        self._host = host
        self._gate = gate
        self._ending = Ending()
        self._locks: dict[str, asyncio.Lock] = {}

    async def acquire(self, record: Claim, others: Others) -> None:
        del others
        self._ending.revoke(record.id)
        for volume in record.config.volumes:
            async with self._lock(volume.name):
                await self._gate.before("volumes.acquire")
                self._gate.may_take(record)
                self._host.mounted[volume.name] = None
                await self._gate.half("volumes.acquire")
        if record.config.volumes:
            await self._gate.after("volumes.acquire")

    async def release(self, record: Claim, others: Others) -> None:
        self._ending.begin(record.id)
        problems = []
        for volume in record.config.volumes:
            if self._is_needed(record, volume.name, others):
                continue
            async with self._lock(volume.name):
                if self._is_needed(record, volume.name, others):
                    continue
                try:
                    await self._gate.before("volumes.release")
                    self._gate.may_give(record)
                    self._host.mounted.pop(volume.name, None)
                    await self._gate.after("volumes.release")
                except ResourceError as error:
                    problems.append(str(error))
        if problems:
            raise ResourceError("; ".join(problems))

    def _is_needed(self, record: Claim, name: str, others: Others) -> bool:
        return any(
            volume.name == name
            for claim in self._ending.standing(record.id, others)
            for volume in claim.config.volumes
        )

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


class SimInstanceMounts:
    """Stands for ``InstanceMounts``: made if missing, left for ever."""

    name = "instance_mounts"

    def __init__(self, host: Host, gate: Gate) -> None:
        self._host = host
        self._gate = gate

    async def acquire(self, record: Claim, others: Others) -> None:
        del others
        for mount in record.config.instance_mounts:
            await self._gate.before("instance_mounts.acquire")
            self._host.instance_dirs[mount.instance_path] = None
            await self._gate.after("instance_mounts.acquire")

    async def release(self, record: Claim, others: Others) -> None:
        """Nothing: the directories stay."""


def needed(claims: Sequence[Claim], things: Callable[[Claim], Sequence[str]]) -> Mapping[str, str]:
    """What the claims need of a kind, each with one who needs it."""
    return {thing: claim.id for claim in claims for thing in things(claim)}
