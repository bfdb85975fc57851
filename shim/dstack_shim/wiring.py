"""Puts the core together from its parts; what it is put together from is passed in."""

from __future__ import annotations

from pathlib import Path

import attrs

from dstack_shim import build
from dstack_shim.clock import Clock
from dstack_shim.engine.container import gpus_from_details
from dstack_shim.engine.protocol import Engine
from dstack_shim.log import EventLog
from dstack_shim.records import Records
from dstack_shim.resources.gpus import GpuLocks
from dstack_shim.resources.host_keys import HostKeys
from dstack_shim.resources.protocol import Blocking
from dstack_shim.tasks.book import Book
from dstack_shim.tasks.core import Core
from dstack_shim.tasks.finish import Finish
from dstack_shim.tasks.holdings import Holdings, Resource
from dstack_shim.tasks.outcomes import Boot
from dstack_shim.tasks.restore import Restorer
from dstack_shim.tasks.start import OpenPullLog, Recipe, Starter
from dstack_shim.tasks.step import Step
from dstack_shim.tasks.watch import Watch


@attrs.frozen(kw_only=True)
class Parts:
    """What a core is put together from: the real ones in the daemon, a simulation's in its tests."""

    home: Path
    boot: Boot
    engine: Engine
    records: Records
    open_pull_log: OpenPullLog
    recipe: Recipe
    gpus: GpuLocks
    host_keys: HostKeys
    other_resources: tuple[Resource, ...]
    blocking: Blocking
    clock: Clock
    log: EventLog


def make_core(parts: Parts) -> Core:
    """The core over these parts."""
    book = Book(parts.records, parts.blocking, parts.log)
    holdings = Holdings(book, parts.gpus, (parts.host_keys, *parts.other_resources), parts.log)
    finish = Finish(book, parts.engine, holdings, parts.clock, str(parts.home), parts.log)
    restorer = _make_restorer(parts, book)
    watch = Watch(parts.engine, parts.clock, parts.log)
    return Core(
        book=book,
        records=parts.records,
        starter=_make_starter(parts, book, holdings, finish),
        finish=finish,
        step=_make_step(parts, book, finish, watch, restorer),
        watch=watch,
        restorer=restorer,
        blocking=parts.blocking,
        boot=parts.boot,
        clock=parts.clock,
        written_by=f"{build.IMPLEMENTATION_NAME} {build.IMPLEMENTATION_VERSION}",
        log=parts.log,
    )


def _make_starter(parts: Parts, book: Book, holdings: Holdings, finish: Finish) -> Starter:
    return Starter(
        book=book,
        engine=parts.engine,
        holdings=holdings,
        finish=finish,
        recipe=parts.recipe,
        open_pull_log=parts.open_pull_log,
        blocking=parts.blocking,
        clock=parts.clock,
        home=str(parts.home),
        log=parts.log,
    )


def _make_restorer(parts: Parts, book: Book) -> Restorer:
    return Restorer(
        book=book,
        engine=parts.engine,
        records=parts.records,
        gpus=parts.gpus,
        gpus_of=gpus_from_details,
        confirm_keys=parts.host_keys.confirmed,
        blocking=parts.blocking,
        home=str(parts.home),
        log=parts.log,
    )


def _make_step(parts: Parts, book: Book, finish: Finish, watch: Watch, restorer: Restorer) -> Step:
    return Step(
        book=book,
        engine=parts.engine,
        finish=finish,
        watch=watch,
        adopt=restorer.adopt,
        settle_gpus=restorer.settle_gpus,
        runner_port=parts.recipe.runner_port,
        boot=parts.boot,
        clock=parts.clock,
        log=parts.log,
    )
