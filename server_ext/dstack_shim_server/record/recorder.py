"""
The keeper of the record: its own thread, loop and engine, and nobody waits for it.

Instance checks leave what they saw and go on; once a second what has come together is written in one
transaction. Only a claim waits for an answer, and not for long. If the database does not answer,
what was noted waits in memory, each instance's newest check replacing the one before.
"""

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures

import attrs
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from dstack_shim_server import guard
from dstack_shim_server.choice import Choice
from dstack_shim_server.errors import RecordUnusable
from dstack_shim_server.observation import Observation
from dstack_shim_server.policy import Ruling
from dstack_shim_server.proof import Outcome
from dstack_shim_server.record import batch, claiming, database, schema, writing
from dstack_shim_server.record.batch import Snapshot, Work
from dstack_shim_server.record.notes import Batch, Notes
from dstack_shim_server.record.patience import Patience
from dstack_shim_server.record.rows import Fleet, NewRestart
from dstack_shim_server.record.tables import rollout
from dstack_shim_server.record.worker import Worker
from dstack_shim_server.record.writing import Ended
from dstack_shim_server.settings import Settings

# Seconds between transactions, and between looks at restarts that nothing is heard of.
BATCH = 1.0
LOOK = 5.0
# Seconds until the next try: doubled with each failure, up to the second.
RETRY = (1.0, 60.0)
# Seconds between countings of all rows, for figures.
COUNT = 15.0
# Seconds an instance check waits for a claim; then the shim is not restarted this time.
CLAIM = 3.0
_HOUR = 3_600.0


def _replica_name() -> str:
    return f"{socket.gethostname()[:64]}/{os.getpid()}/{uuid.uuid4().hex[:6]}"


@attrs.define
class Recorder:
    """Keeps the record of one server process. Its public methods are safe in any thread."""

    url: str = attrs.field(repr=False)
    settings: Settings
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    replica: str = attrs.Factory(_replica_name)
    notes: Notes = attrs.Factory(Notes)
    # Why the record cannot be used, "" if it can.
    trouble: str = "the record was not opened yet"
    snapshot: Snapshot = attrs.Factory(Snapshot)
    _engine: AsyncEngine = attrs.field(init=False, repr=False)
    _worker: Worker = attrs.Factory(Worker)
    _patience: Patience = attrs.Factory(Patience)
    # By this process's own clock, as all that is measured here.
    _tidied_at: float = float("-inf")
    _counted_at: float = float("-inf")
    _unknown_names: frozenset[str] = frozenset()
    _settled: bool = False
    _writing: asyncio.Lock = attrs.Factory(asyncio.Lock)

    def __attrs_post_init__(self) -> None:
        self._engine = database.open_engine(self.url)

    # For instance checks -------------------------------------------------------------------------

    def see(self, seen: Observation) -> None:
        """Leave what a check saw."""
        self.notes.see(seen)
        self._worker.wake()

    def claim(self, new: NewRestart, seen: Observation) -> Ruling:
        """
        Ask for a restart; if it is allowed, it is recorded as under way when this returns.

        Raises RecordUnusable, or `concurrent.futures.TimeoutError` if there is no answer in time, or
        what the database raised. A claim that is taken too late is withdrawn.
        """
        if self.trouble:
            raise RecordUnusable(self.trouble)
        pending = self._worker.submit(lambda: self._claim(new, seen))
        try:
            return pending.result(CLAIM)
        except futures.TimeoutError:
            # Not cancelled: nobody would know whether the row is there.
            pending.add_done_callback(lambda _: self.withdraw(new.id))
            raise

    def withdraw(self, restart_id: str) -> None:
        """Leave word that a claimed restart was not made."""
        self.notes.withdraw(restart_id)
        self._worker.wake()

    def fleet(self, fleet_id: str) -> Fleet | None:
        """Return the names of a fleet; None if they are not known yet."""
        if not fleet_id:
            return Fleet()
        return self.snapshot.fleets.get(writing.plain_id(fleet_id))

    # Its life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; the tables are made there, and nothing here waits for it."""
        self._worker.start(self._keep)

    def stop(self, timeout: float = 5.0) -> None:
        """Write what is left and end the thread."""
        self._worker.stop(timeout)

    def flush(self, timeout: float = 30.0) -> None:
        """Write now and wait for it. Raises what the database raised."""
        self._worker.submit(self._write).result(timeout)

    async def _keep(self) -> None:
        pause = RETRY[0]
        while not self._worker.ending:
            if await self._try_to_write():
                pause = RETRY[0]
                await self._worker.rest(BATCH)
                await self._worker.wait(LOOK if self.snapshot.state.under_way else None)
            else:
                await self._worker.rest(pause)
                pause = min(2 * pause, RETRY[1])
        if not self.trouble:
            await self._try_to_write()
        await self._engine.dispose()

    async def _try_to_write(self) -> bool:
        try:
            await self._write()
        except Exception as exception:  # noqa: BLE001  whatever a driver raises; it is tried again
            self._tell_trouble(exception)
            return False
        return True

    def _tell_trouble(self, exception: Exception) -> None:
        words = (str(exception).splitlines() or [""])[0]
        said = database.without_secrets(f"{type(exception).__name__}: {words}"[:400], self.url)
        if said != self.trouble:
            guard.logger.warning("shim_restart: the record waits: %s", said)
        self.trouble = said

    # Transactions --------------------------------------------------------------------------------

    async def _write(self) -> None:
        # One at a time: who waits for `flush` shall find everything written that was noted before.
        async with self._writing:
            for one in await self._write_batch():
                _tell(one)

    async def _write_batch(self) -> Sequence[Ended]:
        database.require_there(self.url)
        if self.trouble or not self._settled:
            await schema.ensure(self._engine)
        taken = self.notes.take()
        try:
            async with self._engine.begin() as connection:
                await self._settle(connection)
                snapshot, ended = await batch.write(connection, self._work(taken))
        except BaseException:
            self.notes.put_back(taken)
            raise
        self._settled = True
        self._publish(snapshot)
        return ended

    async def _settle(self, connection: AsyncConnection) -> None:
        """First say that we are there and what we want installed; later keep the record tidy."""
        now = self.clock()
        if not self._settled:
            # This process was loaded last, so what it wants counts from now on.
            chosen = self.settings.choice.document()
            await connection.execute(
                update(rollout).values(choice=chosen, choice_at=now, choice_by=self.replica)
            )
        if self.monotonic() - self._tidied_at < _HOUR:
            return
        said = repr(attrs.evolve(self.settings, choice=Choice()))
        await writing.write_replica(connection, self.replica, said, now)
        await writing.forget_old(connection, self.settings.retention_days, now)
        self._tidied_at = self.monotonic()

    def _publish(self, snapshot: Snapshot) -> None:
        before, self.snapshot = self.snapshot, snapshot
        if before.choice_by != snapshot.choice_by and self._yields(snapshot):
            guard.logger.warning(
                "shim_restart: the choice of a shim yields to that of another server, loaded "
                "later: %s",
                snapshot.choice_by,
            )
        self._patience.look(snapshot, self.monotonic())
        self._tell_unknown_names(snapshot)
        if self.trouble:
            self.trouble = ""
            guard.logger.info("shim_restart: the record is in use")

    def _tell_unknown_names(self, snapshot: Snapshot) -> None:
        """A fleet that is called by a wrong name is neither held nor given its own shim."""
        known = {fleet.name for fleet in snapshot.fleets.values()}
        known |= {f"{fleet.project}/{fleet.name}" for fleet in snapshot.fleets.values()}
        named = self.settings.policy.hold_fleets | self.settings.choice.fleets.keys()
        unknown = named - known if snapshot.fleets else frozenset[str]()
        if unknown - self._unknown_names:
            guard.logger.warning(
                "shim_restart: no fleet is called %s, as the settings have it",
                " or ".join(sorted(unknown)),
            )
        self._unknown_names = frozenset(unknown)

    def _yields(self, snapshot: Snapshot) -> bool:
        return snapshot.choice != self.settings.choice.document()

    async def _claim(self, new: NewRestart, seen: Observation) -> Ruling:
        fleet = self.fleet(seen.subject.fleet_id) or Fleet()
        async with self._engine.begin() as connection:
            await schema.require_current(connection)
            claimed = await claiming.claim(
                connection, new, fleet, self.settings.policy, self.replica, self.clock()
            )
            await writing.write_instances(connection, [seen], self.snapshot.fleets)
        self.snapshot = attrs.evolve(self.snapshot, state=claimed.state)
        return claimed.ruling

    def _work(self, taken: Batch) -> Work:
        now = self.monotonic()
        count_anew = now - self._counted_at >= COUNT
        if count_anew:
            self._counted_at = now
        return Work(
            batch=taken,
            replica=self.replica,
            failures=self.settings.failures,
            fleets=self.snapshot.fleets,
            reasons=self.notes.reasons(),
            overdue=self._patience.overdue(now, self.settings.return_within),
            silent=self._patience.silent(now, self.settings.return_within),
            now=self.clock(),
            before=self.snapshot,
            count_anew=count_anew,
        )


def _tell(ended: Ended) -> None:
    restart, found = ended.restart, ended.proof
    fine = found.outcome in {Outcome.CONFIRMED, Outcome.WITHDRAWN}
    log = guard.logger.info if fine else guard.logger.error
    log(
        "shim_restart: instance %s: restart from %s to %s: %s: %s",
        *(restart.instance, restart.from_version, restart.to_version),
        *(found.outcome.value if found.outcome else "open", found.why),
    )
    if ended.stops_version:
        guard.logger.error(
            "shim_restart: version %s is not rolled out any further until an operator says "
            "`dstack-shim-fleet release %s`",
            *(restart.to_version, restart.to_version),
        )
