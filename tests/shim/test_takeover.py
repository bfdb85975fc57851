"""Handing over by ``execve`` and taking what was handed over, with real descriptors and processes."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from dstack_shim_contracts.codec import decode, encode
from dstack_shim_contracts.upgrade import Handover

from dstack_shim import takeover
from dstack_shim.api.server import listen
from dstack_shim.home import lock_home
from dstack_shim.host.gpus import Gpu, GpuInventory, GpuVendor
from dstack_shim.log import event_log
from dstack_shim.takeover import VARIABLE, Possessions, Watchdog
from tests.eventually import eventually

Address = tuple[str, int]


@pytest.fixture
def address() -> Address:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        found: Address = sock.getsockname()
        return found


@pytest.fixture
def possessions(tmp_path: Path, address: Address) -> Iterator[Possessions]:
    made = Possessions(listen(address[1]), lock_home(tmp_path))
    yield made
    made.socket.close()
    os.close(made.lock)


@pytest.fixture
def given(possessions: Possessions) -> Handover:
    path = Path("/usr/local/bin/dstack-shim")
    return takeover.handover(possessions, generation=3, path=path, inventory=None)


def duplicated(given: Handover) -> Handover:
    """As a successor gets it: descriptors nobody else in this process owns."""
    return attrs.evolve(given, socket=os.dup(given.socket), lock=os.dup(given.lock))


def test_without_a_predecessor_there_is_nothing_to_take(tmp_path: Path, address: Address) -> None:
    assert takeover.receive({}, tmp_path, address, event_log()) is None


def test_socket_and_lock_are_taken_and_no_child_sees_them(
    tmp_path: Path, address: Address, given: Handover
) -> None:
    given = duplicated(given)
    os.set_inheritable(given.socket, True)
    os.set_inheritable(given.lock, True)
    environ = {VARIABLE: encode(given).decode(), "OTHER": "1"}
    received = takeover.receive(environ, tmp_path, address, event_log())
    assert received is not None
    assert received[0] == given
    assert environ == {"OTHER": "1"}
    sock, lock = received[1].socket, received[1].lock
    assert not sock.get_inheritable()
    assert not os.get_inheritable(lock)
    with socket.create_connection(address, timeout=5):
        sock.setblocking(True)
        sock.accept()[0].close()
    sock.close()
    os.close(lock)


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"socket": "7"}', '{"protocol": 99}'])
def test_what_is_no_handover_is_said_and_left(
    tmp_path: Path, address: Address, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {VARIABLE: text}
    log = event_log()
    assert takeover.receive(environ, tmp_path, address, log) is None
    assert environ == {}


def test_a_socket_that_listens_elsewhere_is_closed_and_the_start_is_an_ordinary_one(
    tmp_path: Path, address: Address, given: Handover
) -> None:
    given = duplicated(given)
    environ = {VARIABLE: encode(given).decode()}
    elsewhere = (address[0], address[1] + 1)
    assert takeover.receive(environ, tmp_path, elsewhere, event_log()) is None
    for descriptor in (given.socket, given.lock):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_file_that_is_not_the_homes_lock_is_refused(
    tmp_path: Path, address: Address, given: Handover
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    os.close(lock_home(other))
    environ = {VARIABLE: encode(duplicated(given)).decode()}
    assert takeover.receive(environ, other, address, event_log()) is None


def test_a_lock_that_somebody_else_holds_is_refused(
    tmp_path: Path, address: Address, given: Handover
) -> None:
    lock = os.open(tmp_path / "dstack-shim.lock", os.O_RDWR)  # open, and not locked
    environ = {VARIABLE: encode(attrs.evolve(duplicated(given), lock=lock)).decode()}
    assert takeover.receive(environ, tmp_path, address, event_log()) is None


def test_a_descriptor_that_is_no_socket_is_refused(
    tmp_path: Path, address: Address, given: Handover
) -> None:
    reader, writer = os.pipe()
    given = attrs.evolve(duplicated(given), socket=reader)
    assert (
        takeover.receive({VARIABLE: encode(given).decode()}, tmp_path, address, event_log())
        is None
    )
    os.close(writer)


@pytest.mark.parametrize(
    "inventory",
    [
        GpuInventory(),
        GpuInventory(GpuVendor.AMD, (Gpu("/dev/dri/renderD128", "MI300X", 196608),), "6.8.5"),
    ],
)
def test_gpus_that_were_found_are_handed_over(
    possessions: Possessions, inventory: GpuInventory
) -> None:
    given = takeover.handover(possessions, generation=1, path=Path("/x"), inventory=inventory)
    assert takeover.inventory_of(decode(Handover, encode(given))) == inventory


def test_gpus_that_were_not_are_looked_for(given: Handover) -> None:
    assert takeover.inventory_of(given) is None


# Executing, in a process of its own.

_EXECUTES = """\
import os, sys
from pathlib import Path
from dstack_shim import takeover
from dstack_shim.api.server import listen
from dstack_shim.home import lock_home
held = takeover.Possessions(listen(int(sys.argv[2])), lock_home(Path(sys.argv[3])))
os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
given = takeover.handover(held, generation=1, path=Path("/x"), inventory=None)
takeover.execute(Path(sys.argv[1]), given)
"""
_TELLS = """\
#!/bin/sh
echo $$
echo "$@"
ls /proc/$$/fd
echo "$DSTACK_SHIM_NO_OTHER_PYTHON"
echo "$DSTACK_SHIM_TAKEOVER"
"""


def test_the_next_file_gets_pid_arguments_socket_and_lock_and_nothing_else(
    tmp_path: Path, address: Address
) -> None:
    file = tmp_path / "next"
    file.write_text(_TELLS)
    file.chmod(0o755)
    words = [str(file), str(address[1]), str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", _EXECUTES, *words],
        env={**os.environ, "DSTACK_SHIM_NO_OTHER_PYTHON": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=60)
    pid, arguments, *open_ones, other_python, text = out.splitlines()
    given = json.loads(text)
    assert int(pid) == process.pid
    assert arguments == " ".join(words)
    # 10 or above is the shell's own: the script it reads.
    assert {fd for fd in open_ones if int(fd) < 10} == {
        *("0", "1", "2"),
        *(str(given["socket"]), str(given["lock"])),
    }
    assert other_python == ""


def test_a_file_that_cannot_be_executed_leaves_this_program_and_no_alarm(
    tmp_path: Path, given: Handover
) -> None:
    with pytest.raises(FileNotFoundError):
        takeover.execute(tmp_path / "nowhere", given)
    assert signal.alarm(0) == 0
    os.set_inheritable(given.socket, False)
    os.set_inheritable(given.lock, False)


def test_children_of_the_program_before_are_reaped() -> None:
    child = subprocess.Popen(["true"])
    assert child.pid in takeover._children()
    takeover._reap(child.pid)
    assert child.pid not in takeover._children()
    child.wait()


# The watchdog.


class Executed:
    """Stands for ``execute``, which does not return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[Path, Handover]] = []
        self.error: OSError | None = None
        self.exits: list[int] = []
        monkeypatch.setattr(takeover, "execute", self)
        monkeypatch.setattr(os, "_exit", self.exits.append)

    def __call__(self, file: Path, given: Handover) -> None:
        self.given.append((file, given))
        if self.error is not None:
            raise self.error


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    return Executed(monkeypatch)


def test_a_successor_that_is_late_is_given_up(given: Handover, executed: Executed) -> None:
    soon = attrs.evolve(given, deadline=time.monotonic() + 0.05)
    Watchdog(soon, event_log()).start()
    ((file, back),) = eventually(lambda: executed.given)
    assert str(file) == given.path
    assert (back.generation, back.socket, back.lock) == (2, given.socket, given.lock)
    assert "not ready" in back.rolled_back


def test_one_that_proved_itself_is_not(given: Handover, executed: Executed) -> None:
    soon = attrs.evolve(given, deadline=time.monotonic() + 0.2)
    watchdog = Watchdog(soon, event_log())
    watchdog.start()
    done = threading.Event()
    watchdog.settle(done.set)
    watchdog.go_back("too late to change one's mind")
    watchdog._thread.join(10)
    assert done.is_set()
    assert executed.given == []


def test_what_fails_at_the_last_moment_can_still_go_back(
    given: Handover, executed: Executed
) -> None:
    watchdog = Watchdog(given, event_log())

    def fail() -> None:
        raise OSError(30, "Read-only file system")

    with pytest.raises(OSError, match="Read-only"):
        watchdog.settle(fail)
    watchdog.go_back("it cannot be renamed")
    assert executed.given[0][1].rolled_back == "it cannot be renamed"


def test_where_there_is_no_going_back_the_supervisor_has_to_help(
    given: Handover, executed: Executed
) -> None:
    executed.error = FileNotFoundError(2, "No such file or directory")
    Watchdog(given, event_log()).go_back("it did not start")
    assert executed.exits == [1]


# Asking itself.


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 500 Oh\r\n\r\n", b"nonsense"])
async def test_another_answer_than_a_healthcheck_proves_nothing(reply: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with pytest.raises(ValueError, match="answers"):
        await takeover.ask(server.sockets[0].getsockname())
    server.close()


def test_the_lock_is_still_held_by_its_copies(tmp_path: Path, possessions: Possessions) -> None:
    """What lets it cross ``execve``: it belongs to the open file, not to the process."""
    copy = os.dup(possessions.lock)
    fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(copy)
