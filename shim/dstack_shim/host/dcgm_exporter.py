"""GPU metrics of tasks: NVIDIA's dcgm-exporter as a companion, its text filtered by GPU."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import requests

from dstack_shim.errors import ExporterFailed
from dstack_shim.host.companion import Companion
from dstack_shim.host.threads import call_in_thread
from dstack_shim.log import EventLog

PROGRAM = "dcgm-exporter"
COUNTERS_FILE = "dcgm-counters.csv"

_PATIENCE = 7.0  # s in all; clients give up after 9
_TIMEOUT = (2.0, 5.0)  # s to connect, s without a byte
_MAX_TEXT = 1 << 25  # bytes

# The metrics dstack documents for jobs, with their types: dashboards rely on the names.
_GAUGES = """
    DCGM_FI_DEV_GPU_UTIL GPU busy (%)
    DCGM_FI_DEV_MEM_COPY_UTIL memory interface busy (%)
    DCGM_FI_DEV_ENC_UTIL encoder busy (%)
    DCGM_FI_DEV_DEC_UTIL decoder busy (%)
    DCGM_FI_DEV_FB_FREE memory free (MiB)
    DCGM_FI_DEV_FB_USED memory in use (MiB)
    DCGM_FI_PROF_GR_ENGINE_ACTIVE share of cycles with a graphics or compute engine active
    DCGM_FI_PROF_SM_ACTIVE share of cycles with a warp on a multiprocessor
    DCGM_FI_PROF_SM_OCCUPANCY share of a multiprocessor's warps that are resident
    DCGM_FI_PROF_PIPE_TENSOR_ACTIVE share of cycles with the tensor pipe active
    DCGM_FI_PROF_PIPE_FP64_ACTIVE share of cycles with the 64-bit float pipe active
    DCGM_FI_PROF_PIPE_FP32_ACTIVE share of cycles with the 32-bit float pipe active
    DCGM_FI_PROF_PIPE_FP16_ACTIVE share of cycles with the 16-bit float pipe active
    DCGM_FI_PROF_PIPE_INT_ACTIVE share of cycles with the integer pipe active
    DCGM_FI_PROF_DRAM_ACTIVE share of cycles with data on the memory interface
    DCGM_FI_DEV_SM_CLOCK multiprocessor clock (MHz)
    DCGM_FI_DEV_MEM_CLOCK memory clock (MHz)
    DCGM_FI_DEV_MEMORY_TEMP memory temperature (C)
    DCGM_FI_DEV_GPU_TEMP GPU temperature (C)
    DCGM_FI_DEV_POWER_USAGE power drawn (W)
    DCGM_FI_DEV_XID_ERRORS number of the last XID error
    DCGM_FI_DEV_ROW_REMAP_FAILURE 1 if remapping rows has failed
"""
_COUNTERS = """
    DCGM_FI_PROF_PCIE_TX_BYTES bytes sent over PCIe with headers
    DCGM_FI_PROF_PCIE_RX_BYTES bytes received over PCIe with headers
    DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION energy used since boot (mJ)
    DCGM_FI_DEV_PCIE_REPLAY_COUNTER PCIe retries
    DCGM_FI_DEV_POWER_VIOLATION time throttled by power (us)
    DCGM_FI_DEV_THERMAL_VIOLATION time throttled by heat (us)
    DCGM_FI_DEV_SYNC_BOOST_VIOLATION time throttled by sync boost (us)
    DCGM_FI_DEV_BOARD_LIMIT_VIOLATION time throttled by board limits (us)
    DCGM_FI_DEV_LOW_UTIL_VIOLATION time throttled by low use (us)
    DCGM_FI_DEV_RELIABILITY_VIOLATION time throttled by reliability (us)
    DCGM_FI_DEV_ECC_SBE_VOL_TOTAL single-bit memory errors since boot
    DCGM_FI_DEV_ECC_DBE_VOL_TOTAL double-bit memory errors since boot
    DCGM_FI_DEV_ECC_SBE_AGG_TOTAL single-bit memory errors ever
    DCGM_FI_DEV_ECC_DBE_AGG_TOTAL double-bit memory errors ever
    DCGM_FI_DEV_RETIRED_SBE pages retired for single-bit errors
    DCGM_FI_DEV_RETIRED_DBE pages retired for double-bit errors
    DCGM_FI_DEV_RETIRED_PENDING pages to be retired
    DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS rows remapped for uncorrectable errors
    DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS rows remapped for correctable errors
    DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL NVLink flow-control checksum errors
    DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL NVLink data checksum errors
    DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL NVLink retries
    DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL NVLink recoveries
    DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL NVLink traffic of all lanes
    DCGM_FI_DEV_NVLINK_BANDWIDTH_L0 NVLink traffic of lane 0
    DCGM_FI_PROF_NVLINK_RX_BYTES bytes received over NVLink with headers
    DCGM_FI_PROF_NVLINK_TX_BYTES bytes sent over NVLink with headers
"""


class DcgmExporter:
    """The exporter of this host; answers are kept for its interval."""

    def __init__(
        self,
        *,
        port: int,
        interval_ms: int,
        home: Path,
        log: EventLog,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = f"http://localhost:{port}/metrics"
        self._keep = max(interval_ms, 0) / 1000
        self._counters = home / COUNTERS_FILE
        self._monotonic = monotonic
        self._lock = asyncio.Lock()
        self._text = ""
        self._fetched_at = float("-inf")
        self._companion = Companion(
            "dcgm_exporter",
            [
                PROGRAM,
                *("-f", str(self._counters)),
                *("-a", f"localhost:{port}"),
                *("-c", str(interval_ms)),
            ],
            log,
        )

    @staticmethod
    def is_installed() -> bool:
        """Whether the program is on the PATH of the service."""
        return shutil.which(PROGRAM) is not None

    def start(self) -> None:
        """Write the list of counters and start the program.

        Raises:
            OSError: the home cannot be written to.
        """
        new = self._counters.with_name(f".{COUNTERS_FILE}.new")
        new.write_text(counters(), encoding="utf-8")
        new.replace(self._counters)
        self._companion.start()

    async def stop(self) -> None:
        """End the program."""
        await self._companion.stop()

    async def task_metrics(self, gpu_ids: Collection[str]) -> str:
        """Return the Prometheus text of these GPUs; no GPUs, no text, no question.

        Raises:
            ExporterFailed: the program gave no answer.
        """
        if not gpu_ids:
            return ""
        async with self._lock:  # many tasks asked for at once are one question
            if self._monotonic() - self._fetched_at >= self._keep:
                self._text = await self._fetch()
                self._fetched_at = self._monotonic()
            return filter_metrics(self._text, gpu_ids)

    async def _fetch(self) -> str:
        try:
            return await call_in_thread(
                self._get, name="dcgm metrics", cancelled=threading.Event(), timeout=_PATIENCE
            )
        except asyncio.TimeoutError as error:
            raise ExporterFailed(f"{PROGRAM} did not answer in time") from error
        except (requests.RequestException, OSError, RuntimeError) as error:
            raise ExporterFailed(f"{PROGRAM} did not answer: {type(error).__name__}") from error

    def _get(self) -> str:
        with requests.Session() as session:
            session.trust_env = False  # a proxy is not asked for our own loopback
            with session.get(self._url, timeout=_TIMEOUT, stream=True) as response:
                if response.status_code != 200:
                    raise ExporterFailed(f"{PROGRAM} answered {response.status_code}")
                raw = response.raw.read(_MAX_TEXT + 1, decode_content=True)
        if len(raw) > _MAX_TEXT:
            raise ExporterFailed(f"{PROGRAM} answered more than {_MAX_TEXT} bytes")
        return str(raw, "utf-8", errors="replace")


def counters() -> str:
    """Return the exporter's list of fields: name, Prometheus type, help."""
    lines = []
    for kind, table in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for line in table.strip().splitlines():
            name, _, meaning = line.strip().partition(" ")
            lines.append(f"{name}, {kind}, {meaning[0].upper()}{meaning[1:]}.\n")
    return "".join(lines)


def filter_metrics(text: str, gpu_ids: Collection[str]) -> str:
    """Return the samples of these GPUs, each metric's HELP and TYPE before its first one."""
    return "".join(f"{line}\n" for line in _relevant_lines(text, gpu_ids))


def _relevant_lines(text: str, gpu_ids: Collection[str]) -> Iterator[str]:
    heads: dict[str, dict[str, str]] = {}
    begun: set[str] = set()
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            _, kind, name, *_ = [*line.split(" ", 3), ""]
            heads.setdefault(name, {})[kind] = line
        elif not line.startswith("#") and any(gpu_id in line for gpu_id in gpu_ids):
            name = line.partition("{")[0].partition(" ")[0]
            if name not in begun:
                begun.add(name)
                yield from heads.get(name, {}).values()
            yield line
