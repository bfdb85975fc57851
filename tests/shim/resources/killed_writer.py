"""Updates an ``authorized_keys``, killed at every instant it could be; a script.

For each call that changes the disk, and for the instant before and the one after it, a child
process does the update and ends there by SIGKILL. Prints one JSON object a line: the call, what
was left in ``.ssh``, and what a second, undisturbed update leaves. Arguments: a scratch
directory, the old content ("-" for no file and no ``.ssh``), the key wanted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dstack_shim.resources.authorized_keys import Account, update
from dstack_shim.resources.ssh_keys import Merged, merge, parse_key

CALLS = ("open", "mkdir", "write", "fchown", "fchmod", "fsync", "rename", "unlink", "close")


def main(scratch: Path, old: str, wanted: str) -> None:
    for moment in ("before", "after"):
        point = 1
        while True:
            home = scratch / f"{moment}-{point}"
            home.mkdir()
            if old != "-":
                (home / ".ssh").mkdir(mode=0o700)
                (home / ".ssh" / "authorized_keys").write_bytes(old.encode())
            name, killed = run(home, wanted, moment, point)
            row = {"call": name, "moment": moment, "killed": killed, "left": listing(home)}
            change(home, wanted)
            print(json.dumps({**row, "then": listing(home)}))  # noqa: T201 - its whole purpose
            if not killed:
                break
            point += 1


def run(home: Path, wanted: str, moment: str, point: int) -> tuple[str, bool]:
    """Do the update in a child that is killed at the ``point``-th call; which one that was."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        arm(writer, moment, point)
        change(home, wanted)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="ascii") as told:
        name = told.read()
    _, status = os.waitpid(child, 0)
    return name, os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def arm(writer: int, moment: str, point: int) -> None:
    passed = 0
    really_write = os.write

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal passed
            passed += 1
            at_it = passed == point
            if at_it:
                really_write(writer, name.encode())
            if at_it and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **options)
            if at_it:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))


def change(home: Path, wanted: str) -> Merged:
    account = Account("me", os.getuid(), os.getgid(), str(home))
    return update(account, lambda content: merge(content, [parse_key(wanted)]))


def listing(home: Path) -> dict[str, str]:
    return {
        path.name: path.read_bytes().decode()
        for path in sorted(home.glob(".ssh/*")) + sorted(home.glob(".ssh/.*"))
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
