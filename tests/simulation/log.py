"""The shim's log in a simulated world: kept only if somebody wants to read it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dstack_shim.log import EventLog


class SimLog(EventLog):
    """Hands each line to ``tell``, and what the core calls a fault of its own to ``broken``."""

    def __init__(
        self, tell: Callable[[str], None] | None, broken: Callable[[str], None], **fields: object
    ) -> None:
        super().__init__(logging.getLogger("simulated"), **fields)
        self._tell = tell
        self._broken = broken

    def bind(self, **fields: object) -> SimLog:
        """A log that adds ``fields`` to each event."""
        return SimLog(self._tell, self._broken, **{**self._fields, **fields})

    def fault(self, event: str, error: BaseException, **fields: object) -> None:
        """A fault of ours."""
        line = self._line(event, {**fields, "error": f"{type(error).__name__}: {error}"})
        self._broken(line)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._tell is not None:
            self._tell(self._line(event, fields))
