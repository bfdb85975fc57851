"""
The few functions that stand in for dstack's, and how they are put in place and taken out.

    ShimClient._request                          notes the documents as they come by, adds a key or two
    ShimClient._get_restart_safe_task_statuses   the gate's answer instead of dstack's
    ShimClient.is_safe_to_restart                the roll-out's word, and the reason, logged
    ShimClient.shutdown                          a refusal we asked for becomes False
    check._maybe_install_components              which instance this client was made for; the record
    check.get_dstack_shim_version                the operator's version, if there is one
    check.get_dstack_shim_download_url           and where it is

Each calls the original exactly once, first or last, outside the guard: its exceptions are dstack's
and pass; ours never do. Class attributes are replaced in place, which reaches every use (3.1).
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import attrs

from dstack_shim_server import shapes
from dstack_shim_server.extension import Extension
from dstack_shim_server.guard import shielded
from dstack_shim_server.settings import Mode
from dstack_shim_server.shapes import Place, Server

Function = Callable[..., Any]

# On each function of ours: a second load recognises it, whichever copy of this module put it there.
MARK = "__shim_restart_replaces__"

# Whether the gate had a say in the decision that is being made in a thread.
_gate = threading.local()


@attrs.define
class Patches:
    """What is in place, so that it can be taken out again."""

    _undo: list[Callable[[], None]] = attrs.Factory(list)

    def install(self, server: Server, extension: Extension) -> None:
        """Patch every place of the server, or none: a failure half-way takes out what was put."""
        try:
            for place in (*server.places.values(), *server.answers.values()):
                self.put(place, _REPLACEMENTS[place.attribute](place.function, extension))
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


def _noting_request(original: Function, extension: Extension) -> Function:
    @functools.wraps(original)
    def _request(self: Any, *args: Any, **kwargs: Any) -> Any:
        final, named = shielded(
            "amending a request",
            lambda: extension.amender.amend(self, args, kwargs),
            lambda: (args, kwargs),
        )
        response = original(self, *final, **named)
        shielded(
            "noting a shim's answer",
            lambda: extension.answered(self, args, kwargs, response),
            lambda: None,
        )
        return response

    return _request


def _gated_statuses(original: Function, extension: Extension) -> Function:
    decider = extension.decider
    observing = decider.settings.mode is not Mode.ENFORCE

    @functools.wraps(original)
    def _get_restart_safe_task_statuses(self: Any) -> Any:
        stock = original(self)
        found = shielded(
            "asking the gate", lambda: decider.safe_statuses(self, stock), lambda: None
        )
        _gate.answered = found is not None
        if found is not None or observing:
            return stock if found is None else found
        # Without the gate: what dstack calls safe, but never more than `terminated`.
        return [status for status in stock if status == "terminated"]

    return _get_restart_safe_task_statuses


def _explained_answer(original: Function, extension: Extension) -> Function:
    decider = extension.decider
    observing = decider.settings.mode is not Mode.ENFORCE

    @functools.wraps(original)
    def is_safe_to_restart(self: Any) -> Any:
        _gate.answered = False
        answer = original(self)
        idle = shielded(
            "counting tasks",
            lambda: decider.is_idle(self),
            # Without the gate no other status than `terminated` was called safe.
            lambda: not _gate.answered,
        )
        final = shielded(
            "asking the roll-out",
            lambda: extension.permits(self, answer),
            # Without the roll-out: what dstack says, as far as nothing is alive there.
            lambda: answer if observing else answer and idle,
        )
        shielded(
            "explaining a decision",
            lambda: decider.explain(self, final),
            lambda: None,
        )
        return final

    return is_safe_to_restart


def _refusable_shutdown(original: Function, extension: Extension) -> Function:
    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except Exception:
            # dstack takes any other answer than 200 for a shim that is out of order.
            if shielded(
                "reading a refusal", lambda: extension.amender.was_refused(self), lambda: False
            ):
                return False
            raise

    return shutdown


def _naming_install(original: Function, extension: Extension) -> Function:
    @functools.wraps(original)
    def _maybe_install_components(*args: Any, **kwargs: Any) -> Any:
        shielded(
            "noting an instance check",
            lambda: extension.watch.entered(args, kwargs),
            lambda: None,
        )
        try:
            return original(*args, **kwargs)
        finally:
            shielded("recording an instance check", extension.left, lambda: None)

    return _maybe_install_components


def _wanted_version(original: Function, extension: Extension) -> Function:
    @functools.wraps(original)
    def get_dstack_shim_version(*args: Any, **kwargs: Any) -> Any:
        stock = original(*args, **kwargs)
        return shielded(
            "choosing a version", lambda: extension.offers.version(stock), lambda: stock
        )

    return get_dstack_shim_version


def _download_url(original: Function, extension: Extension) -> Function:
    @functools.wraps(original)
    def get_dstack_shim_download_url(arch: Any = None, version: Any = None) -> Any:
        stock = original(arch=arch, version=version)
        return shielded(
            "choosing a download",
            lambda: extension.offers.address(stock, arch, version),
            lambda: stock,
        )

    return get_dstack_shim_download_url


_REPLACEMENTS: dict[str, Callable[[Function, Extension], Function]] = {
    shapes.REQUEST: _noting_request,
    shapes.SAFE_STATUSES: _gated_statuses,
    shapes.IS_SAFE: _explained_answer,
    shapes.SHUTDOWN: _refusable_shutdown,
    shapes.INSTALL: _naming_install,
    shapes.WANTED_VERSION: _wanted_version,
    shapes.DOWNLOAD_URL: _download_url,
}
