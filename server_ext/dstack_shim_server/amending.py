"""
What is added to dstack's own requests: a condition to a shutdown, a digest to an install.

Only shims that say they know such a key are given one; no request is added.
"""

import json
from collections.abc import Mapping
from typing import Any

import attrs
from dstack_shim_contracts.api import SHIM
from dstack_shim_contracts.features import GUARDED_SHUTDOWN

from dstack_shim_server.journal import Journal
from dstack_shim_server.observation import features_of
from dstack_shim_server.settings import Mode, Settings
from dstack_shim_server.sightings import (
    HEALTHCHECK,
    INSTALL,
    SHUTDOWN,
    Sightings,
    Watch,
    method_and_path,
)

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
REFUSED = 409


@attrs.frozen
class Amended:
    """A request body of dstack's with some keys more; both generations of its models ask for one."""

    body: Any
    more: Mapping[str, Any]

    def dict(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Return the keys as models of pydantic 1 do."""
        return {**self.body.dict(*args, **kwargs), **self.more}

    def model_dump(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Return the keys as models of pydantic 2 do."""
        return {**self.body.model_dump(*args, **kwargs), **self.more}


@attrs.frozen
class Amender:
    """Amends requests of the instance check, and knows what came of it. Thread-safe."""

    settings: Settings
    watch: Watch
    journal: Journal

    def amend(self, client: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a `ShimClient._request` as they are to be."""
        method, path = method_and_path(args, kwargs)
        if method != "POST" or self.settings.mode is not Mode.ENFORCE:
            return args, kwargs
        if path == SHUTDOWN:
            self.watch.of(client).shutdown_asked = True
            return self._guard(self.watch.of(client), args, kwargs)
        if path == INSTALL:
            return self._add_digest(self.watch.of(client), args, kwargs)
        return args, kwargs

    def was_refused(self, client: object) -> bool:
        """Say whether the shim refused a shutdown that we had made conditional, and log why."""
        sightings = self.watch.of(client)
        if not sightings.guarded or sightings.shutdown_status != REFUSED:
            return False
        words = refusal_words(sightings.refusal)
        self.journal.note(sightings.instance, f"not now: the shim refused: {words}")
        return True

    def _guard(
        self, sightings: Sightings, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Arguments:
        if GUARDED_SHUTDOWN not in self._features(sightings):
            return args, kwargs
        sightings.guarded = True
        return _with_more(args, kwargs, {"only_if_safe": True})

    def _add_digest(
        self, sightings: Sightings, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Arguments:
        name = getattr(_body(args, kwargs), "name", None)
        if getattr(name, "value", name) != SHIM or not sightings.sha256:
            return args, kwargs
        # A shim that lists features is of our kind; dstack's own has no such key.
        if not self._features(sightings):
            return args, kwargs
        return _with_more(args, kwargs, {"sha256": sightings.sha256})

    def _features(self, sightings: Sightings) -> tuple[str, ...]:
        return features_of(sightings.document(HEALTHCHECK, self.watch.clock())) or ()


def refusal_words(content: object) -> str:
    """Read why a shim refused, whatever it answered."""
    try:
        document = json.loads(content if isinstance(content, bytes) else b"")
        return ", ".join(str(item["why"]) for item in document["in_the_way"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "it did not say why"


def _body(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[2] if len(args) > 2 else kwargs.get("body")


def _with_more(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], more: Mapping[str, Any]
) -> Arguments:
    amended = Amended(_body(args, kwargs), more)
    if len(args) > 2:
        return (*args[:2], amended, *args[3:]), kwargs
    return args, {**kwargs, "body": amended}
