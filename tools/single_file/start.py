"""How the single file starts once a fit Python runs it.

``--version`` is all that dstack's own shim asks before a server restarts into this file, so its
answer must mean "the daemon could start here". It is asked at every component check too, so it
must be quick: instead of importing everything, it checks the standard library modules that the
daemon was seen to import when the file was built with this Python.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from single_file_facts import LINKED, MODULES, VERSION

ASKS_VERSION = (["--version"], ["-version"], ["-v"], ["--v"])


def run(arguments: list[str]) -> int:
    """Answer ``--version`` at once, or hand over to the command line."""
    if arguments not in ASKS_VERSION:
        from dstack_shim.cli import main  # noqa: PLC0415 - what --version must not pay for

        return main(arguments)
    try:
        prove()
    except ImportError as error:
        sys.stderr.write(f"dstack-shim: this host's Python cannot run it: {error}\n")
        return 1
    sys.stdout.write(f"dstack-shim version {VERSION}\n")
    return 0


def prove() -> None:
    """Raise ImportError if the daemon could not start here."""
    if not MODULES:  # built without this Python: nothing is known, so do the real thing
        import_module("dstack_shim.daemon")
        return
    for name in LINKED:  # present is not enough: a shared library may be missing
        import_module(name)
    for name in MODULES:
        if name not in sys.modules and find_spec(name) is None:
            message = f"it lacks the standard module {name}"
            raise ImportError(message)
