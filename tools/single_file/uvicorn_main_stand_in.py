"""Stands in for uvicorn's command line, which the package imports and nobody uses here.

The real one brings click and what supervises reloads: a tenth of the time the daemon takes to
start, and of its memory.
"""

from __future__ import annotations

from uvicorn.server import Server

__all__ = ["Server", "main", "run"]


def run(*_: object, **__: object) -> None:
    """Not in this file."""
    raise NotImplementedError("the single file has no command line of uvicorn's")


main = run
