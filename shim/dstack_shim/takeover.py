"""One process, one file after the other: what is handed over by ``execve``, and how it is taken.

The process keeps its number, its listening socket and its locked home; everything else of the old
program goes. Clients that connect meanwhile wait in the socket's backlog. The successor has until
its deadline to prove itself: a watchdog thread then executes the file before it, and an alarm,
which outlives ``execve``, ends a process whose file never got as far as its own watchdog, so that
the supervisor starts the file before it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import attrs
from dstack_shim_contracts.api import HealthcheckResponse
from dstack_shim_contracts.codec import decode, encode
from dstack_shim_contracts.errors import BodyError
from dstack_shim_contracts.features import TAKEOVER_PROTOCOL
from dstack_shim_contracts.upgrade import HandedGpu, Handover

from dstack_shim.home import LOCK
from dstack_shim.host.gpus import Gpu, GpuInventory, GpuVendor
from dstack_shim.log import EventLog

VARIABLE = "DSTACK_SHIM_TAKEOVER"
"""Name of the environment variable that carries the :class:`Handover`, as JSON."""

READY_WITHIN = 30.0
"""Seconds a successor has to prove itself."""

ALARM_AFTER = 5
"""Seconds after its deadline at which a process is ended that neither did nor went back."""

_STDERR = 2
_NOT_HANDED_ON = ("DSTACK_SHIM_NO_OTHER_PYTHON",)  # what the start of the old file left for itself


@attrs.frozen
class Possessions:
    """What this process holds and a successor takes over: descriptors that outlive ``execve``."""

    socket: socket.socket
    lock: int


def handover(
    possessions: Possessions, *, generation: int, path: Path, inventory: GpuInventory | None
) -> Handover:
    """What a successor of that generation gets."""
    found = inventory or GpuInventory()
    return Handover(
        protocol=TAKEOVER_PROTOCOL,
        socket=possessions.socket.fileno(),
        lock=possessions.lock,
        generation=generation,
        deadline=time.monotonic() + READY_WITHIN,
        path=str(path),
        gpu_vendor=found.vendor.value if inventory is not None else "",
        gpu_driver_version=found.driver_version,
        gpus=tuple(HandedGpu(gpu.id, gpu.name, gpu.memory_mib) for gpu in found.gpus),
    )


def inventory_of(given: Handover) -> GpuInventory | None:
    """The GPUs that were found before; None if they have to be found."""
    try:
        vendor = GpuVendor(given.gpu_vendor)
    except ValueError:
        return None
    gpus = tuple(Gpu(gpu.id, gpu.name, gpu.memory_mib) for gpu in given.gpus)
    return GpuInventory(vendor, gpus, given.gpu_driver_version)


def execute(file: Path, given: Handover) -> NoReturn:
    """Become the program in ``file``, with the arguments and the environment of this one.

    Raises:
        OSError: it cannot be executed; this program goes on.
    """
    keep = {given.socket, given.lock}
    for entry in tuple(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        if descriptor > _STDERR:
            with suppress(OSError):  # that of the list itself is closed again
                os.set_inheritable(descriptor, descriptor in keep)
    environ = {**environment(), VARIABLE: encode(given).decode()}
    signal.alarm(max(1, round(given.deadline - time.monotonic())) + ALARM_AFTER)
    try:
        os.execve(file, [str(file), *sys.argv[1:]], environ)  # noqa: S606 - a file we proved
    finally:  # still here
        signal.alarm(0)


def receive(
    environ: MutableMapping[str, str], home: Path, address: tuple[str, int], log: EventLog
) -> tuple[Handover, Possessions] | None:
    """Take what a predecessor left in the environment, which no child is to see.

    None if there was none, and, with the reason in the log, if the descriptors are not what they
    should be: the socket that listens on ``address`` and the lock of ``home``. Those are closed,
    and the start is an ordinary one.
    """
    text = environ.pop(VARIABLE, None)
    if text is None:
        return None
    try:
        given = decode(Handover, text)
        possessions = _possess(given, home, address)
    except (BodyError, OSError, ValueError) as error:
        log.error("takeover.refused", error=error)  # noqa: TRY400 - no fault of ours: no trace
        signal.alarm(0)
        return None
    _adopt_children()
    return given, possessions


def _possess(given: Handover, home: Path, address: tuple[str, int]) -> Possessions:
    try:
        _check_protocol(given.protocol)
        _check_lock(given.lock, home)
        sock = _checked_socket(given.socket, address)
    except (OSError, ValueError):
        for descriptor in (given.socket, given.lock):
            if descriptor > _STDERR:
                with suppress(OSError):
                    os.close(descriptor)
        raise
    os.set_inheritable(given.lock, False)
    return Possessions(sock, given.lock)


def _check_protocol(protocol: int) -> None:
    if protocol != TAKEOVER_PROTOCOL:
        raise ValueError(f"its protocol is {protocol}, expected {TAKEOVER_PROTOCOL}")


def _check_lock(descriptor: int, home: Path) -> None:
    ours, there = os.fstat(descriptor), (home / LOCK).stat()
    if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
        raise ValueError(f"descriptor {descriptor} is not the lock of {home}")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _checked_socket(descriptor: int, address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(fileno=descriptor)
    if (
        sock.family != socket.AF_INET
        or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        or sock.getsockname() != address
    ):
        sock.detach()
        raise ValueError(f"descriptor {descriptor} does not listen on {address[0]}:{address[1]}")
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


async def ask(address: tuple[str, int]) -> HealthcheckResponse:
    """The healthcheck of whoever answers there.

    Raises ``OSError``, ``ValueError`` for another status than 200, ``BodyError``.
    """
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(
            b"GET /api/healthcheck HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    words = head.split(maxsplit=2)
    if len(words) < 2 or words[1] != b"200":
        raise ValueError(
            f"it answers {words[1].decode(errors='replace') if words[1:] else 'nothing'}"
        )
    return decode(HealthcheckResponse, body)


def _adopt_children() -> None:
    """Reap the commands of the program before us as they end; it could not wait for them."""
    for pid in _children():
        threading.Thread(target=_reap, args=(pid,), name="reaper", daemon=True).start()


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # After the name in brackets, which may hold anything: state, parent (proc(5)).
                rest = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(rest[1]) == os.getpid():
                    found.append(int(entry.name))
    return found


class Watchdog:
    """Goes back to the file before this one, unless this one proves itself before its deadline.

    A thread, because what hangs may be the event loop.
    """

    def __init__(self, given: Handover, log: EventLog) -> None:
        self._given = given
        self._log = log
        self._over = threading.Event()
        self._deciding = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def settle(self, settle: Callable[[], None]) -> None:
        """Do the last thing, after which there is no going back, and stop watching.

        Raises whatever ``settle`` raises; the watchdog then goes on.
        """
        with self._deciding:
            settle()
            self._over.set()
        signal.alarm(0)

    def go_back(self, why: str) -> None:
        """Execute the file before this one, unless there is no going back any more.

        Ends the process if that file cannot be executed: the supervisor starts what is there.
        """
        with self._deciding:
            if self._over.is_set():
                return
            self._log.error("takeover.rolled_back", error=why)
            given = attrs.evolve(
                self._given,
                generation=self._given.generation - 1,
                deadline=time.monotonic() + READY_WITHIN,
                rolled_back=why,
            )
            try:
                execute(Path(given.path), given)
            except OSError as error:
                self._log.error("takeover.not_rolled_back", error=error)
                os._exit(1)

    def _watch(self) -> None:
        if not self._over.wait(self._given.deadline - time.monotonic()):
            self.go_back("it was not ready in time")


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which a file is tried that may be executed later."""
    return {name: text for name, text in environ.items() if name not in _NOT_HANDED_ON}
