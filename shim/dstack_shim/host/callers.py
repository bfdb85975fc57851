"""Who is at the other end of a connection to the API: a process of this host, or of a container.

Jobs run with the host's network, so loopback keeps nobody out: a job could end its neighbours,
or start a privileged container. What tells a container's process from one of the host (an SSH
tunnel's ``sshd``, somebody's ``curl``) is its mount namespace together with its root directory
or control group: services of the host may have a mount namespace of their own (systemd's
``PrivateTmp=``), but share the host's root.

The facts are the kernel's: one question over netlink (address → socket inode, sock_diag(7); where
it knows no such thing, ``/proc/net/tcp{,6}``, which is read whole and grows with every connection
of the last minute), ``/proc/PID/fd`` (inode → process), ``/proc/PID/{ns/mnt,root,cgroup}``; see
proc(5).
"""

# ruff: noqa: PTH115, PTH208 - pathlib doubles the time of a walk over all open files

from __future__ import annotations

import enum
import ipaddress
import os
import re
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

Address = tuple[str, int]

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_KERNEL_PATIENCE = 1.0  # s
# linux/netlink.h, sock_diag.h, inet_diag.h
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_ANY_STATE = _NO_COOKIE = 0xFFFFFFFF
_HEAD = 16  # bytes of struct nlmsghdr
_INODE_AT = _HEAD + 68  # idiag_inode, the last member of struct inet_diag_msg
_REMEMBERED = 16  # owners tried first: tunnels stay, and so do those who try again and again


class Caller(enum.Enum):
    """What kind of process holds the other end."""

    HOST = "a process of the host"
    CONTAINER = "a process in a container"
    UNKNOWN = "nobody that can be seen"


class Callers:
    """Looks callers up; safe to use from several threads, one look at a time."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        ask_kernel: Callable[[Address, Address], int] | None = None,
    ) -> None:
        self._proc = proc
        self._ask_kernel = ask_kernel or inode_by_netlink
        self._recent: deque[int] = deque(maxlen=_REMEMBERED)
        self._one_at_a_time = Lock()
        self._own_mounts = self._link("self/ns/mnt")
        self.sees_everybody = self._link("self/ns/pid") == _FIRST_PID_NAMESPACE
        """Whether every process of the machine is visible; if so, who cannot be found is gone."""

    def look_up(self, caller: Address, called: Address) -> Caller:
        """Who connected from ``caller`` to ``called``. Takes a few ms where the caller is one of
        the newest processes or was seen before, else as long as a walk over all open files.
        """
        with self._one_at_a_time:
            inode = self._ask_kernel(caller, called) or self._inode(caller, called)
            pid = self._owner(inode) if inode else None
            if pid is None:
                return Caller.UNKNOWN
            if pid in self._recent:
                self._recent.remove(pid)
            self._recent.appendleft(pid)
            return self._kind(pid)

    def _inode(self, caller: Address, called: Address) -> int:
        """The inode of the caller's socket; 0 if there is none (any more)."""
        for table, shown in (("net/tcp", _as_ipv4), ("net/tcp6", _as_ipv6)):
            try:
                lines = (self._proc / table).read_text("ascii").splitlines()[1:]
            except OSError:
                continue  # IPv6 may be switched off
            wanted = [shown(caller), shown(called)]
            for line in lines:
                fields = line.split()
                if fields[1:3] == wanted:
                    return int(fields[9])
        return 0

    def _owner(self, inode: int) -> int | None:
        wanted = f"socket:[{inode}]"
        for pid in self._by_likelihood():
            try:
                names = os.listdir(f"{self._proc}/{pid}/fd")
            except OSError:
                continue  # it ended meanwhile
            for name in names:
                if self._link(f"{pid}/fd/{name}") == wanted:
                    return pid
        return None

    def _by_likelihood(self) -> Iterator[int]:
        """Every process: those seen before, then the newest first, as an SSH session is."""
        recent = tuple(self._recent)
        yield from recent
        pids = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}
        yield from sorted(pids.difference(recent), reverse=True)

    def _kind(self, pid: int) -> Caller:
        mounts = self._link(f"{pid}/ns/mnt")
        if not mounts:
            return Caller.UNKNOWN  # it ended meanwhile
        if mounts == self._own_mounts:
            return Caller.HOST
        if not self._shares_our_root(pid) or self._is_in_a_containers_group(pid):
            return Caller.CONTAINER
        return Caller.HOST

    def _shares_our_root(self, pid: int) -> bool:
        try:
            return (self._proc / str(pid) / "root").samefile(self._proc / "self/root")
        except OSError:
            return False

    def _is_in_a_containers_group(self, pid: int) -> bool:
        """An engine names the group of a container by its id, whatever driver manages groups."""
        try:
            text = (self._proc / str(pid) / "cgroup").read_text(errors="replace")
        except OSError:
            return False
        return _CONTAINER_ID.search(text) is not None

    def _link(self, name: str) -> str:
        try:
            return os.readlink(f"{self._proc}/{name}")
        except OSError:
            return ""


def inode_by_netlink(caller: Address, called: Address) -> int:
    """The inode of the socket at ``caller`` that is connected to ``called``; 0 if the kernel
    knows none, or cannot be asked this way.
    """
    # struct inet_diag_req_v2 and its inet_diag_sockid; no interface, no cookie.
    request = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, _ANY_STATE)
    request += struct.pack("!HH", caller[1], called[1])
    request += socket.inet_aton(caller[0]).ljust(16, b"\0")
    request += socket.inet_aton(called[0]).ljust(16, b"\0")
    request += struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
    head = struct.pack("=IHHII", _HEAD + len(request), _BY_FAMILY, _REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(_KERNEL_PATIENCE)
            kernel.send(head + request)
            answer = kernel.recv(1 << 12)
    except OSError:
        return 0
    if len(answer) < _INODE_AT + 4 or struct.unpack_from("=IH", answer)[1] != _BY_FAMILY:
        return 0  # an error: no such socket
    inode: int = struct.unpack_from("=I", answer, _INODE_AT)[0]
    return inode


def _as_ipv4(address: Address) -> str:
    """As ``/proc/net/tcp`` shows it: the number in the machine's own byte order."""
    packed = ipaddress.IPv4Address(address[0]).packed
    return f"{_words(packed)}:{address[1]:04X}"


def _as_ipv6(address: Address) -> str:
    """As ``/proc/net/tcp6`` shows an IPv4 address used through an IPv6 socket."""
    packed = ipaddress.IPv6Address(f"::ffff:{address[0]}").packed
    return f"{_words(packed)}:{address[1]:04X}"


def _words(packed: bytes) -> str:
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed))
