"""What a start on this home would do, told without doing it.

Nothing is changed, locked or bound, so it may be asked beside a running shim, and of a file that
is to take its place: what it would keep is what that file would restore. Only commands import
this (:mod:`dstack_shim.console.doctor`, :mod:`dstack_shim.check`); the daemon never does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Protocol, TypeVar

import attrs
from dstack_shim_contracts.upgrade import UpgradeState

from dstack_shim.clock import SystemClock
from dstack_shim.engine.protocol import Engine
from dstack_shim.errors import EngineError, StartupError, StoreError
from dstack_shim.home import check_home, holder
from dstack_shim.instance import this_boot
from dstack_shim.log import LOGGER_NAME, EventLog
from dstack_shim.records import RecordKind
from dstack_shim.resources.host_keys import HostKeys
from dstack_shim.settings import Settings
from dstack_shim.store import Store
from dstack_shim.tasks.outcomes import Boot, what_to_do
from dstack_shim.tasks.recovery import Plan
from dstack_shim.tasks.survey import Survey, survey
from dstack_shim.upgrade_state import UpgradeFile

PATIENCE = 10.0
"""Seconds the engine gets to answer."""

T = TypeVar("T")


class Level(IntEnum):
    """How a finding stands; the worst is the exit code."""

    OK = 0
    WARNING = 1
    """Damaged, left alone or noticed: somebody should look, the shim serves all the same."""
    BROKEN = 2
    """It keeps the shim from serving or starting, or the doctor from telling."""


class Judged(Protocol):
    """Whatever stands in one of the levels."""

    @property
    def level(self) -> Level:
        """How it stands."""


def worst(found: Iterable[Judged]) -> Level:
    """The level of the worst of all; OK for none."""
    return max((one.level for one in found), default=Level.OK)


@attrs.frozen
class Finding:
    """One thing looked at, and what is to be said of it."""

    level: Level
    what: str
    words: str


@attrs.frozen
class KeptTask:
    """One task that a start would know again, and what its first background step would do."""

    id: str
    status: str
    container_id: str
    why: str
    next: str


@attrs.frozen
class Examination:
    """All there is to tell of one host. ``plan`` is None where nobody can tell."""

    findings: tuple[Finding, ...]
    plan: Plan | None = None
    kept: tuple[KeptTask, ...] = ()


async def examine(settings: Settings, engine: Engine) -> Examination:
    """Look at the home, the engine and the host as a daemon with ``settings`` would."""
    notes = Notes()
    try:
        home = check_home(settings.home())
        runs = holder(home)
    except StartupError as error:
        return Examination((Finding(Level.BROKEN, "home", str(error)),))
    of_home = Finding(
        Level.OK, "home", f"{home}, {f'where a shim runs (pid {runs})' if runs else 'unused'}"
    )
    of_engine = await _ask_engine(engine)
    if of_engine.level is not Level.OK:
        return Examination((of_home, of_engine))
    boot = this_boot()
    store, host_keys = Store(home, notes), HostKeys(at_once, notes)
    try:
        seen = await survey(store, engine, host_keys.confirmed, at_once, str(home), notes)
        old_damage = store.set_aside_before()
    except (EngineError, StoreError) as error:
        return Examination((of_home, of_engine, Finding(Level.BROKEN, "tasks", str(error))))
    plan = seen.plan()
    findings = (
        *(of_home, of_engine, _of_boot(boot)),
        *_of_plan(plan),
        *_of_unreadable(plan, seen),
        *(Finding(Level.WARNING, f"record {name}", "damaged, set aside") for name in old_damage),
        *_of_upgrades(UpgradeFile(home, notes).read()),
        *notes.findings,
    )
    return Examination(findings, plan, _kept(plan, seen, boot))


async def _ask_engine(engine: Engine) -> Finding:
    try:
        info = await asyncio.wait_for(engine.ping(), PATIENCE)
    except asyncio.TimeoutError:
        return Finding(Level.BROKEN, "engine", f"no answer within {PATIENCE:g} s")
    except EngineError as error:
        return Finding(Level.BROKEN, "engine", str(error))
    return Finding(Level.OK, "engine", f"Docker Engine {info.version}, API {info.api_version}")


def _of_boot(boot: Boot) -> Finding:
    words = boot.id or "its id cannot be read: a reboot will look like a restart"
    return Finding(Level.OK if boot.id else Level.WARNING, "boot", words)


def _of_plan(plan: Plan) -> Iterator[Finding]:
    for damaged in plan.set_aside:
        yield Finding(Level.WARNING, f"record in {damaged.dir}", f"damaged: {damaged.why}")
    for left in plan.leave:
        yield Finding(Level.WARNING, left.what, left.why)
    owner_of: dict[str, str] = {}
    for item in plan.restore:
        for gpu in item.gpus or ():
            owner = owner_of.setdefault(gpu, item.task.id)
            if owner != item.task.id:
                words = f"task {owner} keeps it, task {item.task.id} claims it too"
                yield Finding(Level.WARNING, f"GPU {gpu}", words)


def _of_upgrades(state: UpgradeState) -> Iterator[Finding]:
    last = state.last
    if last is not None:
        told = last.told()
        words = f"{told.from_version} to {told.to_version}: {told.outcome}"
        level = Level.WARNING if state.is_unfit(last.new) else Level.OK
        yield Finding(level, "upgrade", f"{words}, {told.reason}" if told.reason else words)


def _of_unreadable(plan: Plan, seen: Survey) -> Iterator[Finding]:
    """Records of a task that goes on without its record; the others are left alone by plan."""
    claimed = {item.task.dir for item in plan.restore}
    for found in seen.found:
        if found.kind is RecordKind.UNREADABLE and found.name in claimed:
            yield Finding(Level.WARNING, f"record in {found.name}", f"not used: {found.problem}")


def _kept(plan: Plan, seen: Survey, boot: Boot) -> tuple[KeptTask, ...]:
    containers = {container.id: container for container in seen.containers}
    now = SystemClock().now()
    return tuple(
        KeptTask(
            id=item.task.id,
            status=item.task.status.value,
            container_id=item.task.container_id,
            why=item.why,
            next=what_to_do(item.task, containers.get(item.task.container_id), now, boot).value,
        )
        for item in plan.restore
    )


class Notes(EventLog):
    """Takes down as findings what a daemon that looks would log as a warning or an error."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger(LOGGER_NAME))
        self.findings: list[Finding] = []

    def debug(self, event: str, **fields: object) -> None:
        """Not worth a finding."""

    def info(self, event: str, **fields: object) -> None:
        """Not worth a finding."""

    def warning(self, event: str, **fields: object) -> None:
        """A finding."""
        words = ", ".join(f"{key} {value}" for key, value in fields.items())
        self.findings.append(Finding(Level.WARNING, event, words))

    error = warning


async def at_once(call: Callable[..., T], /, *args: object) -> T:
    """A blocking call where it is: nobody else is waiting for a command's event loop."""
    return call(*args)
