"""
What an operator of a fleet asks, answered from the record.

    dstack-shim-fleet status             all instances, and how the roll-out stands
    dstack-shim-fleet why INSTANCE       why it is restarted or not, in sentences
    dstack-shim-fleet history            restarts and their outcomes
    dstack-shim-fleet watch              restarts as they go on
    dstack-shim-fleet pause | resume     let no restart begin; let them begin again
    dstack-shim-fleet release VERSION    lift the stop of a version
    dstack-shim-fleet metrics            figures in Prometheus' text format

It runs on the server's host with the server's environment: DSTACK_DATABASE_URL, else
DSTACK_SERVER_DIR, say where the database is. Exit codes: 0, all is well; 1, a version is stopped or a
restart failed; 2, wrong usage; 3, the record cannot be read; 4, no such instance or stop.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from dstack_shim_server.errors import RecordUnusable
from dstack_shim_server.fleet import commands
from dstack_shim_server.fleet.commands import Session
from dstack_shim_server.record import database

UNREADABLE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    url = database.database_url(os.environ)
    try:
        return asyncio.run(_run(options, url))
    except (RecordUnusable, SQLAlchemyError, OSError) as exception:
        words = (str(exception).splitlines() or [type(exception).__name__])[0]
        said = database.without_secrets(words, url)
        print(f"dstack-shim-fleet: {said} ({database.shown(url)})", file=sys.stderr)  # noqa: T201
        return UNREADABLE
    except KeyboardInterrupt:  # how a watch ends
        return 0


async def _run(options: argparse.Namespace, url: str) -> int:
    database.require_there(url)
    engine = database.open_engine(url, writing=options.writes)
    try:
        return int(await options.command(Session(engine, options, Console(highlight=False))))
    finally:
        await engine.dispose()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dstack-shim-fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="for programs")

    def add(
        name: str, command: object, words: str, *, writes: bool = False
    ) -> argparse.ArgumentParser:
        made = found.add_parser(name, parents=[common], help=words)
        made.set_defaults(command=command, writes=writes)
        return made

    status = add("status", commands.status, "all instances, and how the roll-out stands")
    status.add_argument("--state", help="only instances in this state")
    why = add("why", commands.why, "why an instance is restarted or not")
    why.add_argument("instance", metavar="INSTANCE", help="name or id")
    history = add("history", commands.history, "restarts and their outcomes, newest first")
    history.add_argument("--instance", help="of this instance only, by name or id")
    history.add_argument("--limit", type=_count, default=50, help="at most so many (50)")
    watch = add("watch", commands.watch, "restarts as they go on, until Ctrl-C")
    watch.add_argument("--interval", type=_seconds, default=2.0, help="seconds between looks (2)")
    watch.add_argument("--looks", type=_count, help="end after so many looks")
    add("pause", commands.pause, "let no restart begin", writes=True)
    add("resume", commands.resume, "let restarts begin again", writes=True)
    release = add("release", commands.release, "lift the stop of a version", writes=True)
    release.add_argument("version", metavar="VERSION")
    add("metrics", commands.show_metrics, "figures in Prometheus' text format")
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 1000000, not {text!r}")
    return int(text[:9])


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.1 to 3600, not {text!r}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
