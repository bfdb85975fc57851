"""
The few functions that stand in for dstack's, and how they are put in place and taken out.

    ShimClient._request                          notes the three documents as they come by
    ShimClient._get_restart_safe_task_statuses   the gate's answer instead of dstack's
    ShimClient.is_safe_to_restart                the reason, logged; the answer untouched
    check._maybe_install_components              which instance this client was made for

Each calls the original exactly once, first or last, outside the guard: its exceptions are dstack's
and pass; ours never do. Class attributes are replaced in place, which reaches every use (3.1).
"""

import functools
from collections.abc import Callable
from typing import Any

import attrs

from dstack_shim_server import shapes
from dstack_shim_server.decisions import Decider
from dstack_shim_server.guard import shielded
from dstack_shim_server.settings import Mode
from dstack_shim_server.shapes import Place, Server
from dstack_shim_server.sightings import Watch

Function = Callable[..., Any]

# On each function of ours: a second load recognises it, whichever copy of this module put it there.
MARK = "__shim_restart_replaces__"


@attrs.define
class Patches:
    """What is in place, so that it can be taken out again."""

    _undo: list[Callable[[], None]] = attrs.Factory(list)

    def install(self, server: Server, decider: Decider) -> None:
        """Patch every place of the server, or none: a failure half-way takes out what was put."""
        try:
            for place in server.places.values():
                self.put(place, _replacement(place, decider))
        except BaseException:
            self.take_out()
            raise

    def put(self, place: Place, replacement: Function) -> None:
        """Replace the function at a place."""
        setattr(replacement, MARK, True)
        if place.attribute in vars(place.holder):
            undo = functools.partial(setattr, place.holder, place.attribute, place.function)
        else:  # inherited: the original is still where it was
            undo = functools.partial(delattr, place.holder, place.attribute)
        setattr(place.holder, place.attribute, replacement)
        self._undo.append(undo)

    def take_out(self) -> None:
        """Put dstack's own functions back; twice is fine."""
        while self._undo:
            self._undo.pop()()


def in_place(server: Server) -> bool:
    """Say whether some load before this one has patched the server already."""
    return any(hasattr(place.function, MARK) for place in server.places.values())


def _replacement(place: Place, decider: Decider) -> Function:
    if place.attribute == shapes.REQUEST:
        return _noting_request(place.function, decider.watch)
    if place.attribute == shapes.SAFE_STATUSES:
        return _gated_statuses(place.function, decider)
    if place.attribute == shapes.IS_SAFE:
        return _explained_answer(place.function, decider)
    return _naming_install(place.function, decider.watch)


def _noting_request(original: Function, watch: Watch) -> Function:
    @functools.wraps(original)
    def _request(self: Any, *args: Any, **kwargs: Any) -> Any:
        response = original(self, *args, **kwargs)
        shielded(
            "noting a shim's answer",
            lambda: watch.answered(self, args, kwargs, response),
            lambda: None,
        )
        return response

    return _request


def _gated_statuses(original: Function, decider: Decider) -> Function:
    observing = decider.settings.mode is not Mode.ENFORCE

    @functools.wraps(original)
    def _get_restart_safe_task_statuses(self: Any) -> Any:
        stock = original(self)
        return shielded(
            "asking the gate",
            lambda: decider.safe_statuses(self, stock),
            # Without the gate: what dstack calls safe, but never more than `terminated`.
            lambda: stock if observing else [s for s in stock if s == "terminated"],
        )

    return _get_restart_safe_task_statuses


def _explained_answer(original: Function, decider: Decider) -> Function:
    @functools.wraps(original)
    def is_safe_to_restart(self: Any) -> Any:
        answer = original(self)
        shielded(
            "explaining a decision",
            lambda: decider.explain(self, answer),
            lambda: None,
        )
        return answer

    return is_safe_to_restart


def _naming_install(original: Function, watch: Watch) -> Function:
    @functools.wraps(original)
    def _maybe_install_components(*args: Any, **kwargs: Any) -> Any:
        shielded(
            "noting an instance check",
            lambda: watch.entered(args, kwargs),
            lambda: None,
        )
        return original(*args, **kwargs)

    return _maybe_install_components
