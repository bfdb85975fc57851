"""``boots.json`` in the home: the boots of this host in which a shim was started, oldest first.

A container that ran when the host went down is given its end by the engine of a later boot. When
that boot ends too, before a shim could ask, only this file tells that it was there. Noted first
of all, before the engine is asked anything: an engine that does not answer must not hide a boot.
"""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from dstack_shim.log import EventLog
from dstack_shim.staged import StagedFile, sweep
from dstack_shim.tasks.outcomes import Boot

FILE_NAME = "boots.json"
KEPT = 100
"""Boots remembered; a record of an older one is of a task long over."""
_MAX_BYTES = 1 << 16


def note_boot(home: Path, boot: Boot, log: EventLog) -> Boot:
    """This boot with those noted before it, and noted itself, durably.

    A file that cannot be read or written is logged: then a reboot that nobody saw is not known.
    """
    path = home / FILE_NAME
    try:
        noted = _read(path)
    except FileNotFoundError:
        noted = ()
    except (OSError, ValueError, RecursionError) as error:
        log.error("boots.unreadable", path=path, error=error)  # noqa: TRY400 - no fault of ours
        noted = ()
    earlier = tuple(other for other in noted if other.id != boot.id)[-KEPT:]
    if boot.id is not None and boot.id not in (other.id for other in noted):
        try:
            _write(path, (*earlier, boot))
        except OSError as error:
            log.error("boots.not_noted", path=path, error=error)  # noqa: TRY400 - no fault of ours
    return attrs.evolve(boot, earlier=earlier)


def _read(path: Path) -> tuple[Boot, ...]:
    with path.open("rb") as file:
        noted = json.loads(file.read(_MAX_BYTES))
    try:
        return tuple(Boot(str(item["id"]), float(item["started_at"])) for item in noted)
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError("expected a list of boots") from error


def _write(path: Path, boots: tuple[Boot, ...]) -> None:
    noted = [{"id": boot.id, "started_at": boot.started_at} for boot in boots]
    sweep(path)
    with StagedFile(path) as staged:
        staged.fill(json.dumps(noted).encode() + b"\n")
        staged.place()
