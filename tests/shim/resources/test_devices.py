from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstack_shim_contracts.api import VolumeInfo

from dstack_shim.errors import CommandTimedOut, ResourceError
from dstack_shim.host.commands import Finished
from dstack_shim.resources import devices
from dstack_shim.resources.devices import (
    Device,
    Devices,
    HostFiles,
    Timing,
    device_number,
    first_partition,
    parse_serials,
    why_not_ready,
)
from tests.shim.host.fake_commands import FakeCommands
from tests.shim.resources.stage import Clock

AWS = VolumeInfo("aws", "data", "vol-0abc", init_fs=False, device_name="/dev/sdf")
GCP = VolumeInfo("gcp", "data", "1234", init_fs=False, device_name="pd-0")


class Host:
    """A /dev and a /sys/class/block of plain files, all of them ready unless said otherwise."""

    def __init__(self, root: Path) -> None:
        self.dev = root / "dev"
        self.block = root / "block"
        (self.dev / "disk" / "by-id").mkdir(parents=True)
        self.block.mkdir()
        self.clock = Clock()
        self.serials()
        self.not_ready: dict[str, str] = {}

    def add(self, name: str, *partitions: str, link: str = "") -> None:
        for number, each in enumerate(partitions, start=1):
            (self.dev / each).touch()
            (self.block / name / each).mkdir(parents=True)
            (self.block / name / each / "partition").write_text(f"{number}\n")
        (self.block / name / "queue").mkdir(parents=True)
        (self.dev / name).touch()
        if link:
            (self.dev / "disk" / "by-id" / link).symlink_to(f"../../{name}")

    def serials(self, **serials: str | None) -> None:
        entries = [
            {"name": f"{self.dev}/{name}", "serial": each} for name, each in serials.items()
        ]
        answer = Finished(0, json.dumps({"blockdevices": entries}))
        self.commands = FakeCommands({"lsblk": answer})

    async def blocking(self, call: Callable[..., Any], /, *args: object) -> Any:
        if call is devices.why_not_ready:
            return self.not_ready.get(Path(str(args[0])).name, "")
        return call(*args)

    async def find(self, volume: VolumeInfo) -> str:
        finder = Devices(
            self.commands,
            self.blocking,
            files=HostFiles(str(self.dev), str(self.block)),
            timing=Timing(self.clock.sleep, self.clock.now),
        )
        return (await finder.find(volume)).path.removeprefix(f"{self.dev}/")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("device_name", ["/dev/sdf", None])
async def test_aws_volumes_are_found_by_their_serial_number(
    host: Host, device_name: str | None
) -> None:
    host.add("nvme1n1")
    host.add("sdf")
    host.serials(nvme0n1="vol0fff", nvme1n1="vol0abc ", sdf=None)
    volume = VolumeInfo("aws", "data", "vol-0abc", init_fs=False, device_name=device_name)
    assert await host.find(volume) == "nvme1n1"
    assert host.commands.asked == [
        ("lsblk", "--json", "--nodeps", "--paths", "--output", "NAME,SERIAL")
    ]


async def test_without_a_name_only_the_serial_number_counts(host: Host) -> None:
    host.serials(nvme1n1="vol0fff")
    volume = VolumeInfo("aws", "data", "vol-0abc")
    with pytest.raises(ResourceError, match=r"tried serial 'vol0abc'$"):
        await host.find(volume)


@pytest.mark.parametrize("name", ["sdf", "xvdf"])
async def test_aws_volumes_without_a_serial_are_found_by_name_or_its_xen_form(
    host: Host, name: str
) -> None:
    host.add(name)
    assert await host.find(AWS) == name
    assert host.clock.time == 0


async def test_the_given_name_comes_before_its_xen_form(host: Host) -> None:
    host.add("xvdf")
    host.add("sdf")
    assert await host.find(AWS) == "sdf"


async def test_a_name_without_sd_has_no_other_form(host: Host) -> None:
    host.add("nvme5n1")
    volume = VolumeInfo("aws", "data", "", init_fs=False, device_name="/dev/nvme5n1")
    assert await host.find(volume) == "nvme5n1"


async def test_a_device_whose_serial_is_another_volume_is_not_taken_for_ours(host: Host) -> None:
    host.add("sdf")
    host.serials(sdf="vol0fff")
    with pytest.raises(ResourceError, match=r"/sdf is volume vol0fff"):
        await host.find(AWS)


@pytest.mark.parametrize("volume_id", ["", "vol-", "1234"])
async def test_an_empty_serial_is_nobodys(host: Host, volume_id: str) -> None:
    host.add("sdf")
    host.serials(nvme1n1="", nvme2n1=volume_id)
    volume = VolumeInfo("aws", "data", volume_id, init_fs=False, device_name="/dev/sdf")
    assert await host.find(volume) == "sdf"


@pytest.mark.parametrize("volume", [AWS, GCP], ids=["aws", "gcp"])
async def test_a_device_may_appear_after_five_seconds(host: Host, volume: VolumeInfo) -> None:
    host.clock.at[5.0] = lambda: host.add("sdf", link="google-pd-0")
    assert await host.find(volume) == "sdf"
    assert host.clock.time == 5.0


@pytest.mark.parametrize(
    ("volume", "patience", "tried"),
    [(AWS, 30, r"serial 'vol0abc', .*/sdf, .*/xvdf"), (GCP, 10, "google-pd-0-part1, .*pd-0")],
    ids=["aws", "gcp"],
)
async def test_a_device_that_never_appears_is_an_error_saying_what_was_tried(
    host: Host, volume: VolumeInfo, patience: int, tried: str
) -> None:
    with pytest.raises(
        ResourceError, match=rf"volume data: no device after {patience} s: .*{tried}"
    ):
        await host.find(volume)
    assert host.clock.time == patience


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Finished(1, "", "lsblk: failed to access sysfs"), r"lsblk exited with 1: .* sysfs"),
        (CommandTimedOut("lsblk took longer than 10 s"), "longer than 10 s"),
        (None, "cannot be run"),
    ],
)
async def test_without_lsblk_the_name_still_serves_and_the_error_says_why(
    host: Host, answer: Finished | CommandTimedOut | None, words: str
) -> None:
    host.commands = FakeCommands({} if answer is None else {"lsblk": answer})
    with pytest.raises(ResourceError, match=rf"serial 'vol0abc' \(.*{words}"):
        await host.find(AWS)
    host.add("sdf")
    assert await host.find(AWS) == "sdf"


async def test_gcp_takes_the_link_to_the_first_partition_before_the_disk(host: Host) -> None:
    host.add("sdb", link="google-pd-0")
    host.add("sdb1", link="google-pd-0-part1")
    assert await host.find(GCP) == "sdb1"


@pytest.mark.parametrize("volume", [AWS, GCP], ids=["aws", "gcp"])
async def test_the_first_partition_is_taken_also_before_udev_has_linked_it(
    host: Host, volume: VolumeInfo
) -> None:
    host.add("sdf", "sdf2", "sdf10", link="google-pd-0")
    assert await host.find(volume) == "sdf2"


async def test_a_device_is_waited_for_until_it_has_a_size(host: Host) -> None:
    host.add("sdf")
    host.not_ready["sdf"] = "has no size"
    host.clock.at[3.0] = host.not_ready.clear
    assert await host.find(AWS) == "sdf"
    assert host.clock.time == 3.0


async def test_a_device_that_is_never_ready_is_an_error(host: Host) -> None:
    host.add("sdf")
    host.not_ready["sdf"] = "is not a block device"
    with pytest.raises(ResourceError, match=r"after 10 s: .*/sdf is not a block device"):
        await host.find(AWS)


@pytest.mark.parametrize(
    ("volume", "words"),
    [
        (VolumeInfo("azure", "data"), "backend 'azure'; expected aws or gcp"),
        (VolumeInfo("", "data"), "expected aws or gcp"),
        (VolumeInfo("gcp", "data"), "device_name ''"),
        (VolumeInfo("gcp", "data", device_name="../../sda"), "device_name '../../sda'"),
        (VolumeInfo("gcp", "data", device_name="a\nb"), "device_name"),
        (VolumeInfo("aws", "data"), "expected a volume_id like vol-0123"),
        (VolumeInfo("aws", "data", "--help"), "expected a volume_id"),
        (VolumeInfo("aws", "data", "vol-1", device_name="/etc/passwd"), "device_name"),
        (VolumeInfo("aws", "data", "vol-1", device_name="/dev/../etc/passwd"), "device_name"),
        (VolumeInfo("aws", "data", "vol-1", device_name="sdf"), "device_name"),
        (VolumeInfo("aws", "data", "vol-1", device_name="/dev/-F"), "device_name"),
    ],
)
async def test_what_names_no_device_is_refused_at_once(
    host: Host, volume: VolumeInfo, words: str
) -> None:
    with pytest.raises(ResourceError, match=rf"volume data: .*{words}"):
        await host.find(volume)
    assert host.clock.time == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"blockdevices": null}',
        '{"blockdevices": [1]}',
        '{"blockdevices": [{}]}',
        '{"blockdevices": [{"name": "/dev/x", "serial": null}]}',
        '{"blockdevices": [{"name": 1, "serial": "a"}]}',
        "[" * 100_000,
    ],
)
def test_odd_answers_of_lsblk_name_no_device(text: str) -> None:
    assert parse_serials(text) == {}


def test_a_disk_the_kernel_does_not_list_has_no_partitions(tmp_path: Path) -> None:
    assert first_partition("/dev/sdz", str(tmp_path)) == "/dev/sdz"


def test_what_is_no_block_device_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert why_not_ready(str(tmp_path / "file")) == "is not a block device"
    assert why_not_ready("/dev/null") == "is not a block device"
    assert "No such file" in why_not_ready(str(tmp_path / "gone"))


def test_a_device_that_has_gone_has_no_number(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"gone: No such file"):
        device_number(str(tmp_path / "gone"))
    assert device_number("/dev/null") == (1, 3)


async def test_by_default_time_is_the_event_loops(host: Host) -> None:
    host.add("sdf")
    found = await Devices(
        host.commands, host.blocking, files=HostFiles(str(host.dev), str(host.block))
    ).find(AWS)
    assert found == Device(str(host.dev / "sdf"), (0, 0))
