"""What is held on this host for nobody: a pure comparison, for metrics and ``doctor``.

A leak may be seen for a moment while a task starts or gives back; one that stays is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs
from dstack_shim_contracts.record import TaskRecord

from dstack_shim.resources.ssh_keys import BadKey, parse_key


@attrs.frozen
class Held:
    """What is there: GPU locks by owner, mounted volumes by name, fingerprints on our lines of
    the users' authorized_keys.
    """

    gpus: Mapping[str, tuple[str, ...]]
    volumes: Iterable[str]
    keys: Mapping[str, Iterable[str]]


@attrs.frozen
class Leak:
    """One thing that no task accounts for. ``kind`` is ``gpu``, ``volume`` or ``host_key``."""

    kind: str
    what: str


def leaks(records: Iterable[TaskRecord], held: Held) -> tuple[Leak, ...]:
    """What of it is not of one of these tasks, of which those released hold nothing."""
    holders = [record for record in records if not record.cleaned_up]
    owners = {record.id for record in holders}
    volumes = {volume.name for record in holders for volume in record.config.volumes}
    keys = {pair for record in holders for pair in host_keys(record)}
    return (
        *(
            Leak("gpu", gpu)
            for owner, gpus in held.gpus.items()
            if owner not in owners
            for gpu in gpus
        ),
        *(Leak("volume", name) for name in held.volumes if name not in volumes),
        *(
            Leak("host_key", f"{fingerprint} of {user}")
            for user, fingerprints in held.keys.items()
            for fingerprint in fingerprints
            if (user, fingerprint) not in keys
        ),
    )


def host_keys(record: TaskRecord) -> Iterator[tuple[str, str]]:
    """User and fingerprint of each key the task lets in."""
    for text in record.config.host_ssh_keys:
        try:
            yield record.config.host_ssh_user, parse_key(text).fingerprint
        except BadKey:
            continue  # never written either
