"""host_info.json: exact keys, whole or not at all, never over what is there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dstack_shim.host import machine
from dstack_shim.host.gpus import Gpu, GpuInventory, GpuVendor
from dstack_shim.host.info import HostInfo, host_info, write_host_info
from dstack_shim.log import event_log

INFO = HostInfo("none", "", 0, 0, ("10.0.0.5/24",), 10, 2, 4096)


def test_file_has_exactly_the_keys_servers_read(tmp_path: Path) -> None:
    assert write_host_info(tmp_path, INFO)

    text = (tmp_path / "host_info.json").read_text()
    assert json.loads(text) == {
        "gpu_vendor": "none",
        "gpu_name": "",
        "gpu_memory": 0,
        "gpu_count": 0,
        "addresses": ["10.0.0.5/24"],
        "disk_size": 10,
        "cpus": 2,
        "memory": 4096,
    }
    assert text.endswith("}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["host_info.json"]


@pytest.mark.parametrize("kind", ["file", "empty", "dangling link"])
def test_whatever_has_the_name_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "host_info.json"
    if kind == "dangling link":
        path.symlink_to("nowhere")
    else:
        path.write_text("{}" if kind == "file" else "")

    assert not write_host_info(tmp_path, INFO)

    if kind == "dangling link":
        assert path.is_symlink()
    else:
        assert path.read_text() == ("{}" if kind == "file" else "")


def test_file_is_complete_when_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def check_then_rename(self: Path, target: Path) -> Path:
        assert not os.path.lexists(target)
        assert json.loads(self.read_text())["cpus"] == 2
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", check_then_rename)

    assert write_host_info(tmp_path, INFO)


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)

    with pytest.raises(OSError, match="No space"):
        write_host_info(tmp_path, INFO)
    assert list(tmp_path.iterdir()) == []


def test_leftover_of_a_crash_is_replaced_and_a_planted_link_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / ".host_info.json.new").symlink_to(victim)

    assert write_host_info(tmp_path, INFO)

    assert victim.read_text() == "untouched"
    assert json.loads((tmp_path / "host_info.json").read_text())["memory"] == 4096


def test_name_and_memory_are_those_of_the_first_gpu(tmp_path: Path) -> None:
    gpus = (Gpu("GPU-1", "NVIDIA H100", 81559), Gpu("GPU-2", "NVIDIA T4", 15360))

    info = host_info(GpuInventory(GpuVendor.NVIDIA, gpus, "550.1"), tmp_path, event_log())

    assert (info.gpu_vendor, info.gpu_name, info.gpu_memory, info.gpu_count) == (
        *("nvidia", "NVIDIA H100"),
        *(81559, 2),
    )
    assert info.cpus == machine.cpu_count()
    assert info.memory == machine.total_memory()
    assert info.disk_size > 0


def test_what_cannot_be_read_is_0_or_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> tuple[str, ...]:
        raise OSError("no netlink here")

    monkeypatch.setattr(machine, "addresses", refused)

    info = host_info(GpuInventory(), tmp_path / "nowhere", event_log())

    assert (info.addresses, info.disk_size) == ((), 0)
    assert info.gpu_vendor == "none"
