"""What a host's GPUs are, whoever made them, and which vendor's they are."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from attrs import frozen

MIB_PER_GIB = 1024

# What the tools print in place of a version they do not know.
_NO_VERSION = frozenset(
    {"", "n/a", "[n/a]", "unknown", "[unknown]", "[not supported]", "[not available]"}
)


_TOO_MUCH = 1 << 40  # MiB: no number of any tool


class GpuVendor(str, Enum):
    """The one vendor a host's GPUs are of; the values are those of ``host_info.json``."""

    NONE = "none"
    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    TENSTORRENT = "tenstorrent"


@frozen
class Gpu:
    """One GPU a task can hold.

    ``id`` is what locks it: NVIDIA's uuid, AMD's render node (``/dev/dri/renderD128``),
    Intel's and Tenstorrent's index. ``memory_mib`` is 0 when unknown.
    """

    id: str
    name: str
    memory_mib: int


@frozen
class GpuInventory:
    """All GPUs of a host; without GPUs the vendor is ``none`` and there is no driver."""

    vendor: GpuVendor = GpuVendor.NONE
    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None


class DetectionError(Exception):
    """A vendor's tool failed or printed something else than it documents."""


def vendor_of(root: Path) -> GpuVendor:
    """Tell the vendor by the device nodes below ``root``.

    The order decides on mixed hosts: an AMD processor's own graphics beside an NVIDIA card
    must give NVIDIA.
    """
    dev = root / "dev"
    if (dev / "nvidiactl").exists() or ((dev / "dxg").exists() and wsl_nvidia_smi(root).exists()):
        return GpuVendor.NVIDIA
    if (dev / "tenstorrent").exists():
        return GpuVendor.TENSTORRENT
    if (dev / "kfd").exists():
        return GpuVendor.AMD
    if (dev / "accel").exists():
        return GpuVendor.INTEL
    return GpuVendor.NONE


def wsl_nvidia_smi(root: Path) -> Path:
    """Where Windows Subsystem for Linux mounts the tool; often not on a service's PATH."""
    return root / "usr/lib/wsl/lib/nvidia-smi"


def known_version(text: object) -> str | None:
    """Return a driver version, or None for the many ways of saying there is none."""
    if not isinstance(text, str):
        return None
    version = text.strip()
    return None if version.lower() in _NO_VERSION else version


def whole_number(text: object) -> int:
    """Read an amount of memory; anything unreadable or negative is 0."""
    if isinstance(text, bool):
        return 0
    if isinstance(text, (int, float)):  # a NaN compares false
        return int(text) if 0 <= text < _TOO_MUCH else 0
    if not isinstance(text, str):
        return 0
    try:
        number = int(text.strip())
    except ValueError:
        return 0
    return number if 0 <= number < _TOO_MUCH else 0
