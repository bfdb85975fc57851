"""What tests and demo must leave as they found it: this machine.

A state is a set of lines in sections; two states are compared line by line. Engines, mounts and
networks of the tests live in namespaces of their own, so nothing here may differ afterwards.
"""

from __future__ import annotations

import ctypes
import difflib
import hashlib
import os
import pwd
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

State = dict[str, list[str]]

# Paths of a real shim or engine on the machine itself.
WATCHED = (
    "/etc/.dstack",
    "/etc/group",
    "/etc/passwd",
    "/etc/resolv.conf",
    "/etc/systemd/system/dstack-shim.service",
    "/proc/sys/net/ipv4/ip_forward",
    "/run/docker.sock",
    "/run/docker.pid",
    "/run/netns",
    "/usr/local/bin/dstack-runner",
    "/usr/local/bin/dstack-shim",
    "/usr/sbin/policy-rc.d",
    "/var/lib/docker",
)
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def take() -> State:
    """The state of this machine now."""
    return {
        "ssh": sorted(_ssh()),
        "homes": sorted(_homes()),
        "mnt": sorted(_below(Path("/mnt"), depth=3)),
        "mounts": sorted(_mounts()),
        "firewall": _firewall(),
        "links": sorted(path.name for path in Path("/sys/class/net").iterdir()),
        "loop devices": sorted(_loops()),
        "control groups": sorted(_engine_control_groups()),
        "files": sorted(_describe(Path(path)) for path in WATCHED),
    }


def differences(before: State, after: State) -> list[str]:
    """One line for each thing that is new (+) or gone (-), with its section; empty: unchanged."""
    lines = []
    for section in before.keys() | after.keys():
        changes = difflib.ndiff(before.get(section, []), after.get(section, []))
        lines += [f"{section}: {line}" for line in changes if line[0] in "+-"]
    return sorted(lines)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies, daemons too."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def leftover_processes(*, within: float = 5.0) -> list[str]:
    """Descendants of this process that are still alive after ``within`` seconds, in words.

    Needs :func:`adopt_orphans` before they were started.
    """
    deadline = time.monotonic() + within
    while True:
        _reap()
        alive = list(_descendants(os.getpid()))
        if not alive or time.monotonic() >= deadline:
            return [f"{pid} {_command_line(pid)}" for pid in alive]
        time.sleep(0.1)


def _ssh() -> Iterator[str]:
    for home in _home_folders():
        yield from _below(home / ".ssh", depth=2)


def _homes() -> Iterator[str]:
    return (str(home / ".dstack") for home in _home_folders() if (home / ".dstack").exists())


def _home_folders() -> set[Path]:
    return {Path.home(), Path(pwd.getpwuid(os.getuid()).pw_dir), Path("/root")}


def _below(folder: Path, *, depth: int) -> Iterator[str]:
    if folder.is_dir():
        yield _describe(folder)
        for path in folder.iterdir():
            if depth > 1 and path.is_dir() and not path.is_symlink():
                yield from _below(path, depth=depth - 1)
            else:
                yield _describe(path)


def _describe(path: Path) -> str:
    try:
        status = path.lstat()
    except OSError:
        return f"{path} absent"
    words = [str(path), oct(status.st_mode), f"{status.st_uid}:{status.st_gid}"]
    if path.is_symlink():
        words.append(f"-> {path.readlink()}")
    elif path.is_file():
        words.append(hashlib.sha256(path.read_bytes()).hexdigest()[:16])
    return " ".join(words)


def _mounts() -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, system = line.partition(" - ")
        yield f"{mount.split()[4]} {' '.join(system.split()[:2])}"


def _firewall() -> list[str]:
    """Every rule, own chain and policy; an empty table that merely exists says nothing."""
    lines: list[str] = []
    for command in ("iptables-save", "ip6tables-save"):
        try:
            text = subprocess.run(
                [command], capture_output=True, text=True, timeout=30, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        lines += [f"{command[:-5]} {rule}" for rule in _rules(text.splitlines())]
    return lines


def _rules(lines: Iterable[str]) -> Iterator[str]:
    table = ""
    for line in lines:
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":"):
            chain, policy = line[1:].split()[:2]
            if policy != "ACCEPT":
                yield f"{table} chain {chain} {policy}"
        elif line.startswith("-"):
            yield f"{table} {line}"


def _loops() -> Iterator[str]:
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            yield f"/dev/{file.parts[3]} {file.read_text(encoding='utf-8').strip()}"
        except OSError:  # detached meanwhile
            continue


def _engine_control_groups() -> Iterator[str]:
    """What an engine makes, in both versions and with both drivers; the rest is systemd's to stir."""
    for pattern in ("docker", "*/docker", "system.slice/docker-*", "*/system.slice/docker-*"):
        yield from map(str, Path("/sys/fs/cgroup").glob(pattern))


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


def _descendants(parent: int) -> Iterator[int]:
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            children = task.read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "(gone)"
    return b" ".join(words).decode(errors="replace").strip()[:200] or "(no command line)"
