"""H: which accelerators a shim finds on its host, and what host_info.json says."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.conformance import gpus
from tests.conformance.conftest import MakeShim
from tests.conformance.gpus import UUIDS, amd_gpu
from tests.conformance.images import Images
from tests.conformance.instance import Instance
from tests.conformance.rows import row
from tests.conformance.shim import Shim
from tests.eventually import eventually

GIB = 1024  # in MiB, as host_info.json counts


def host_info(shim: Shim) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shim.home / "host_info.json").read_text())
    return found


def gpu_part(shim: Shim) -> tuple[str, str, int, int]:
    info = host_info(shim)
    return info["gpu_vendor"], info["gpu_name"], info["gpu_memory"], info["gpu_count"]


NO_GPUS = ("none", "", 0, 0)


@pytest.fixture
def service(new_shim: MakeShim) -> Any:
    """Start a shim that writes host_info.json."""
    return lambda *arguments, **options: new_shim("--service", *arguments, **options)


# -- vendor -----------------------------------------------------------------------------------


@pytest.fixture
def every_tool(instance: Instance, images: Images) -> Iterator[None]:
    """All tools find one GPU, whatever devices there are: only the order of vendors decides."""
    bus = "0000:03:00.0"
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(gpus.amd(instance, images, [amd_gpu(bus)], {bus: 128}))
        enter(gpus.tenstorrent(instance, images, [("n150", "b", bus)]))
        enter(gpus.nvidia(instance))
        enter(gpus.gaudi(instance, "HL-225, 98304, 0\n"))
        yield


@row("H1")
@pytest.mark.parametrize(
    ("missing", "vendor"),
    [
        ((), "nvidia"),
        (("/dev/nvidiactl",), "tenstorrent"),
        (("/dev/nvidiactl", "/dev/tenstorrent"), "amd"),
        (("/dev/nvidiactl", "/dev/tenstorrent", "/dev/kfd"), "intel"),
        (("/dev/nvidiactl", "/dev/tenstorrent", "/dev/kfd", "/dev/accel"), "none"),
    ],
)
def test_vendor_is_the_first_whose_device_is_there(
    missing: tuple[str, ...], vendor: str, every_tool: None, instance: Instance, service: Any
) -> None:
    with instance.without(*missing):
        assert host_info(service())["gpu_vendor"] == vendor


@row("H1")
def test_amd_graphics_beside_an_nvidia_card_is_no_amd_host(
    instance: Instance, images: Images, service: Any
) -> None:
    bus = "0000:04:00.0"
    with gpus.amd(instance, images, [amd_gpu(bus)], {bus: 128}), gpus.nvidia(instance, count=1):
        shim = service()
        assert gpu_part(shim) == ("nvidia", "NVIDIA L4", 23034, 1)
        assert shim.get("/api/instance/info").json()["gpu_vendor"] == "nvidia"


@row("H1")
@pytest.mark.parametrize("has_tool", [True, False])
def test_windows_subsystem_needs_its_tool_too(
    has_tool: bool, instance: Instance, service: Any
) -> None:
    with (
        gpus.nvidia(instance),
        instance.without("/dev/nvidiactl"),
        instance.devices("/dev/dxg"),
        instance.copy_on_write("/usr/lib"),
    ):
        if has_tool:
            tool = Path("/usr/lib/wsl/lib/nvidia-smi")
            tool.parent.mkdir(parents=True)
            tool.touch(mode=0o755)
        assert host_info(service())["gpu_vendor"] == ("nvidia" if has_tool else "none")


# -- NVIDIA -----------------------------------------------------------------------------------


@row("H2", "A29")
def test_nvidia_is_asked_once_for_four_columns(instance: Instance, service: Any) -> None:
    with gpus.nvidia(instance, count=2) as asked:
        shim = service()
        query = "--query-gpu=name,memory.total,uuid,driver_version"
        assert asked.read_text().splitlines() == [f"{query} --format=csv,noheader,nounits"]
        assert gpu_part(shim) == ("nvidia", "NVIDIA L4", 23034, 2)
        info = shim.get("/api/instance/info").json()
        assert info == {"gpu_vendor": "nvidia", "gpu_driver_version": "570.86.15"}


@row("H3", "H14")
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (f"A, 1, {UUIDS[0]}, 5\nbroken row\nB, 2, {UUIDS[1]}, 5\n", ("nvidia", "A", 1, 1)),
        (f"A, [N/A], {UUIDS[0]}, 5\nB, 2, {UUIDS[1]}, 5\n", ("nvidia", "A", 0, 2)),
        ("No devices were found\n", NO_GPUS),
        ("\n", NO_GPUS),
    ],
)
def test_odd_nvidia_rows(
    rows: str, expected: tuple[Any, ...], instance: Instance, service: Any
) -> None:
    with gpus.nvidia(instance, rows=rows):
        assert gpu_part(service()) == expected


@row("H13", "A29")
@pytest.mark.parametrize(
    ("printed", "known"),
    [
        ("N/A", None),
        ("[N/A]", None),
        ("unknown", None),
        ("[Unknown]", None),
        ("[Not Supported]", None),
        ("[NOT AVAILABLE]", None),
        ("535.104", "535.104"),
    ],
)
def test_placeholder_is_no_driver_version(
    printed: str, known: str | None, instance: Instance, new_shim: MakeShim
) -> None:
    with gpus.nvidia(instance, rows=f"NVIDIA L4, 23034, {UUIDS[0]}, {printed}\n"):
        info = new_shim().get("/api/instance/info").json()
    expected = {"gpu_vendor": "nvidia"}
    assert info == (expected | {"gpu_driver_version": known} if known else expected)


@row("H14", "A29")
@pytest.mark.parametrize("code", [1, 9, 127])
def test_failing_nvidia_tool_means_no_gpus(code: int, instance: Instance, service: Any) -> None:
    with gpus.nvidia(instance, code=code):
        shim = service()
        assert gpu_part(shim) == NO_GPUS
        assert shim.get("/api/instance/info").json() == {}


@row("H14")
@pytest.mark.parametrize("device", ["/dev/nvidiactl", "/dev/accel/accel0", "/dev/kfd"])
def test_device_without_its_tool_means_no_gpus(
    device: str, instance: Instance, service: Any, engine: docker.DockerClient
) -> None:
    _forget(engine, gpus.AMD_TOOL)
    with instance.devices(device):
        assert gpu_part(service()) == NO_GPUS


# -- AMD --------------------------------------------------------------------------------------


@row("H4", "H5")
@pytest.mark.parametrize("wrapped", [False, True], ids=("rocm-6", "rocm-7"))
def test_amd_lists_come_in_two_shapes(
    wrapped: bool, instance: Instance, images: Images, service: Any
) -> None:
    buses = {"0000:03:00.0": 128, "0000:83:00.0": 129}
    listed: Any = [amd_gpu(bus, driver={"version": "6.10.5"}) for bus in buses]
    with gpus.amd(instance, images, {"gpu_data": listed} if wrapped else listed, buses):
        shim = service()
        assert gpu_part(shim) == ("amd", "AMD Instinct MI300X", 196592, 2)
        assert shim.get("/api/instance/info").json()["gpu_driver_version"] == "6.10.5"


@row("H5", "H13")
@pytest.mark.parametrize(
    ("driver", "known"),
    [
        ({"driver_version": "2.0"}, "2.0"),
        ({"version": "N/A", "driver_version": "2.0"}, "2.0"),
        ("odd", None),
    ],
)
def test_amd_driver_version_has_two_names(
    driver: Any, known: str | None, instance: Instance, images: Images, new_shim: MakeShim
) -> None:
    bus = "0000:03:00.0"
    with gpus.amd(instance, images, [amd_gpu(bus, driver=driver)], {bus: 128}):
        info = new_shim().get("/api/instance/info").json()
    assert info.get("gpu_driver_version") == known
    assert info["gpu_vendor"] == "amd"


@row("H4")
@pytest.mark.parametrize(("fails", "count"), [('[ "$*" != "${*%--driver}" ]', 1), ("true", 0)])
def test_amd_tool_is_asked_again_without_the_driver(
    fails: str, count: int, instance: Instance, images: Images, service: Any
) -> None:
    bus = "0000:03:00.0"
    with gpus.amd(instance, images, [amd_gpu(bus)], {bus: 128}, fails=fails):
        assert host_info(service())["gpu_count"] == count


@row("H4")
def test_amd_tool_is_asked_for_these_things(
    instance: Instance, images: Images, service: Any
) -> None:
    bus = "0000:03:00.0"
    wanted = "static --json --asic --vram --bus --driver"
    # The kernel's own view of the two devices in the container; the tool fails without them.
    fails = f'[ "$*" != "{wanted}" ] || ! [ -c /dev/kfd ] || ! [ -d /dev/dri ]'
    with gpus.amd(instance, images, [amd_gpu(bus)], {bus: 128}, fails=f"{{ {fails}; }}"):
        assert host_info(service())["gpu_count"] == 1


@row("H6")
def test_amd_gpu_without_render_node_is_left_out(
    instance: Instance, images: Images, new_shim: MakeShim
) -> None:
    listed = [amd_gpu("0000:01:00.0"), amd_gpu("0000:02:00.0")]
    with gpus.amd(instance, images, listed, {"0000:02:00.0": 130}):
        task = new_shim().run(images.idle, gpu=-1)
        assert task.info()["gpus_ids"] == ["/dev/dri/renderD130"]


# -- Intel ------------------------------------------------------------------------------------


@row("H7")
def test_gaudi_is_asked_for_three_columns(instance: Instance, service: Any) -> None:
    with gpus.gaudi(instance, "HL-225, 98304, 0\nHL-225, 98304, 1\n") as asked:
        assert gpu_part(service()) == ("intel", "HL-225", 98304, 2)
        query = "--query-aip=name,memory.total,index"
        assert asked.read_text().splitlines() == [f"{query} --format=csv,noheader,nounits"]


@row("H14")
def test_failing_gaudi_tool_means_no_gpus(instance: Instance, service: Any) -> None:
    with gpus.gaudi(instance, "HL-225, 98304, 0\n", code=1):
        assert gpu_part(service()) == NO_GPUS


# -- Tenstorrent ------------------------------------------------------------------------------


@row("H8", "H9", "H10", "H11", "H12")
@pytest.mark.parametrize(
    ("boards", "expected"),
    [
        pytest.param([("n300 R", "1", "a"), ("n300 L", "1", "b")], ("n300", 24 * GIB, 1), id="halves-swapped"),
        pytest.param([("n300 R", "2", "a"), ("n300 L", "1", "b")], ("n300", 12 * GIB, 1), id="lonely-right"),
        pytest.param([("n150", "1", "a"), ("n150", "1", "b")], ("n150", 24 * GIB, 1), id="wormhole-merges"),
        pytest.param([("p150a", "1", "a"), ("p150b", "1", "b")], ("p150", 32 * GIB, 2), id="blackhole-stands-alone"),
        pytest.param([("p300a", "1", "a"), ("p300a", "1", "N/A")], ("p300", 64 * GIB, 1), id="remote-chip"),
        pytest.param([("p100", "1", "a"), ("bh-scrappy", "2", "b")], ("p100a", 28 * GIB, 2), id="p100"),
        pytest.param([("e75", "1", "a"), ("tt-galaxy-bh", "2", "b")], ("e75", 0, 2), id="unknown"),
        pytest.param([("n150", "9", "a"), ("n300 L", "1", "b")], ("n300", 12 * GIB, 2), id="left-halves-first"),
    ],
)  # fmt: skip
def test_tenstorrent_boards_add_up(
    boards: list[tuple[str, str, str]],
    expected: tuple[str, int, int],
    instance: Instance,
    images: Images,
    service: Any,
) -> None:
    with gpus.tenstorrent(instance, images, boards):
        assert gpu_part(service()) == ("tenstorrent", *expected)


@row("H8", "A29")
@pytest.mark.parametrize("version", ["2.0.0", ""])
def test_tenstorrent_driver_version_is_the_modules(
    version: str, instance: Instance, images: Images, new_shim: MakeShim
) -> None:
    with gpus.tenstorrent(instance, images, [("n150", "1", "a")], version=version):
        info = new_shim().get("/api/instance/info").json()
    assert info.get("gpu_driver_version", "") == version


# -- host_info.json ---------------------------------------------------------------------------


@row("H19", "L17")
def test_host_info_is_written_for_a_service_only(new_shim: MakeShim) -> None:
    assert not (new_shim().home / "host_info.json").exists()
    shim = new_shim(variables={"DSTACK_SERVICE_MODE": "1"})
    assert host_info(shim)


@row("H19")
def test_existing_host_info_is_left_alone(new_shim: MakeShim) -> None:
    shim = new_shim("--service", start=False)
    (shim.home / "host_info.json").write_text("as it was")
    shim.start()
    assert (shim.home / "host_info.json").read_text() == "as it was"


@row("H20", "H21")
def test_host_info_describes_the_host(service: Any, engine: docker.DockerClient) -> None:
    info = host_info(service())
    assert set(info) == {
        *("gpu_vendor", "gpu_name", "gpu_memory", "gpu_count"),
        *("addresses", "disk_size", "cpus", "memory"),
    }
    assert gpu_part_of(info) == NO_GPUS
    disk = os.statvfs(engine.info()["DockerRootDir"])
    assert info["disk_size"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.02)
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert info["memory"] == pytest.approx(total, rel=0.01)
    assert info["cpus"] == len(os.sched_getaffinity(0))
    assert all(type(info[key]) is int for key in ("disk_size", "memory", "cpus"))


def gpu_part_of(info: dict[str, Any]) -> tuple[str, str, int, int]:
    return info["gpu_vendor"], info["gpu_name"], info["gpu_memory"], info["gpu_count"]


@row("H21")
def test_addresses_are_networks_without_loopback(
    service: Any, engine: docker.DockerClient
) -> None:
    addresses = host_info(service())["addresses"]
    found = [ipaddress.ip_interface(address) for address in addresses]
    assert all("/" in address for address in addresses)
    assert not any(one.ip.is_loopback for one in found)
    subnet = engine.networks.get("bridge").attrs["IPAM"]["Config"][0]["Subnet"]
    assert any(str(one.network) == subnet for one in found)


@row("H21")
def test_cpus_are_those_the_process_may_use(instance: Instance, new_shim: MakeShim) -> None:
    shim = new_shim("--service", start=False)
    wrapper = instance.root / "on-one-cpu"
    wrapper.write_text(f'#!/bin/sh\nexec taskset -c 0 {shim.setting.executable} "$@"\n')
    wrapper.chmod(0o755)
    shim.executable = wrapper
    shim.start()
    assert host_info(shim)["cpus"] == 1


@row("H22")
def test_host_info_appears_complete(new_shim: MakeShim) -> None:
    shim = new_shim("--service", start=False)
    file = shim.home / "host_info.json"
    shim.launch()

    def read() -> Any:
        try:
            text = file.read_text()
        except FileNotFoundError:
            return None
        return json.loads(text)  # an empty or partial file is an error here

    assert eventually(read, every=0, within=20)


def _forget(engine: docker.DockerClient, tag: str) -> None:
    try:
        engine.images.remove(tag, force=True)
    except docker.errors.ImageNotFound:
        return
