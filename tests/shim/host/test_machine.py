"""What the kernel says of the host."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstack_shim.host import machine


def test_cpus_respect_the_affinity_of_the_service() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    try:
        os.sched_setaffinity(0, one)
        assert machine.cpu_count() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert machine.cpu_count() == len(before)


def test_memory_is_the_kernels_total_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16384 kB\nMemFree:        5 kB\n")

    assert machine.total_memory(tmp_path) == 16384 * 1024


@pytest.mark.parametrize("text", [None, "", "MemTotal: lots\n"])
def test_unknown_memory_is_0(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text(text)

    assert machine.total_memory(tmp_path) == 0


def test_memory_of_this_machine_is_known() -> None:
    assert machine.total_memory() == pytest.approx(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.01
    )


def test_disk_is_what_non_root_users_may_fill(tmp_path: Path) -> None:
    assert machine.available_disk(tmp_path) == pytest.approx(
        shutil.disk_usage(tmp_path).free, rel=0.05
    )


def test_disk_of_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        machine.available_disk(tmp_path / "nowhere")


def test_boot_id_is_the_kernels(tmp_path: Path) -> None:
    file = tmp_path / "proc/sys/kernel/random/boot_id"
    file.parent.mkdir(parents=True)
    file.write_text("85097cad-A648-4a80-b2a6-875c9f66c7b7\n")

    assert machine.boot_id(tmp_path) == "85097cad-a648-4a80-b2a6-875c9f66c7b7"
    assert machine.boot_id() == machine.boot_id()
    assert machine.boot_id()


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"../../etc"])
def test_unreadable_boot_id_is_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        file = tmp_path / "proc/sys/kernel/random/boot_id"
        file.parent.mkdir(parents=True)
        file.write_bytes(content)

    assert machine.boot_id(tmp_path) is None


def test_special_devices_are_seen(tmp_path: Path) -> None:
    assert not machine.has_infiniband(tmp_path)
    assert not machine.has_huge_pages(tmp_path)
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/hugepages-1G").mkdir()
    assert machine.has_infiniband(tmp_path)
    assert machine.has_huge_pages(tmp_path)


# --- addresses


def attribute(kind: int, value: bytes) -> bytes:
    padding = -len(value) % 4
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * padding


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 0) + body


def address(family: int, prefix: int, *attributes: bytes) -> bytes:
    return message(20, struct.pack("=BBBBI", family, prefix, 0, 0, 2) + b"".join(attributes))


def ipv4(text: str, prefix: int) -> bytes:
    raw = socket.inet_aton(text)
    return address(socket.AF_INET, prefix, attribute(1, raw), attribute(2, raw))


def ipv6(text: str, prefix: int) -> bytes:
    raw = socket.inet_pton(socket.AF_INET6, text)
    return address(socket.AF_INET6, prefix, attribute(1, raw))


DONE = message(3, b"\0\0\0\0")


def test_addresses_are_read_with_their_prefix_and_without_loopback() -> None:
    label = attribute(3, b"eth0:second\0")
    second = address(socket.AF_INET, 24, label, attribute(2, socket.inet_aton("10.0.1.5")))
    dump = (
        ipv4("127.0.0.1", 8)
        + ipv4("10.0.0.5", 16)
        + second
        + ipv6("::1", 128)
        + ipv6("fe80::1", 64)
        + ipv6("2001:db8:0:0::7", 128)
    )

    assert machine.parse_addresses(dump + DONE) == (
        ["10.0.0.5/16", "10.0.1.5/24", "fe80::1/64", "2001:db8::7/128"],
        True,
    )
    assert machine.parse_addresses(dump)[1] is False


def test_point_to_point_address_is_our_end() -> None:
    ours, theirs = socket.inet_aton("10.8.0.2"), socket.inet_aton("10.8.0.1")
    dump = address(socket.AF_INET, 32, attribute(1, theirs), attribute(2, ours))

    assert machine.parse_addresses(dump)[0] == ["10.8.0.2/32"]


def test_other_families_and_messages_are_skipped() -> None:
    mpls = address(28, 20, attribute(1, b"\0\0\0\0"))

    assert machine.parse_addresses(mpls + message(16, b"\0" * 8) + DONE) == ([], True)


@pytest.mark.parametrize(
    "dump",
    [
        message(2, struct.pack("=i", -1)),
        b"\x01",
        struct.pack("=IHHII", 0, 20, 0, 0, 0),
        struct.pack("=IHHII", 5000, 20, 0, 0, 0),
        message(20, b"\x02"),
    ],
)
def test_malformed_dump_is_an_os_error(dump: bytes) -> None:
    with pytest.raises(OSError, match="the kernel"):
        machine.parse_addresses(dump)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_no_dump_however_odd_loops_or_breaks(dump: bytes) -> None:
    with suppress(OSError):
        machine.parse_addresses(dump)


@pytest.mark.skipif(shutil.which("ip") is None, reason="compares with iproute2, not installed")
def test_addresses_of_this_machine_are_those_ip_lists() -> None:
    listed = subprocess.run(
        ["ip", "-o", "addr"], capture_output=True, text=True, check=True, timeout=20
    )
    expected = {line.split()[3] for line in listed.stdout.splitlines()}

    assert set(machine.addresses()) == {
        cidr for cidr in expected if not cidr.startswith(("127.", "::1/"))
    }
