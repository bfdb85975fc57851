"""The command line: the daemon and everything else the file can do.

What each needs is imported once it is chosen: the daemon must not pay for the commands, nor
``--version``, which is asked on every component check, for either.
"""

from __future__ import annotations

import asyncio
import os
import sys

from dstack_shim import build
from dstack_shim.commands import CHECK, WRONG_USE
from dstack_shim.errors import ShimError, UsageError
from dstack_shim.settings import Invocation, names_command, read_invocation


def main(argv: list[str] | None = None) -> int:
    """Run ``dstack-shim``; returns the exit code: 0, or 1 with a message on stderr.

    Commands have their own, see :mod:`dstack_shim.commands`.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        invocation = read_invocation(words, os.environ)
        if invocation.version:
            # Three words, the first our name: servers and older shims parse exactly this.
            print("dstack-shim version", build.version())  # noqa: T201 - the answer
            return 0
        if invocation.help:
            return _help(invocation)
        if invocation.command is CHECK:
            from dstack_shim import check  # noqa: PLC0415 - see above

            return asyncio.run(check.run(invocation.settings))
        if invocation.command:
            from dstack_shim import console  # noqa: PLC0415 - see above

            return console.run(invocation)
        # Also the first proof of a file fresh from a download: a broken one fails here.
        from dstack_shim.daemon import run  # noqa: PLC0415 - see above

        return asyncio.run(run(invocation.settings))
    except ShimError as error:
        print(f"dstack-shim: {error}", file=sys.stderr)  # noqa: T201 - there may be no log yet
        return WRONG_USE if isinstance(error, UsageError) and names_command(words) else 1


def _help(invocation: Invocation) -> int:
    from dstack_shim.console import manual  # noqa: PLC0415 - see above

    command = invocation.command
    print(manual.command_help(command) if command else manual.usage())  # noqa: T201 - the answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
