"""
What one ShimClient saw on the wire, kept for as long as the client lives and for nobody else.

The instance check makes a new client for each check and asks it for the healthcheck, the task list
and the components; dstack's models drop the keys they do not know, so the bodies are taken from
under them. Nothing is parsed before a decision or the record needs it.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import attrs
from dstack_shim_contracts.gate import Decision, Verdict

from dstack_shim_server.observation import LONGEST, Subject

HEALTHCHECK = "/api/healthcheck"
COMPONENTS = "/api/components"
TASKS = "/api/tasks"
SHUTDOWN = "/api/shutdown"
INSTALL = "/api/components/install"

_WATCHED = frozenset({HEALTHCHECK, COMPONENTS, TASKS})

# Seconds a body may have been waiting for the decision. A check takes milliseconds; even with every
# request at dstack's 9 s timeout it takes under a minute. Older means: not this check.
MAX_AGE = 60.0
# A body longer than this is no shim's: it is not parsed a second time (dstack did it once).
MAX_BODY = 1 << 20


@attrs.frozen
class Body:
    """An answer as it came, and when (seconds of the monotonic clock)."""

    content: bytes = attrs.field(repr=False)
    at: float


@attrs.frozen
class Unusable:
    """In place of a document: why there is none."""

    why: str


@attrs.define
class Sightings:
    """The bodies one client received, newest for each path, and the instance it was made for."""

    subject: Subject | None = None
    bodies: dict[str, Body] = attrs.Factory(dict)
    # The task list before this call of the install function: it says nothing about a decision in it.
    listed: Body | None = None
    # Between the patched functions of one decision: what the gate said, until it is explained.
    verdict: Verdict | None = None
    # Why the roll-out does not allow what the gate calls safe.
    held: str = ""
    # What came of it, for the record: dstack's answer, the sentence and what was in the way.
    answer: bool | None = None
    sentence: str = ""
    decision: Decision | None = None
    # The version dstack was told to want, and what the offer says of the file.
    wanted: str = ""
    sha256: str = ""
    # The restart that was claimed for this check, and how its shutdown was answered.
    claim: str = ""
    shutdown_asked: bool = False
    shutdown_status: int = 0
    # The shutdown was made conditional, and what the shim said if it refused.
    guarded: bool = False
    refusal: bytes = b""

    @property
    def instance(self) -> tuple[str, str] | None:
        """Id and name of the instance; None outside a check."""
        return None if self.subject is None else (self.subject.id, self.subject.name)

    def document(self, path: str, now: float) -> object:
        """Parse the body seen at `path`; an Unusable says why there is nothing to go by."""
        return self._parsed(self.bodies.get(path), path, now)

    def newest_tasks(self, now: float) -> object:
        """Parse the newest task list of this check, whether a decision was based on it or not."""
        return self._parsed(self.bodies.get(TASKS) or self.listed, TASKS, now)

    def _parsed(self, body: Body | None, path: str, now: float) -> object:
        if body is None:
            return Unusable(f"{path} was not seen in this check")
        age = now - body.at
        if not 0 <= age <= MAX_AGE:
            return Unusable(f"{path} was seen {age:.0f} s ago")
        if len(body.content) > MAX_BODY:
            return Unusable(f"{path} answered {len(body.content)} bytes")
        try:
            return json.loads(body.content)
        except (ValueError, RecursionError):
            return Unusable(f"{path} did not answer JSON")


@attrs.define
class Watch:
    """All clients' sightings. A client that is gone takes its sightings along."""

    clock: Callable[[], float] = time.monotonic
    # Weak keys and no attribute on dstack's object: a copied client inherits nothing, a finished
    # one leaks nothing. A client is used by one thread; different keys do not disturb each other.
    _by_client: WeakKeyDictionary[object, Sightings] = attrs.Factory(WeakKeyDictionary)
    # Whose check runs in this thread: some of dstack's functions are not told.
    _current: threading.local = attrs.Factory(threading.local)

    def of(self, client: object) -> Sightings:
        """Return what this client saw, and nobody else."""
        found = self._by_client.get(client)
        if found is None:
            found = self._by_client[client] = Sightings()
        return found

    def answered(
        self,
        client: object,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        response: object,
    ) -> None:
        """Take note of a finished `ShimClient._request(method, path, …)`; most are none of ours."""
        method, path = method_and_path(args, kwargs)
        if method == "POST" and path == SHUTDOWN:
            sightings = self.of(client)
            sightings.shutdown_status = getattr(response, "status_code", 0)
            sightings.refusal = getattr(response, "content", b"")
        if method != "GET" or path not in _WATCHED:
            return
        bodies = self.of(client).bodies
        # An answer that is an error replaces the document before it: that one is no longer so.
        bodies.pop(path, None)
        content = getattr(response, "content", None)
        if getattr(response, "status_code", None) == 200 and isinstance(content, bytes):
            bodies[path] = Body(content, self.clock())

    def entered(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """
        Take note of `_maybe_install_components(instance, shim_client)` being entered.

        The components and tasks of an earlier call say nothing about this one.
        """
        instance, client = _instance_and_client(args, kwargs)
        sightings = self.of(client)
        sightings.subject = _subject(instance)
        sightings.bodies.pop(COMPONENTS, None)
        sightings.listed = sightings.bodies.pop(TASKS, None)
        self._current.sightings = sightings

    def left(self) -> Sightings | None:
        """Take note of the install function being left; what was seen until then is returned."""
        sightings, self._current.sightings = self.current(), None
        return sightings

    def current(self) -> Sightings | None:
        """Return the sightings of the check that is in the install function in this thread."""
        found: Sightings | None = getattr(self._current, "sightings", None)
        return found


def _subject(instance: object) -> Subject:
    # What is loaded and no more: anything else would ask the database in the middle of a check.
    loaded: Mapping[str, Any] = vars(instance)
    jobs = loaded.get("jobs")
    return Subject(
        id=str(loaded.get("id", ""))[:64],
        name=str(loaded.get("name", ""))[:LONGEST],
        fleet_id=str(loaded.get("fleet_id") or ""),
        jobs=None if jobs is None else frozenset(str(job.id) for job in jobs),
    )


def method_and_path(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[object, str]:
    """Return what `ShimClient._request(method, path, …)` was asked for."""
    method = args[0] if args else kwargs.get("method")
    path = args[1] if len(args) > 1 else kwargs.get("path")
    return method, path if isinstance(path, str) else ""


def _instance_and_client(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, object]:
    # The first parameter is called `instance` in one release and `instance_model` in another.
    instance = args[0] if args else kwargs.get("instance", kwargs.get("instance_model"))
    client = args[1] if len(args) > 1 else kwargs["shim_client"]
    return instance, client
