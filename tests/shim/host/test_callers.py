"""Who holds the other end: over made-up process tables, and over this machine's own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dstack_shim.host.callers import Caller, Callers, inode_by_netlink

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout"
CALLER, CALLED = ("127.0.0.1", 40000), ("127.0.0.1", 10998)
LINE = "{n}: {local} {remote} 01 00000000:00000000 00:00000000 00000000 0 0 {inode} 1 0 20 4 30"
ROWS = {
    "net/tcp": ("0100007F:9C40", "0100007F:2AF6"),
    "net/tcp6": (
        "0000000000000000FFFF00000100007F:9C40",
        "0000000000000000FFFF00000100007F:2AF6",
    ),
}
ID = "5f" * 32
DOCKER_GROUPS = (
    f"0::/system.slice/docker-{ID}.scope\n",
    f"12:memory:/docker/{ID}\n0::/docker/{ID}\n",
    f"0::/kubepods/burstable/pod1/{ID}\n",
)


class Proc:
    """A ``/proc`` in which process 1 is ours, too."""

    def __init__(self, root: Path) -> None:
        self.path = root / "proc"
        self.elsewhere = root / "another root"
        self.elsewhere.mkdir()
        (self.path / "net").mkdir(parents=True)
        self.process(1)
        (self.path / "self").symlink_to("1")

    def process(
        self,
        pid: int,
        *inodes: int,
        mounts: str = "mnt:[1]",
        own_root: bool = False,
        group: str = "0::/system.slice/ssh.service\n",
    ) -> None:
        folder = self.path / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "ns").mkdir()
        (folder / "ns/mnt").symlink_to(mounts)
        (folder / "ns/pid").symlink_to("pid:[4026531836]")
        (folder / "root").symlink_to(self.elsewhere if own_root else "/")
        (folder / "cgroup").write_text(group)
        (folder / "fd/0").symlink_to("/dev/null")
        for number, inode in enumerate(inodes, start=3):
            (folder / f"fd/{number}").symlink_to(f"socket:[{inode}]")

    def connection(self, inode: int, table: str = "net/tcp") -> None:
        local, remote = ROWS[table]
        ours = LINE.format(n=0, local=remote, remote=local, inode=7)
        theirs = LINE.format(n=1, local=local, remote=remote, inode=inode)
        (self.path / table).write_text(f"{HEAD}\n{ours}\n{theirs}\n")

    def look_up(self) -> Caller:
        return Callers(self.path, lambda caller, called: 0).look_up(CALLER, CALLED)


@pytest.mark.parametrize("mapped", [False, True], ids=["IPv4", "IPv4 through IPv6"])
def test_the_kernel_tells_the_inode_of_a_connected_socket(mapped: bool) -> None:
    """Without a walk through a table that holds every connection of the last minute."""
    family = socket.AF_INET6 if mapped else socket.AF_INET
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        called: tuple[str, int] = server.getsockname()
        client.connect(("::ffff:127.0.0.1", called[1]) if mapped else called)
        caller = ("127.0.0.1", client.getsockname()[1])
        assert inode_by_netlink(caller, called) == os.fstat(client.fileno()).st_ino
        nobody = ("127.0.0.2", caller[1])
        assert inode_by_netlink(nobody, called) == 0


def test_a_kernel_that_cannot_be_asked_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr(socket, "socket", refuse)
    assert inode_by_netlink(CALLER, CALLED) == 0


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.mark.parametrize("table", ROWS)
def test_a_process_in_our_mount_namespace_is_the_host(proc: Proc, table: str) -> None:
    proc.process(20, 99)
    proc.connection(99, table)
    assert proc.look_up() is Caller.HOST


def test_a_service_with_a_mount_namespace_of_its_own_is_the_host(proc: Proc) -> None:
    proc.process(20, 99, mounts="mnt:[2]")
    proc.connection(99)
    assert proc.look_up() is Caller.HOST


def test_a_process_with_another_root_is_a_container(proc: Proc) -> None:
    proc.process(20, 99, mounts="mnt:[2]", own_root=True)
    proc.connection(99)
    assert proc.look_up() is Caller.CONTAINER


@pytest.mark.parametrize("group", DOCKER_GROUPS)
def test_a_container_that_mounts_the_hosts_root_is_known_by_its_group(
    proc: Proc, group: str
) -> None:
    proc.process(20, 99, mounts="mnt:[2]", group=group)
    proc.connection(99)
    assert proc.look_up() is Caller.CONTAINER


def test_a_socket_nobody_holds_any_more_is_nobodys(proc: Proc) -> None:
    proc.process(20, 98)
    proc.connection(99)
    assert proc.look_up() is Caller.UNKNOWN


def test_a_closed_connection_is_nobodys(proc: Proc) -> None:
    proc.process(20, 98)
    proc.connection(0)
    assert proc.look_up() is Caller.UNKNOWN


def test_no_table_at_all_is_nobodys(proc: Proc) -> None:
    assert proc.look_up() is Caller.UNKNOWN


def test_who_called_before_is_looked_at_first(proc: Proc) -> None:
    proc.process(20, 99)
    for pid in range(100, 140):
        proc.process(pid, 98)
    proc.connection(99)
    callers = Callers(proc.path)
    callers.look_up(CALLER, CALLED)
    for pid in range(100, 140):
        (proc.path / f"{pid}/fd/3").unlink()
        (proc.path / f"{pid}/fd/3").symlink_to("socket:[99]")  # would be found instead
        (proc.path / f"{pid}/ns/mnt").unlink()
        (proc.path / f"{pid}/ns/mnt").symlink_to("mnt:[2]")
    (proc.path / "20/root").unlink()
    assert callers.look_up(CALLER, CALLED) is Caller.HOST


def test_one_that_ends_while_it_is_looked_at_is_nobodys(proc: Proc) -> None:
    proc.process(20, 99)
    (proc.path / "20/ns/mnt").unlink()
    proc.connection(99)
    assert proc.look_up() is Caller.UNKNOWN


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")]
)
def test_a_real_connection_of_ours_is_the_host(family: int, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        client.connect((host, server.getsockname()[1]))
        connection, caller = server.accept()
        with connection:
            assert Callers().look_up(caller, connection.getsockname()) is Caller.HOST


def test_a_real_connection_of_another_process_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
            "sys.stdin.read()"
        )
        port = str(server.getsockname()[1])
        with subprocess.Popen([sys.executable, "-c", code, port], stdin=subprocess.PIPE) as child:
            connection, caller = server.accept()
            with connection:
                callers = Callers()
                assert callers.look_up(caller, connection.getsockname()) is Caller.HOST
                assert callers._recent[0] == child.pid != os.getpid()
            child.communicate()
