"""Puts the core together from its parts; what it is put together from is passed in."""

from __future__ import annotations

from pathlib import Path

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


def make_core(
    *,
    home: Path,
    boot: Boot,
    engine: Engine,
    records: Records,
    open_pull_log: OpenPullLog,
    recipe: Recipe,
    gpus: GpuLocks,
    host_keys: HostKeys,
    other_resources: tuple[Resource, ...],
    blocking: Blocking,
    clock: Clock,
    log: EventLog,
) -> Core:
    """The core over these parts: the real ones in the daemon, a simulation's in its tests."""
    book = Book(records, blocking, log)
    holdings = Holdings(book, gpus, (host_keys, *other_resources), log)
    finish = Finish(book, engine, holdings, clock, str(home), log)
    starter = Starter(
        book=book,
        engine=engine,
        holdings=holdings,
        finish=finish,
        recipe=recipe,
        open_pull_log=open_pull_log,
        blocking=blocking,
        clock=clock,
        home=str(home),
        log=log,
    )
    restorer = Restorer(
        book=book,
        engine=engine,
        records=records,
        gpus=gpus,
        gpus_of=gpus_from_details,
        confirm_keys=host_keys.confirmed,
        blocking=blocking,
        home=str(home),
        log=log,
    )
    watch = Watch(engine, clock, log)
    step = Step(
        book=book,
        engine=engine,
        finish=finish,
        watch=watch,
        adopt=restorer.adopt,
        settle_gpus=restorer.settle_gpus,
        runner_port=recipe.runner_port,
        boot=boot,
        clock=clock,
        log=log,
    )
    return Core(
        book=book,
        records=records,
        starter=starter,
        finish=finish,
        step=step,
        watch=watch,
        restorer=restorer,
        blocking=blocking,
        boot=boot,
        clock=clock,
        written_by=f"{build.IMPLEMENTATION_NAME} {build.IMPLEMENTATION_VERSION}",
        log=log,
    )
