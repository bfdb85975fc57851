"""The command line: one parser for the daemon and everything else the file can do."""

from __future__ import annotations

import asyncio
import os
import sys

from dstack_shim import build
from dstack_shim.errors import ShimError
from dstack_shim.settings import read_invocation, usage


def main(argv: list[str] | None = None) -> int:
    """Run ``dstack-shim``; returns the exit code: 0, or 1 with a message on stderr."""
    try:
        invocation = read_invocation(sys.argv[1:] if argv is None else argv, os.environ)
        if invocation.version:
            # Three words, the first our name: servers and older shims parse exactly this.
            print("dstack-shim version", build.version())  # noqa: T201 - the answer
            return 0
        if invocation.help:
            print(usage())  # noqa: T201 - the answer
            return 0
        # Imported late: --version is asked on every component check and must be quick. It is
        # also the first proof of a file fresh from a download, so a broken one fails there.
        from dstack_shim.daemon import run  # noqa: PLC0415 - see above

        return asyncio.run(run(invocation.settings))
    except ShimError as error:
        print(f"dstack-shim: {error}", file=sys.stderr)  # noqa: T201 - there may be no log yet
        return 1


if __name__ == "__main__":
    sys.exit(main())
