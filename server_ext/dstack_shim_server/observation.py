"""
What one instance check saw, made of the documents that came by.

A shim may answer anything: what is not understood is left out here, and the gate has said by then
that it is not safe.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from dstack_shim_contracts.api import ComponentStatus
from dstack_shim_contracts.statuses import TaskStatus
from dstack_shim_contracts.wire import whole_text

# More features, tasks or characters than this are no shim's and would only fill the database.
MOST_FEATURES = 64
MOST_TASKS = 4096
LONGEST = 128

_STATUSES = frozenset(status.value for status in TaskStatus)


@attrs.frozen
class Subject:
    """The instance a check is about, in dstack's words."""

    id: str
    name: str
    fleet_id: str = ""
    # Jobs dstack has there; None: it was not loaded.
    jobs: frozenset[str] | None = None


@attrs.frozen
class Observation:
    """One check of one instance; what was not seen is None, "" or empty."""

    subject: Subject
    at: float  # seconds since the epoch
    running_version: str = ""
    running_features: tuple[str, ...] | None = None
    implementation: Mapping[str, Any] = attrs.Factory(dict)
    installed_version: str = ""
    installed_status: str = ""
    installed_features: tuple[str, ...] | None = None
    wanted_version: str = ""
    tasks: tuple[tuple[str, str], ...] | None = None
    # dstack's answer to "safe to restart?" and why; None if it did not ask.
    answer: bool | None = None
    # The tasks would survive, the roll-out says no.
    held: bool = False
    reason: str = ""
    blocking: Mapping[str, int] = attrs.Factory(dict)

    @property
    def jobs(self) -> frozenset[str] | None:
        """Jobs dstack has on the instance."""
        return self.subject.jobs

    @property
    def process(self) -> str:
        """What the running shim says that changes with each process and each try to replace it."""
        upgrade_at = _text(self._last_upgrade.get("at"))
        return f"{_text(self.implementation.get('started_at'))[:60]} {upgrade_at[:60]}".strip()

    @property
    def upgrade_words(self) -> str:
        """How the running shim says that its last upgrade went."""
        told = self._last_upgrade
        words = (_text(told.get(key)) for key in ("to_version", "outcome", "reason"))
        return " ".join(word for word in words if word)

    @property
    def is_trying(self) -> bool:
        """Whether the running shim is in the middle of being replaced in place."""
        return self._last_upgrade.get("outcome") == "trying"

    @property
    def _last_upgrade(self) -> Mapping[str, Any]:
        told = self.implementation.get("last_upgrade")
        return told if isinstance(told, Mapping) else {}

    @property
    def state(self) -> str:
        """Return the state in one word, for tables and gauges."""
        if not self.installed_version:
            return "unknown"
        if self.installed_status in {ComponentStatus.INSTALLING, ComponentStatus.ERROR}:
            return f"install {self.installed_status}"
        if self.installed_version == self.running_version:
            wanted = self.wanted_version in {"", self.installed_version}
            return "current" if wanted else "to install"
        if self.held:
            return "held"
        return "restarting" if self.answer else "waiting"


def observe(
    subject: Subject,
    at: float,
    healthcheck: object,
    component: object,
    tasks: object,
    **more: Any,
) -> Observation:
    """Make an observation of parsed documents, whatever they hold."""
    running = healthcheck if isinstance(healthcheck, dict) else {}
    installed = component if isinstance(component, dict) else {}
    return Observation(
        subject=subject,
        at=at,
        running_version=_text(running.get("version")),
        running_features=features_of(running),
        implementation=_small_object(running.get("implementation")),
        installed_version=_text(installed.get("version")),
        installed_status=_text(installed.get("status"))[:32],
        installed_features=features_of(installed),
        tasks=listed_tasks(tasks),
        **more,
    )


def listed_tasks(document: object) -> tuple[tuple[str, str], ...] | None:
    """Return ids and statuses of a task list; None if it is not one in every entry."""
    items = document.get("tasks") if isinstance(document, dict) else None
    if not isinstance(items, list) or len(items) > MOST_TASKS:
        return None
    found = []
    for item in items:
        task_id, status = (
            (item.get("id"), item.get("status")) if isinstance(item, dict) else (0, 0)
        )
        if not (isinstance(task_id, str) and isinstance(status, str) and status in _STATUSES):
            return None
        found.append((task_id[:LONGEST], status))
    return tuple(found)


def count_by_status(statuses: Iterable[str]) -> Mapping[str, int]:
    """Count tasks by status."""
    return dict(Counter(statuses))


def features_of(document: object) -> tuple[str, ...] | None:
    """Return the features a document lists; None if it lists none in a way we understand."""
    features = document.get("features") if isinstance(document, dict) else None
    if not isinstance(features, list) or not all(isinstance(word, str) for word in features):
        return None
    return tuple(_text(word) for word in features[:MOST_FEATURES])


def installed_version(component: object) -> str:
    """Return the version of an installed file, "" if none is told."""
    return _text(component.get("version")) if isinstance(component, dict) else ""


def _text(value: object) -> str:
    # No database takes halves of surrogate pairs, and PostgreSQL's text takes no NUL.
    return whole_text(value[:LONGEST]).replace("\0", "\ufffd") if isinstance(value, str) else ""


def _small_object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) and len(json.dumps(value)) <= 1024 else {}
