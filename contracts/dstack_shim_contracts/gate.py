"""Which tasks survive a restart of the shim, and why: one pure function, and one that applies it.

Two sides have to do their part. The running shim has to leave the state of a task behind, the
installed file has to take it up. A shim says what it can in ``features``; dstack's own shims do
not, there the version tells. Whatever is not understood counts as "no": a wrong "no" delays an
upgrade, a wrong "yes" ends somebody's job.

Nothing here raises, whatever the documents hold.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
from dstack_shim_contracts.api import SHIM, ComponentStatus, TaskListItem
from dstack_shim_contracts.features import FEATURES, PERSISTED_STATE
from dstack_shim_contracts.shapes import unstructure
from dstack_shim_contracts.statuses import TaskStatus
from dstack_shim_contracts.versions import parse_version, persists_state

ALWAYS_SAFE: Final = frozenset({TaskStatus.TERMINATED})
"""A terminated task has nothing left that a restart could hurt."""

_SHOWN_CHARACTERS: Final = 40
_SHOWN_ID_CHARACTERS: Final = 8


@attrs.frozen
class Verdict:
    """Statuses in which a task survives a restart, and the reason in words for a log.

    The reason speaks of running tasks: ``safe: …`` if they survive, else ``not safe: …``.
    """

    statuses: frozenset[TaskStatus]
    reason: str


@attrs.frozen
class Decision:
    """Whether to restart now, the reason in words, and the tasks that are in the way."""

    restart: bool
    reason: str
    blocking: tuple[TaskListItem, ...] = ()


def decide(
    healthcheck: object, component: object | None, *, trust_dev_builds: bool = False
) -> Verdict:
    """Judge a restart from the running shim's healthcheck into the installed file.

    Both documents are parsed JSON as it came, or our models. ``component`` is the shim's own entry
    of the component list, None if there is none. With ``trust_dev_builds`` a version that has no
    place in the order of releases counts as new enough.
    """
    try:
        running = _running_side(healthcheck, trust_dev_builds)
        installed = _installed_side(component, trust_dev_builds)
        return _verdict(running, installed)
    except Exception as error:  # noqa: BLE001 -- a hostile document must not stop a server's check
        return Verdict(
            ALWAYS_SAFE, f"not safe: documents cannot be judged ({type(error).__name__})"
        )


def may_restart(verdict: Verdict, tasks: object) -> Decision:
    """Join a verdict with the list of tasks.

    ``tasks`` are the items of the task list, as parsed JSON or as models. A list that cannot be
    read means no.
    """
    try:
        items = _items(tasks)
    except Exception:  # noqa: BLE001 -- as above
        items = None
    if items is None:
        return Decision(False, "not safe: the list of tasks is malformed")
    blocking = tuple(item for item in items if item.status not in verdict.statuses)
    if not blocking:
        return Decision(True, _why_not_blocked(verdict, items))
    return Decision(False, _why_blocked(verdict, blocking), blocking)


@attrs.frozen
class _Side:
    """What one side keeps: its name with version, features it has, and how it was told.

    ``flaw`` is a whole clause saying why it keeps nothing, None if the version says so.
    """

    name: str
    features: frozenset[str] = frozenset()
    advertised: bool = False
    flaw: str | None = None

    @property
    def keeps(self) -> frozenset[TaskStatus]:
        return frozenset().union(
            *(FEATURES[name].restart_safe for name in self.features & FEATURES.keys())
        )


def _verdict(running: _Side, installed: _Side) -> Verdict:
    statuses = ALWAYS_SAFE | (running.keeps & installed.keeps)
    if TaskStatus.RUNNING in statuses:
        return Verdict(statuses, f"safe: {_praise(running, installed)}")
    losing = [side for side in (running, installed) if TaskStatus.RUNNING not in side.keeps]
    return Verdict(statuses, f"not safe: {_blame(losing)}")


def _praise(running: _Side, installed: _Side) -> str:
    if running.advertised and installed.advertised:
        return f"both advertise {PERSISTED_STATE}"
    if not running.advertised and not installed.advertised:
        return f"{running.name} and {installed.name} keep state"
    return ", ".join(
        f"{side.name} " + (f"advertises {PERSISTED_STATE}" if side.advertised else "keeps state")
        for side in (running, installed)
    )


def _blame(losing: list[_Side]) -> str:
    if len(losing) == 2 and all(side.flaw is None for side in losing):
        return " and ".join(side.name for side in losing) + " keep no state"
    return ", ".join(side.flaw or f"{side.name} keeps no state" for side in losing)


def _running_side(healthcheck: object, trust_dev_builds: bool) -> _Side:
    document = _document(healthcheck)
    if document is None:
        return _Side("running shim", flaw="running shim's healthcheck is not an object")
    if document.get("service") != SHIM:
        return _Side("running shim", flaw=f"running service is not {SHIM}")
    return _side("running shim", document, trust_dev_builds)


def _installed_side(component: object | None, trust_dev_builds: bool) -> _Side:
    if component is None:
        return _Side("installed file", flaw="no installed file is reported")
    document = _document(component)
    if document is None:
        return _Side("installed file", flaw="entry of the installed file is not an object")
    if document.get("name") != SHIM:
        return _Side("installed file", flaw=f"installed file is not {SHIM}")
    status = document.get("status")
    if status != ComponentStatus.INSTALLED:
        shown = _shown(status) if isinstance(status, str) else "of unknown status"
        return _Side("installed file", flaw=f"installed file is {shown}")
    return _side("installed file", document, trust_dev_builds)


def _side(role: str, document: Mapping[str, Any], trust_dev_builds: bool) -> _Side:
    version = document.get("version")
    if not isinstance(version, str):
        return _Side(role, flaw=f"version of the {role} is not a string")
    name = f"{role} {_shown(version)}" if version else f"{role} of unknown version"
    if "features" in document:
        return _advertising_side(name, document["features"])
    parsed = parse_version(version)
    keeps = trust_dev_builds if parsed is None else persists_state(parsed)
    if keeps:
        return _Side(name, frozenset({PERSISTED_STATE}))
    flaw = None if parsed else f"{name} is no release, and dev builds are not trusted"
    return _Side(name, flaw=flaw)


def _advertising_side(name: str, features: object) -> _Side:
    if features is None:
        return _Side(name, flaw=f"features of {name} are unknown")
    if not isinstance(features, list | tuple) or not all(isinstance(f, str) for f in features):
        return _Side(name, flaw=f"features of {name} are not a list of words")
    if PERSISTED_STATE not in features:
        return _Side(name, flaw=f"{name} does not advertise {PERSISTED_STATE}")
    return _Side(name, frozenset(features), advertised=True)


def _document(value: object) -> Mapping[str, Any] | None:
    """The document as JSON has it, where an absent key and null are two things."""
    if isinstance(value, Mapping):
        return value
    return unstructure(value) if attrs.has(type(value)) else None


def _items(tasks: object) -> list[TaskListItem] | None:
    if not isinstance(tasks, Iterable) or isinstance(tasks, str | bytes | Mapping):
        return None
    items = []
    for task in tasks:
        document = _document(task)
        if document is None or not isinstance(document.get("id"), str):
            return None
        items.append(TaskListItem(document["id"], TaskStatus(document.get("status"))))
    return items


def _why_not_blocked(verdict: Verdict, items: list[TaskListItem]) -> str:
    if any(item.status not in ALWAYS_SAFE for item in items):
        return verdict.reason
    return "safe: all tasks are terminated" if items else "safe: there are no tasks"


def _why_blocked(verdict: Verdict, blocking: tuple[TaskListItem, ...]) -> str:
    # A task under way is the nearer reason: it goes by itself, while the other side of a running
    # task changes only with the next file.
    under_way = [item for item in blocking if item.status is not TaskStatus.RUNNING]
    if not under_way:
        return verdict.reason
    first = under_way[0]
    reason = f"not safe: task {_shown_id(first.id)} is {first.status}"
    others = len(blocking) - 1
    return f"{reason}, and {others} more" if others else reason


def _shown_id(task_id: str) -> str:
    shown = _shown(task_id)
    short = shown[:_SHOWN_ID_CHARACTERS]
    return f"{short}…" if short != shown else shown


def _shown(text: str) -> str:
    """Foreign text fit for one line of a log."""
    printable = "".join(c if c.isprintable() else "?" for c in text[: _SHOWN_CHARACTERS + 1])
    return printable if len(printable) <= _SHOWN_CHARACTERS else f"{printable[:-1]}…"
