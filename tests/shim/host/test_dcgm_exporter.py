"""Task metrics from dcgm-exporter: the filter, and the whole way through a stand-in process."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from dstack_shim.errors import ExporterFailed, NoExporter
from dstack_shim.host.dcgm import GpuTelemetry, open_telemetry
from dstack_shim.host.dcgm_exporter import DcgmExporter, counters, filter_metrics
from dstack_shim.host.gpus import GpuVendor
from dstack_shim.log import event_log
from tests.eventually import eventually_async

STAND_IN = Path(__file__).with_name("stand_in_exporter.py")

TEXT = """\
# a comment

# HELP A_UTIL what it is
# TYPE A_UTIL gauge
A_UTIL{gpu="0",UUID="GPU-1"} 5
A_UTIL{gpu="1",UUID="GPU-2"} 6
A_UTIL{gpu="2",UUID="GPU-3"} 7
# HELP B_TOTAL more: # TYPE words
# TYPE B_TOTAL counter
B_TOTAL{gpu="1",UUID="GPU-2"} 1e9
# TYPE C_BARE gauge
C_BARE 3
# EOF
"""


@pytest.mark.parametrize(
    ("ids", "lines"),
    [
        (
            ["GPU-1"],
            ["# HELP A_UTIL what it is", "# TYPE A_UTIL gauge", 'A_UTIL{gpu="0",UUID="GPU-1"} 5'],
        ),
        (
            ["GPU-3", "GPU-2"],
            [
                "# HELP A_UTIL what it is",
                "# TYPE A_UTIL gauge",
                'A_UTIL{gpu="1",UUID="GPU-2"} 6',
                'A_UTIL{gpu="2",UUID="GPU-3"} 7',
                "# HELP B_TOTAL more: # TYPE words",
                "# TYPE B_TOTAL counter",
                'B_TOTAL{gpu="1",UUID="GPU-2"} 1e9',
            ],
        ),
        (["GPU-9"], []),
        ([], []),
    ],
)
def test_samples_of_the_gpus_with_help_and_type_once_before_the_first(
    ids: list[str], lines: list[str]
) -> None:
    assert filter_metrics(TEXT, ids) == "".join(f"{line}\n" for line in lines)


def test_help_and_type_come_once_even_if_the_exporter_repeats_them() -> None:
    repeated = TEXT + TEXT

    assert filter_metrics(repeated, ["GPU-1"]).count("# TYPE A_UTIL") == 1


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# HELP", "# HELP ", "# TYPE x", "{GPU-1} 1", "GPU-1"]
)
def test_odd_text_is_no_error(text: str) -> None:
    assert isinstance(filter_metrics(text, ["GPU-1"]), str)


def test_list_of_counters_has_each_documented_field_once_with_its_type() -> None:
    rows = [line.split(", ", 2) for line in counters().splitlines()]

    assert len({name for name, _, _ in rows}) == len(rows) == 49
    assert {kind for _, kind, _ in rows} == {"gauge", "counter"}
    assert all(name.startswith("DCGM_FI_") and "," not in meaning for name, _, meaning in rows)


# --- through the stand-in


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on PATH; returns the directory of its notes."""
    program = tmp_path / "bin/dcgm-exporter"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_DIR", str(tmp_path))
    return tmp_path


Make = Callable[[], DcgmExporter]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def exporter(
    stand_in: Path, port: int, clock: Clock, tmp_path: Path
) -> AsyncIterator[DcgmExporter]:
    exporter = DcgmExporter(
        port=port, interval_ms=5000, home=tmp_path, log=event_log(), monotonic=clock
    )
    exporter.start()
    await eventually_async((stand_in / "argv").exists, within=30)
    yield exporter
    await exporter.stop()


def asked(stand_in: Path) -> list[str]:
    notes = stand_in / "asked"
    return notes.read_text().split() if notes.exists() else []


async def test_exporter_is_started_with_the_documented_flags(
    exporter: DcgmExporter, stand_in: Path, port: int
) -> None:
    counters_file = str(stand_in / "dcgm-counters.csv")

    assert json.loads((stand_in / "argv").read_text()) == [
        *("-f", counters_file, "-a", f"localhost:{port}", "-c", "5000")
    ]


async def test_task_gets_the_metrics_of_its_gpus_only(exporter: DcgmExporter) -> None:
    text = await exporter.task_metrics(["GPU-bbbb"])

    assert text.startswith("# HELP DCGM_FI_DEV_GPU_UTIL GPU busy (%).\n# TYPE")
    assert text.count("GPU-bbbb") == 49
    assert "GPU-aaaa" not in text
    assert "stand-in" not in text


async def test_answer_is_kept_for_the_interval(
    exporter: DcgmExporter, stand_in: Path, clock: Clock
) -> None:
    await exporter.task_metrics(["GPU-aaaa"])
    clock.now += 4.9
    await exporter.task_metrics(["GPU-bbbb"])
    assert asked(stand_in) == ["/metrics"]

    clock.now += 0.2
    await exporter.task_metrics(["GPU-bbbb"])
    assert asked(stand_in) == ["/metrics", "/metrics"]


async def test_task_without_gpus_gets_nothing_and_nothing_is_asked(
    exporter: DcgmExporter, stand_in: Path
) -> None:
    assert await exporter.task_metrics([]) == ""
    assert asked(stand_in) == []


async def test_failing_exporter_is_an_error_that_is_not_kept(
    exporter: DcgmExporter, stand_in: Path
) -> None:
    (stand_in / "status").write_text("500")
    with pytest.raises(ExporterFailed, match="dcgm-exporter answered 500"):
        await exporter.task_metrics(["GPU-aaaa"])

    (stand_in / "status").unlink()
    assert await exporter.task_metrics(["GPU-aaaa"])


async def test_exporter_that_is_not_there_is_an_error(port: int, tmp_path: Path) -> None:
    exporter = DcgmExporter(port=port, interval_ms=0, home=tmp_path, log=event_log())

    with pytest.raises(ExporterFailed, match="did not answer"):
        await exporter.task_metrics(["GPU-1"])


async def test_proxy_is_not_asked_for_the_exporter(
    exporter: DcgmExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")

    assert await exporter.task_metrics(["GPU-aaaa"])


# --- which host has what


def opened(vendor: GpuVendor, home: Path, port: int = 1) -> GpuTelemetry:
    return open_telemetry(
        vendor,
        home=home,
        exporter_port=port,
        exporter_interval_ms=5000,
        dcgm_address="",
        log=event_log(),
    )


@pytest.mark.parametrize("vendor", [v for v in GpuVendor if v is not GpuVendor.NVIDIA])
async def test_other_hosts_have_neither_health_nor_metrics(
    stand_in: Path, vendor: GpuVendor
) -> None:
    telemetry = opened(vendor, stand_in)

    assert (await telemetry.instance_health()).dcgm is None
    with pytest.raises(NoExporter):
        await telemetry.task_metrics(["GPU-1"])
    await telemetry.close()
    assert not (stand_in / "argv").exists()


async def test_nvidia_host_without_the_program_has_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    telemetry = opened(GpuVendor.NVIDIA, tmp_path)

    with pytest.raises(NoExporter):
        await telemetry.task_metrics(["GPU-1"])
    await telemetry.close()


async def test_nvidia_host_with_the_program_has_metrics_until_closed(
    stand_in: Path, port: int
) -> None:
    telemetry = opened(GpuVendor.NVIDIA, stand_in, port)
    await eventually_async((stand_in / "argv").exists, within=30)
    assert "GPU-aaaa" in await telemetry.task_metrics(["GPU-aaaa"])

    await telemetry.close()

    socket.create_server(("127.0.0.1", port)).close()


async def test_home_that_cannot_be_written_means_no_metrics(
    stand_in: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = opened(GpuVendor.NVIDIA, tmp_path / "none")

    with pytest.raises(NoExporter):
        await telemetry.task_metrics(["GPU-1"])
    assert "dcgm_exporter.not_started" in caplog.text
    await telemetry.close()
