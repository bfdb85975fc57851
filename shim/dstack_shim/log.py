"""One line an event: a time, a level, a stable event name, ``key=value`` fields.

The event names are part of what operators may rely on (they grep and alert on them); the
fields carry ids and numbers, never credentials and never key material.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from pathlib import Path

from dstack_shim.errors import UsageError

LOGGER_NAME = "dstack_shim"
TRACE = 5
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@%+*=-]+")

# Names and digits are those of dstack's own shim (it takes logrus levels, 0 = panic excluded).
_LEVELS = {
    "fatal": logging.CRITICAL,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": TRACE,
    "1": logging.CRITICAL,
    "2": logging.ERROR,
    "3": logging.WARNING,
    "4": logging.INFO,
    "5": logging.DEBUG,
    "6": TRACE,
}


def parse_level(flag: str, text: str) -> int:
    """Read a log level given by name (any case) or by one digit 1–6.

    :raises UsageError: anything else; the text names ``flag``.
    """
    level = _LEVELS.get(text.lower())
    if level is None:
        raise UsageError(
            f"{flag}: {text!r} is not a log level; expected one of fatal, error, warn, warning, "
            "info, debug, trace or a digit 1-6"
        )
    return level


class EventLog:
    """Writes events; ``bind`` adds fields that every later event carries."""

    def __init__(self, logger: logging.Logger, **fields: object) -> None:
        self._logger = logger
        self._fields = fields

    def bind(self, **fields: object) -> EventLog:
        """A log that adds ``fields`` to each event."""
        return EventLog(self._logger, **{**self._fields, **fields})

    def debug(self, event: str, **fields: object) -> None:
        """Something that happens all the time."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Something that changed."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something an operator may want to look at."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Something that went wrong."""
        self._write(logging.ERROR, event, fields)

    def fault(self, event: str, error: BaseException, **fields: object) -> None:
        """A fault of ours: the trace goes with it, in the same line."""
        self._logger.error(
            self._line(event, {**fields, "error": f"{type(error).__name__}: {error}"}),
            exc_info=error,
        )

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", self._line(event, fields))

    def _line(self, event: str, fields: dict[str, object]) -> str:
        everything = {**self._fields, **fields}
        return " ".join([event, *(f"{key}={_value(value)}" for key, value in everything.items())])


def _value(value: object) -> str:
    """Text as it is where that is unambiguous, else JSON: a line break must not forge a line."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, (list, tuple, set, frozenset)):
        value = ",".join(str(item) for item in value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # One event is one line, its trace too: `grep event` must show all of it.
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {record.getMessage()}"
        if record.exc_info:
            line += " trace=" + json.dumps(self.formatException(record.exc_info))
        return line.replace("\n", " ")


def open_log(level: int, file: Path | None) -> EventLog:
    """Send events of ``level`` and above to stderr and, appended, to ``file``.

    :raises OSError: the file cannot be opened.
    """
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(level)
    logger.propagate = False
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(logging.FileHandler(file, mode="a", encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(_LineFormatter())
        logger.addHandler(handler)
    # The libraries' own warnings are worth a line; their chatter is not.
    logging.lastResort = None
    return EventLog(logger)


def event_log() -> EventLog:
    """The log of this process, wherever :func:`open_log` sent it."""
    return EventLog(logging.getLogger(LOGGER_NAME))
