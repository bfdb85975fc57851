"""Tenstorrent accelerators, as ``tt-smi`` in dstack's image lists them.

The tool lists chips; what a task can hold is what has a ``/dev/tenstorrent/<i>``. A board
may carry a second chip that is reached only through the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import define, frozen

from dstack_shim.host.commands import Finished, Runner
from dstack_shim.host.gpus import MIB_PER_GIB, DetectionError, Gpu, known_version

TIMEOUT = 120.0  # s, the pull of the image included

_COMMAND = (
    *("docker", "run", "--rm", "--device", "/dev/tenstorrent"),
    *("dstackai/tt-smi:latest", "-s"),
)
_WORMHOLE = ("n150", "n300", "tt-galaxy-wh")
_WORMHOLE_GIB = 12
_BLACKHOLE_GIB = {"p100a": 28, "p150": 32, "p300": 32, "tt-galaxy-bh": 32}
_REMOTE = "N/A"


@frozen
class _Chip:
    name: str
    half: str  # "L", "R" or ""
    board_id: str
    bus_id: str

    @property
    def wormhole(self) -> bool:
        return self.name.startswith(_WORMHOLE)

    @property
    def remote(self) -> bool:
        return self.bus_id.upper() == _REMOTE

    @property
    def memory_gib(self) -> int:
        return _WORMHOLE_GIB if self.wormhole else _BLACKHOLE_GIB.get(self.name, 0)


@define
class _Board:
    name: str
    memory_gib: int


async def detect(run: Runner, root: Path) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the accelerators and the version of the kernel's driver.

    Raises:
        DetectionError: the tool exited with an error or printed no list of chips.
        CommandError: there is no docker command line, or it hangs.
    """
    gpus = read(await run(_COMMAND, timeout=TIMEOUT))
    return gpus, driver_version(root)


def driver_version(root: Path) -> str | None:
    """Return what the kernel module says of itself, if it says so."""
    try:
        return known_version((root / "sys/module/tenstorrent/version").read_text())
    except (OSError, UnicodeDecodeError):
        return None


def read(finished: Finished) -> tuple[Gpu, ...]:
    """Group the chips into boards; all left halves come first, then the others, in order."""
    if not finished.ok:
        raise DetectionError(f"tt-smi {finished.failure}")
    chips = list(_chips(finished.out))
    boards = [*_halves(chips), *_whole(chip for chip in chips if not chip.half)]
    return tuple(
        Gpu(id=str(index), name=board.name, memory_mib=board.memory_gib * MIB_PER_GIB)
        for index, board in enumerate(boards)
    )


def _chips(text: str) -> Iterator[_Chip]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DetectionError(f"tt-smi printed no JSON: {error}") from error
    devices = document.get("device_info") if isinstance(document, dict) else None
    if not isinstance(devices, list):
        raise DetectionError("tt-smi printed no list of chips")
    for device in devices:
        info = device.get("board_info") if isinstance(device, dict) else None
        kind = info.get("board_type") if isinstance(info, dict) else None
        if isinstance(info, dict) and isinstance(kind, str) and kind.strip():
            yield _chip(kind.strip(), info)


def _chip(kind: str, info: dict[str, object]) -> _Chip:
    name, _, suffix = kind.rpartition(" ")
    if suffix not in {"L", "R"}:
        name, suffix = kind, ""
    return _Chip(
        name=_product(name.strip()),
        half=suffix,
        board_id=str(info.get("board_id") or ""),
        bus_id=str(info.get("bus_id") or ""),
    )


def _product(board_type: str) -> str:
    """Return the name the product is sold under."""
    if board_type in {"bh-scrappy", "p100"}:
        return "p100a"
    for family in ("p150", "p300"):
        if board_type.startswith(family):
            return family
    return board_type


def _halves(chips: list[_Chip]) -> list[_Board]:
    """Return a board for each left half; a right half only brings its memory."""
    boards: list[_Board] = []
    by_id: dict[str, _Board] = {}
    for chip in chips:
        if chip.half == "L":
            boards.append(_Board(chip.name, chip.memory_gib))
            # All chips of a Galaxy are left halves with one board id; each is its own device.
            by_id.setdefault(chip.board_id, boards[-1])
    for chip in chips:
        if chip.half == "R" and chip.board_id in by_id:
            by_id[chip.board_id].memory_gib += chip.memory_gib
    return boards


def _whole(chips: Iterable[_Chip]) -> list[_Board]:
    """Return a board for each Wormhole board id and for each other chip that has a bus."""
    boards: list[_Board] = []
    by_key: dict[tuple[str, str], _Board] = {}
    remote: list[_Chip] = []
    for chip in chips:
        key = (chip.board_id, "" if chip.wormhole else chip.name)
        if chip.wormhole and chip.board_id and key in by_key:
            by_key[key].memory_gib += chip.memory_gib
        elif chip.remote and not chip.wormhole:
            remote.append(chip)
        else:
            boards.append(_Board(chip.name, chip.memory_gib))
            by_key.setdefault(key, boards[-1])
    for chip in remote:
        local = by_key.get((chip.board_id, chip.name))
        if local is not None:
            local.memory_gib += chip.memory_gib
    return boards
