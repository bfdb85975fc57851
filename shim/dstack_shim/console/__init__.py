"""The commands for people: what is on this host, told beside a running shim, without one, and
without an engine.

Only the command line imports this, and only for a command: rich and httpx stay out of the daemon.
Nothing is changed, locked or flushed here. Everything a task could have chosen (names, output,
messages) is shown as text and never reaches a terminal raw, see :mod:`dstack_shim.console.text`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module

from dstack_shim.errors import ShimError
from dstack_shim.log import LOGGER_NAME
from dstack_shim.settings import Invocation

INTERRUPTED, NOBODY_READS = 130, 141
"""What a shell shows for a program ended by SIGINT and SIGPIPE."""


def run(invocation: Invocation) -> int:
    """Carry out a command; returns the exit code.

    Raises ``ShimError`` for what is to be said in one line and exit code 1.
    """
    assert invocation.command is not None
    # What the daemon would log is not for this screen, and not fit for it.
    logging.getLogger(LOGGER_NAME).addHandler(logging.NullHandler())
    try:
        code = _of(invocation.command.name)(invocation)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would fail again at the exit, with a trace.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    return code


def _of(name: str) -> Callable[[Invocation], int]:
    """The command's own module, and no other: each brings what it needs."""
    try:
        module = import_module(f"dstack_shim.console.{name}")
    except ModuleNotFoundError as error:
        raise ShimError(
            f"{name} needs {error.name}: install dstack-shim[console], or use the single file"
        ) from error
    run: Callable[[Invocation], int] = module.run
    return run
