"""The shim's own metrics, as Prometheus text (exposition format 0.0.4).

A few lines of text need no client library in a daemon. The names are part of what operators may
rely on, as those of log events are: they are counted under them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import attrs
from dstack_shim_contracts.api import HealthcheckResponse
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.errors import ResourceError, StoreError
from dstack_shim.log import LOGGER_NAME, EventLog
from dstack_shim.resources.gpus import GpuLocks
from dstack_shim.resources.host_keys import HostKeys
from dstack_shim.resources.volumes import Volumes
from dstack_shim.tasks.core import Core
from dstack_shim.tasks.leaks import Held, Leak, leaks
from dstack_shim.timing import Timing

T = TypeVar("T")
LEAK_KINDS = ("gpu", "volume", "host_key")


class EventCounts(logging.Handler):
    """Counts the events that are logged, by level and name."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[str, str]] = Counter()

    @classmethod
    def attached(cls) -> EventCounts:
        """One that counts from now on; it replaces an earlier one."""
        logger = logging.getLogger(LOGGER_NAME)
        for handler in logger.handlers[:]:
            if isinstance(handler, cls):
                logger.removeHandler(handler)
        counts = cls()
        logger.addHandler(counts)
        return counts

    def emit(self, record: logging.LogRecord) -> None:
        """Count one event: its name is the first word of its line."""
        event = record.getMessage().partition(" ")[0]
        self._counts[record.levelname.lower(), event] += 1

    @property
    def now(self) -> Mapping[tuple[str, str], int]:
        """(level, event) → how often."""
        return dict(self._counts)


@attrs.frozen
class Snapshot:
    """All that is told at one moment."""

    health: HealthcheckResponse
    started_at: float
    """Unix seconds."""
    statuses: Iterable[TaskStatus]
    steps: Timing
    restore_seconds: float
    is_watching: bool
    """Whether the engine's events can be relied on."""
    gpus_idle: int
    gpus_held: int
    quarantined: int
    leaks: Iterable[Leak]
    events: Mapping[tuple[str, str], int]


class Meter:
    """Looks at everything that is told of; reads the mount table and users' key files."""

    def __init__(
        self,
        core: Core,
        gpus: GpuLocks,
        volumes: Volumes,
        host_keys: HostKeys,
        set_aside: Callable[[], Awaitable[tuple[str, ...]]],
        events: EventCounts,
        log: EventLog,
    ) -> None:
        self._core = core
        self._gpus = gpus
        self._volumes = volumes
        self._host_keys = host_keys
        self._set_aside = set_aside
        self._events = events
        self._log = log

    async def read(self, health: HealthcheckResponse, started_at: float) -> str:
        """The answer of ``GET /metrics``; what cannot be read counts as nothing, and is logged."""
        records = [entry.task.record for entry in self._core.book]
        gpus = self._gpus.held()
        held = Held(
            gpus,
            await self._or(self._volumes.census(), ()),
            await self._or(self._host_keys.census({r.config.host_ssh_user for r in records}), {}),
        )
        return render(
            Snapshot(
                health=health,
                started_at=started_at,
                statuses=[item.status for item in self._core.list()],
                steps=self._core.step.timing,
                restore_seconds=self._core.restore_timing.latest,
                is_watching=self._core.hears_of_ends,
                gpus_idle=len(self._gpus.idle),
                gpus_held=sum(map(len, gpus.values())),
                quarantined=len(await self._or(self._set_aside(), ())),
                leaks=leaks(records, held),
                events=self._events.now,
            )
        )

    async def _or(self, look: Awaitable[T], nothing: T) -> T:
        try:
            return await look
        except (ResourceError, StoreError, OSError) as error:
            self._log.warning("metrics.unreadable", error=error)
            return nothing


def render(snapshot: Snapshot) -> str:
    """The answer of ``GET /metrics``."""
    return "".join(f"{line}\n" for metric in _metrics(snapshot) for line in metric.lines())


@attrs.frozen
class _Metric:
    name: str
    kind: str
    help: str
    samples: tuple[tuple[Mapping[str, str], float], ...]
    suffixes: tuple[str, ...] = ()
    """Of a summary: what follows the name in each sample."""

    def lines(self) -> Iterator[str]:
        yield f"# HELP dstack_shim_{self.name} {self.help}"
        yield f"# TYPE dstack_shim_{self.name} {self.kind}"
        suffixes = self.suffixes or ("",) * len(self.samples)
        for (labels, value), suffix in zip(self.samples, suffixes, strict=True):
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            braced = f"{{{inside}}}" if inside else ""
            yield f"dstack_shim_{self.name}{suffix}{braced} {_number(value)}"


def _metrics(snapshot: Snapshot) -> Iterator[_Metric]:
    yield from _of_the_process(snapshot)
    yield from _of_the_host(snapshot)
    events = tuple(
        ({"level": level, "event": event}, float(count))
        for (level, event), count in sorted(snapshot.events.items())
    )
    yield _Metric("events_total", "counter", "Events logged, by level and name.", events)


def _of_the_process(snapshot: Snapshot) -> Iterator[_Metric]:
    health, steps = snapshot.health, snapshot.steps
    own = health.implementation
    assert own is not None, "ours always says who it is"
    about = {"version": health.version, "implementation": f"{own.name} {own.version}"}
    yield _one("info", "Which shim this is.", 1, about)
    yield _one("start_time_seconds", "When it began to serve.", snapshot.started_at)
    yield _one("generation", "Replacements in place since the process started.", own.generation)
    if own.last_upgrade is not None:
        words = {
            "from": own.last_upgrade.from_version,
            "to": own.last_upgrade.to_version,
            "outcome": own.last_upgrade.outcome,
        }
        yield _one("last_upgrade", "What became of the latest replacement.", 1, words)
    yield _one("restore_seconds", "How long the last restore took.", snapshot.restore_seconds)
    yield _Metric(
        "step_seconds",
        "summary",
        "Rounds of the background step.",
        (({}, steps.total), ({}, float(steps.count))),
        ("_sum", "_count"),
    )
    yield _one("step_latest_seconds", "How long the last round took.", steps.latest)
    healthy = "Whether the engine's events can be relied on."
    yield _one("engine_events_healthy", healthy, float(snapshot.is_watching))


def _of_the_host(snapshot: Snapshot) -> Iterator[_Metric]:
    by_status = Counter(snapshot.statuses)
    tasks = tuple(({"status": status.value}, float(by_status[status])) for status in TaskStatus)
    yield _Metric("tasks", "gauge", "Known tasks, by status.", tasks)
    gpus = (
        ({"state": "idle"}, float(snapshot.gpus_idle)),
        ({"state": "held"}, float(snapshot.gpus_held)),
    )
    yield _Metric("gpus", "gauge", "GPUs of this host.", gpus)
    kinds = Counter(leak.kind for leak in snapshot.leaks)
    yield _Metric(
        "leaked_resources",
        "gauge",
        "Things held for no task; more than a moment means a fault.",
        tuple(({"kind": kind}, float(kinds[kind])) for kind in LEAK_KINDS),
    )
    words = "Damaged records that were set aside and nobody has looked at."
    yield _one("quarantined_records", words, snapshot.quarantined)


def _one(name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> _Metric:
    return _Metric(name, "gauge", help, ((labels or {}, float(value)),))


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
