"""How long restarts have been under way, by the clock of this process alone.

Times in the record are of several machines and of clocks that are set; no step of one may end a
restart early. What is measured here begins anew with each process, which only takes longer.
"""

import attrs

from dstack_shim_server.record.batch import Snapshot


@attrs.define
class _Watched:
    """A restart under way: since when it is known, and when its instance was last seen to move."""

    since: float
    seen_at: float | None
    moved_at: float


@attrs.define
class Patience:
    """Watches restarts from one look at the record to the next; seconds of a monotonic clock."""

    _watched: dict[str, _Watched] = attrs.Factory(dict)

    def look(self, snapshot: Snapshot, now: float) -> None:
        """Take note of what is under way."""
        before, self._watched = self._watched, {}
        for restart in snapshot.state.under_way:
            seen_at = snapshot.last_seen.get(restart.restart_id)
            watched = before.get(restart.restart_id) or _Watched(now, seen_at, now)
            if watched.seen_at != seen_at:
                watched.seen_at, watched.moved_at = seen_at, now
            self._watched[restart.restart_id] = watched

    def overdue(self, now: float, limit: float) -> frozenset[str]:
        """Return the restarts known for longer than this."""
        return frozenset(
            restart_id for restart_id, one in self._watched.items() if now - one.since > limit
        )

    def silent(self, now: float, limit: float) -> frozenset[str]:
        """Return the restarts whose instance no server has seen for longer than this."""
        return frozenset(
            restart_id for restart_id, one in self._watched.items() if now - one.moved_at > limit
        )
