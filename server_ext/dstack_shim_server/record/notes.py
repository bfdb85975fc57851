"""What instance checks leave for the record's thread, until that comes for it."""

import threading
from collections import OrderedDict

import attrs

from dstack_shim_server.observation import Observation
from dstack_shim_server.record.rows import NewRestart

# Reasons of ended tasks remembered.
REMEMBERED = 10_000


@attrs.define
class Batch:
    """What checks noted; of each instance only the newest."""

    seen: dict[str, Observation] = attrs.Factory(dict)
    restarts: dict[str, NewRestart] = attrs.Factory(dict)
    withdrawn: set[str] = attrs.Factory(set)

    def join_newer(self, newer: "Batch") -> None:
        """Add what was noted after this one."""
        self.seen |= newer.seen
        self.restarts |= newer.restarts
        self.withdrawn |= newer.withdrawn


@attrs.define
class Notes:
    """A batch that grows until it is taken, and why tasks ended. Safe in any thread."""

    _batch: Batch = attrs.Factory(Batch)
    _reasons: OrderedDict[str, str] = attrs.Factory(OrderedDict)
    _lock: threading.Lock = attrs.Factory(threading.Lock)

    def see(self, seen: Observation) -> None:
        """Leave what a check saw."""
        with self._lock:
            self._batch.seen[seen.subject.id] = seen

    def restarted(self, new: NewRestart) -> None:
        """Leave word of a restart that was made without a claim."""
        with self._lock:
            self._batch.restarts[new.id] = new

    def withdraw(self, restart_id: str) -> None:
        """Leave word that a claimed restart was not made."""
        with self._lock:
            self._batch.withdrawn.add(restart_id)

    def told(self, task_id: str, reason: str) -> None:
        """Leave word why a task ended; the first reason counts, as it does with shims."""
        with self._lock:
            self._reasons.setdefault(task_id, reason)
            while len(self._reasons) > REMEMBERED:
                self._reasons.popitem(last=False)

    def reasons(self) -> dict[str, str]:
        """Return why tasks ended, by task."""
        with self._lock:
            return dict(self._reasons)

    def reason_of(self, task_id: str) -> str:
        """Return why a task ended, "" if nobody was told."""
        with self._lock:
            return self._reasons.get(task_id, "")

    def take(self) -> Batch:
        """Take what was left."""
        with self._lock:
            taken, self._batch = self._batch, Batch()
        return taken

    def put_back(self, taken: Batch) -> None:
        """Leave it again: it could not be written."""
        with self._lock:
            taken.join_newer(self._batch)
            self._batch = taken
