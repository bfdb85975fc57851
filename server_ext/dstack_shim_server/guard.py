"""
The one wall between our code and dstack's: whatever we raise stops here.

An exception out of a patched function would mark the instance unreachable or stop its checks for
half a minute, so every call from a patched function into ours goes through `shielded`.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

# dstack's server logs only what is below the name "dstack" at the operator's level, everything else
# at ERROR; "dstack.plugins" is where its own plugins' loggers live.
logger = logging.getLogger("dstack.plugins.shim_restart")

_REPORTED_LIMIT = 100
_reported: set[tuple[str, str]] = set()
_lock = threading.Lock()


def shielded(what: str, action: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """
    Do `action`; if it raises anything, report it and answer with `otherwise` instead.

    `otherwise` is written where it is passed, from builtins alone, so that it cannot fail for the
    reason `action` did.
    """
    try:
        return action()
    except Exception as exception:  # noqa: BLE001  the wall: nothing of ours may pass
        with suppress(Exception):  # if words fail us too, dstack must go on all the same
            _report(what, exception)
        return otherwise()


def _report(what: str, exception: Exception) -> None:
    """Log a failure with its traceback, each kind once: checks repeat every few seconds."""
    kind = (what, type(exception).__name__)
    with _lock:
        if kind in _reported or len(_reported) >= _REPORTED_LIMIT:
            return
        _reported.add(kind)
    logger.error(
        "shim_restart: failed while %s; dstack goes on without it (reported once)",
        what,
        exc_info=exception,
    )
