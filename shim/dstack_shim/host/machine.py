"""What the host has besides GPUs: processors, memory, disk, addresses, boot, special devices.

Read from the kernel directly; no tool has to be installed (container-optimised hosts have
few). What cannot be read is 0 or None, and logged by the caller that needs it.
"""

from __future__ import annotations

import os
import re
import socket
from ipaddress import ip_interface
from pathlib import Path
from struct import Struct
from struct import error as struct_error

_BOOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MEM_TOTAL = re.compile(r"^MemTotal:\s+([0-9]+) kB$", re.MULTILINE)

# rtnetlink(7): the messages of an address dump.
_HEADER = Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = Struct("=BBBBI")  # family, prefix length, flags, scope, interface
_ATTRIBUTE = Struct("=HH")  # length, type
_RTM_NEWADDR = 20
_RTM_GETADDR = 22
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS = 1
_IFA_LOCAL = 2  # on a point-to-point link IFA_ADDRESS is the other end
_NETLINK_ROUTE = 0
_NETLINK_TIMEOUT = 5.0  # s


def cpu_count() -> int:
    """Processors this process may run on (an affinity mask of the service counts)."""
    return len(os.sched_getaffinity(0))


def total_memory(root: Path = Path("/")) -> int:
    """The machine's memory in bytes, 0 if unknown."""
    try:
        found = _MEM_TOTAL.search((root / "proc/meminfo").read_text())
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


def available_disk(directory: Path) -> int:
    """Bytes free for non-root users on the file system of ``directory``.

    Raises:
        OSError: there is no such directory (an engine on another machine).
    """
    fs = os.statvfs(directory)
    return fs.f_bavail * fs.f_frsize


def boot_id(root: Path = Path("/")) -> str | None:
    """The kernel's id of this boot, the same in every container of the host."""
    try:
        text = (root / "proc/sys/kernel/random/boot_id").read_text().strip().lower()
    except (OSError, UnicodeDecodeError):
        return None
    return text if _BOOT_ID.fullmatch(text) else None


def has_infiniband(root: Path = Path("/")) -> bool:
    """Whether the host has InfiniBand devices a container should get."""
    return (root / "dev/infiniband").exists()


def has_huge_pages(root: Path = Path("/")) -> bool:
    """Whether 1 GiB pages are mounted where Tenstorrent's runtime looks for them."""
    return (root / "dev/hugepages-1G").exists()


def addresses() -> tuple[str, ...]:
    """All addresses of the host but loopback, with their prefix length (``10.0.0.5/24``).

    Asked over netlink: /proc has no prefix lengths of IPv4, ioctl no second address of an
    interface, and ``ip`` need not be installed.

    Raises:
        OSError: the kernel refuses.
    """
    found: list[str] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as netlink:
        netlink.settimeout(_NETLINK_TIMEOUT)
        netlink.bind((0, 0))
        body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        size = _HEADER.size + len(body)
        netlink.send(_HEADER.pack(size, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0) + body)
        done = False
        while not done:
            part, done = parse_addresses(netlink.recv(1 << 16))
            found.extend(part)
    return tuple(dict.fromkeys(found))


def parse_addresses(dump: bytes) -> tuple[list[str], bool]:
    """Read one datagram of an address dump; tell whether it was the last.

    Raises:
        OSError: the kernel reports an error, or the datagram is malformed.
    """
    found: list[str] = []
    try:
        while dump:
            length, kind, *_ = _HEADER.unpack_from(dump)
            if kind == _NLMSG_DONE:
                return found, True
            if kind == _NLMSG_ERROR or not _HEADER.size <= length <= len(dump):
                raise OSError("the kernel does not list its addresses")
            if kind == _RTM_NEWADDR:
                address = _one_address(dump[_HEADER.size : length])
                if address:
                    found.append(address)
            dump = dump[_aligned(length) :]
    except struct_error as error:
        raise OSError("the kernel's list of addresses is malformed") from error
    return found, False


def _one_address(message: bytes) -> str | None:
    family, prefix, *_ = _ADDRESS.unpack_from(message)
    if family not in {socket.AF_INET, socket.AF_INET6}:
        return None
    attributes: dict[int, bytes] = {}
    rest = message[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[_aligned(length) :]
    raw = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    if raw is None or len(raw) not in {4, 16}:
        return None
    interface = ip_interface((raw, prefix))
    return None if interface.ip.is_loopback else str(interface)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
