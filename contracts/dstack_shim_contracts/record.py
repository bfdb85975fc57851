"""``task.json``: what a shim must know of a task that its container cannot tell.

Version 1 as dstack's own shims write it since 0.21.3, and keys of ours beside it. Those shims
ignore our keys and drop them when they rewrite a record, so each key has a meaning when absent.
They match keys in any letter case, so none of ours equals one of theirs in another case.
"""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, cast

import attrs
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.errors import (
    BodyError,
    DamagedRecord,
    RecordTooLarge,
    UnreadableRecord,
)
from dstack_shim_contracts.shapes import fold, keys_of, structure, unstructure
from dstack_shim_contracts.wire import (
    dump_json,
    left_out_if_none,
    parse_json,
    whole_text,
    wire,
)

VERSION: Final = 1
"""The version written: other shims refuse any other."""

READER: Final = 1
"""Records asking for a newer reader than this are left alone."""

MAX_RECORD_BYTES: Final = 4 * 1024 * 1024
"""More than a record can need: a submit and a terminate body of 1 MiB each, and room."""

_CREDENTIALS: Final = frozenset({"registry_username", "registry_password"})


class Step(str, Enum):
    """How far a task was meant to come when its record was written."""

    PREPARING = "preparing"
    PULLING = "pulling"
    CREATING = "creating"
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"

    def __str__(self) -> str:
        return self.value


@attrs.frozen
class Intent:
    """What the shim was about to do with a task.

    ``at`` is when (Unix seconds); ``handover`` is true if the shim stopped to be replaced, so that
    its successor goes on with the step.
    """

    step: Step = attrs.field(converter=Step)
    at: float
    handover: bool = False


def _has_reason(record: "TaskRecord") -> bool:
    return bool(record.termination_reason)


@attrs.frozen
class TaskRecord:
    """The record of one task. The first five fields are version 1, the others ours."""

    id: str
    config: TaskConfig
    termination_reason: str = ""
    termination_message: str = ""
    cleaned_up: bool = False
    """Whether the task's resources are released."""
    terminated: bool = attrs.field(default=attrs.Factory(_has_reason, takes_self=True))
    """A fact of its own: a task can be terminated without a reason. Absent: reason non-empty."""
    intent: Intent | None = attrs.field(default=None, metadata=wire(left_out=left_out_if_none))
    """Absent: only the container tells."""
    boot_id: str | None = attrs.field(default=None, metadata=wire(left_out=left_out_if_none))
    """The kernel's boot id when the record was written. Absent: unknown."""
    gpus: tuple[str, ...] | None = attrs.field(
        default=None, metadata=wire(left_out=left_out_if_none)
    )
    """GPUs held. Absent: ask the container."""
    stop_by: float | None = attrs.field(default=None, metadata=wire(left_out=left_out_if_none))
    """Unix seconds until which a graceful stop may last. Absent: none under way."""
    ended_at: float | None = attrs.field(default=None, metadata=wire(left_out=left_out_if_none))
    """Unix seconds when the task was seen ended. Absent: unknown, or not ended."""
    min_reader: int = attrs.field(default=1, metadata=wire(minimum=1))
    """The least reader that understands this record. Absent: 1."""
    written_by: str | None = attrs.field(default=None, metadata=wire(left_out=left_out_if_none))
    """Program and version that wrote the record. Absent: another shim."""
    extra: Mapping[str, object] = attrs.field(factory=dict, hash=False, metadata=wire(hidden=True))
    """Unknown keys of the record, which survive a rewrite. Never credentials."""
    config_extra: Mapping[str, object] = attrs.field(
        factory=dict, hash=False, metadata=wire(hidden=True)
    )
    """The same for unknown keys of the configuration."""


_RECORD_KEYS: Final = frozenset({"version", *keys_of(TaskRecord)})
_CONFIG_KEYS: Final = frozenset(keys_of(TaskConfig))


def read_record(raw: bytes) -> TaskRecord:
    """Read a record, as forgiving as the shims that wrote it and no more.

    Keys match in any letter case, the last one wins; lists may be null; unknown keys are kept.
    Credentials that should not be there are dropped. Raises DamagedRecord for anything that is
    not a record, UnreadableRecord for one that asks for a newer reader.
    """
    if len(raw) > MAX_RECORD_BYTES:
        raise DamagedRecord(f"{len(raw)} bytes, more than any record has")
    try:
        return _record(parse_json(raw))
    except BodyError as error:
        where = f"record {error}" if error.field == "body" else str(error)
        raise DamagedRecord(where) from None


def write_record(record: TaskRecord) -> bytes:
    """Write a record as one JSON object and a newline, always without credentials.

    Raises RecordTooLarge for a record that would not be read back.
    """
    safe = attrs.evolve(
        record,
        config=record.config.without_credentials(),
        terminated=record.terminated or _has_reason(record),
    )
    document: dict[str, Any] = {"version": VERSION, **unstructure(safe)}
    document["config"].update(_unknown(record.config_extra, _CONFIG_KEYS))
    document.update(_unknown(record.extra, _RECORD_KEYS))
    raw = dump_json(document) + b"\n"
    if len(raw) > MAX_RECORD_BYTES:
        raise RecordTooLarge(len(raw), MAX_RECORD_BYTES)
    return raw


def _record(document: object) -> TaskRecord:
    # The version decides first: the types of a newer record are none of our business.
    head = structure(_Head, document, any_case=True)
    if head.version == 0:
        raise BodyError("version", f"{VERSION}")
    if (head.min_reader or head.version) > READER or head.version < 0:
        raise UnreadableRecord(head.version, head.min_reader or head.version)
    record = structure(TaskRecord, document, any_case=True)
    if not record.id:
        raise BodyError("id", "a non-empty string")
    members = cast("dict[str, Any]", document)  # structure() refuses anything else
    config = {fold(key): item for key, item in members.items()}.get("config") or {}
    return attrs.evolve(
        record,
        config=record.config.without_credentials(),
        terminated=record.terminated or _has_reason(record),
        extra=_unknown(members, _RECORD_KEYS),
        config_extra=_unknown(config, _CONFIG_KEYS),
    )


@attrs.frozen
class _Head:
    """What tells whether the rest can be read."""

    version: int = 0
    min_reader: int = attrs.field(default=0, metadata=wire(minimum=1))


def _unknown(members: Mapping[str, object], known: frozenset[str]) -> dict[str, object]:
    return {
        whole_text(key): _kept(item, key)
        for key, item in members.items()
        if fold(key) not in known | _CREDENTIALS
    }


def _kept(value: object, path: str) -> object:
    """A copy of an unknown value that can be written again, without credentials."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, list):
        return [_kept(item, path) for item in value]
    if isinstance(value, Mapping):
        return {
            whole_text(key): _kept(item, path)
            for key, item in value.items()
            if fold(key) not in _CREDENTIALS
        }
    if isinstance(value, float) and not math.isfinite(value):
        raise BodyError(path, "a number that fits 64 bits")
    return value
