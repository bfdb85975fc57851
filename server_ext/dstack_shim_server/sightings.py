"""
What one ShimClient saw on the wire, kept for as long as the client lives and for nobody else.

The instance check makes a new client for each check and asks it for the healthcheck, the task list
and the components; dstack's models drop the keys they do not know, so the bodies are taken from
under them. Nothing is parsed before a decision needs it: most checks never come to one.
"""

import json
import time
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import attrs
from dstack_shim_contracts.gate import Verdict

HEALTHCHECK = "/api/healthcheck"
COMPONENTS = "/api/components"
TASKS = "/api/tasks"

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

    instance: tuple[str, str] | None = None  # id and name
    bodies: dict[str, Body] = attrs.Factory(dict)
    # Between the patched functions of one decision: what the gate said, until it is explained.
    verdict: Verdict | None = None

    def document(self, path: str, now: float) -> object:
        """Parse the body seen at `path`; an Unusable says why there is nothing to go by."""
        body = self.bodies.get(path)
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
        method, path = _method_and_path(args, kwargs)
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
        sightings.instance = (
            str(getattr(instance, "id", "")),
            str(getattr(instance, "name", "")),
        )
        sightings.bodies.pop(COMPONENTS, None)
        sightings.bodies.pop(TASKS, None)


def _method_and_path(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[object, str]:
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
