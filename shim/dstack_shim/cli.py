"""The command line: one parser for the daemon and everything else the file can do."""

from __future__ import annotations

import asyncio
import os
import sys

from dstack_shim import build
from dstack_shim.errors import ShimError
from dstack_shim.settings import DOCTOR, read_invocation, usage


def main(argv: list[str] | None = None) -> int:
    """Run ``dstack-shim``; returns the exit code: 0, or 1 with a message on stderr.

    ``doctor`` has its own, see :class:`dstack_shim.doctor.Level`: asked wrongly it cannot tell.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        invocation = read_invocation(words, os.environ)
        if invocation.version:
            # Three words, the first our name: servers and older shims parse exactly this.
            print("dstack-shim version", build.version())  # noqa: T201 - the answer
            return 0
        if invocation.help:
            print(usage())  # noqa: T201 - the answer
            return 0
        if invocation.command:
            # The daemon must not pay for what only a command needs.
            from dstack_shim import doctor  # noqa: PLC0415 - see above

            return asyncio.run(doctor.run(invocation.settings, as_json=invocation.json))
        # Imported late: --version is asked on every component check and must be quick. It is
        # also the first proof of a file fresh from a download, so a broken one fails there.
        from dstack_shim.daemon import run  # noqa: PLC0415 - see above

        return asyncio.run(run(invocation.settings))
    except ShimError as error:
        print(f"dstack-shim: {error}", file=sys.stderr)  # noqa: T201 - there may be no log yet
        return 2 if DOCTOR in words else 1


if __name__ == "__main__":
    sys.exit(main())
