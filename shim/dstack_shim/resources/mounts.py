"""What is mounted, and what is still being mounted (proc(5))."""

from __future__ import annotations

import os
import re
from pathlib import Path

from attrs import frozen

_ESCAPE = re.compile(rb"\\([0-7]{3})")


@frozen
class Mount:
    """One line of mountinfo."""

    point: str
    source: str
    number: tuple[int, int]
    """Major and minor of the device, as far as the file system has one (btrfs has not)."""


def parse_mountinfo(content: bytes) -> tuple[Mount, ...]:
    """All mounts, in the kernel's order; of two on one point the later one is on top.

    A line that is not understood is left out.
    """
    return tuple(mount for line in content.split(b"\n") if (mount := _parse_line(line)))


def _parse_line(line: bytes) -> Mount | None:
    fields = line.split(b" ")
    try:
        after = fields.index(b"-", 6)
        source, point = fields[after + 2], fields[4]
        major, minor = fields[2].split(b":")
        return Mount(_plain(point), _plain(source), (int(major), int(minor)))
    except (IndexError, ValueError):
        return None


def _plain(field: bytes) -> str:
    # Space, tab, line feed and backslash come as three octal digits; some kernels add "#".
    return os.fsdecode(_ESCAPE.sub(lambda code: bytes([int(code[1], 8) & 0xFF]), field))


def unfinished(root: str, proc: str = "/proc") -> tuple[int, ...]:
    """Ids of processes that mount or unmount something below ``root``. Blocking.

    A shim that is killed leaves the command it has started; its mount may land after the next
    shim has looked and found nothing to unmount.
    """
    prefix = os.fsencode(os.path.realpath(root)) + b"/"
    return tuple(
        int(entry.name)
        for entry in Path(proc).iterdir()
        if entry.name.isdecimal() and _is_mounting(entry, prefix)
    )


def _is_mounting(process: Path, prefix: bytes) -> bool:
    try:
        program, *arguments = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    named = program.rpartition(b"/")[2]
    return named in {b"mount", b"umount"} and any(
        argument.startswith(prefix) for argument in arguments
    )
