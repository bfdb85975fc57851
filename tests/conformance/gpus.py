"""Hosts with accelerators, made of device nodes and stand-in tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.conformance.images import Images
from tests.conformance.instance import Instance

UUIDS = tuple(f"GPU-0000000{n}-1111-2222-3333-444444444444" for n in range(4))

AMD_TOOL = "dstackai/amd-smi:latest"
TENSTORRENT_TOOL = "dstackai/tt-smi:latest"


@contextmanager
def nvidia(instance: Instance, count: int = 2, rows: str = "", code: int = 0) -> Iterator[Path]:
    """``count`` cards, or whatever ``rows`` say; the file has nvidia-smi's arguments."""
    asked = instance.root / "nvidia-smi.asked"
    listed = rows or "".join(f"NVIDIA L4, 23034, {uuid}, 570.86.15\n" for uuid in UUIDS[:count])
    output = instance.root / "nvidia-smi.output"
    output.write_text(listed)
    script = f'echo "$*" >>{asked}; cat {output}; exit {code}'
    asked.unlink(missing_ok=True)
    with (
        instance.devices("/dev/nvidiactl"),
        instance.tools_for_a_while(nvidia_smi=script),
    ):
        yield asked


@contextmanager
def amd(
    instance: Instance,
    images: Images,
    gpus: Sequence[Any] | dict[str, Any],
    render_nodes: dict[str, int],
    fails: str = "",
) -> Iterator[None]:
    """What the tool prints, and the render node's number by bus address.

    ``fails`` is a shell condition on ``$*`` under which the tool exits 1.
    """
    script = f"{fails} && exit 1\ncat /output\n" if fails else "cat /output\n"
    images.tool(AMD_TOOL, script, json.dumps(gpus))
    by_path = Path("/dev/dri/by-path")
    nodes = [f"/dev/dri/renderD{number}" for number in render_nodes.values()]
    with instance.devices("/dev/kfd", "/dev/dri/by-path/", *nodes):
        links = [by_path / f"pci-{bus}-render" for bus in render_nodes]
        for link, number in zip(links, render_nodes.values(), strict=True):
            link.symlink_to(f"../renderD{number}")
        try:
            yield
        finally:
            for link in links:
                link.unlink()


def amd_gpu(bus: str, name: str = "AMD Instinct MI300X", size: Any = 196592, **more: Any) -> Any:
    """One entry of the AMD tool's list."""
    return {
        "asic": {"market_name": name},
        "vram": {"size": {"value": size, "unit": "MB"}},
        "bus": {"bdf": bus},
        **more,
    }


@contextmanager
def tenstorrent(
    instance: Instance, images: Images, boards: Sequence[tuple[str, str, str]], version: str = ""
) -> Iterator[None]:
    """Boards as (type, id, bus); a node for each, and the driver's version if given."""
    listed = [
        {"board_info": {"board_type": kind, "board_id": board, "bus_id": bus}}
        for kind, board, bus in boards
    ]
    script = '[ "$*" = -s ] || exit 2\ncat /output\n'
    images.tool(TENSTORRENT_TOOL, script, json.dumps({"device_info": listed}))
    nodes = [f"/dev/tenstorrent/{number}" for number in range(len(boards))]
    with ExitStack() as stack:
        stack.enter_context(instance.devices("/dev/tenstorrent/", *nodes))
        if version:
            stack.enter_context(instance.covered("/sys/module"))
            file = Path("/sys/module/tenstorrent/version")
            file.parent.mkdir()
            file.write_text(f"{version}\n")
        yield


@contextmanager
def gaudi(instance: Instance, rows: str, code: int = 0) -> Iterator[Path]:
    """Gaudi cards as hl-smi lists them; the file has its arguments."""
    asked = instance.root / "hl-smi.asked"
    output = instance.root / "hl-smi.output"
    output.write_text(rows)
    script = f'echo "$*" >>{asked}; cat {output}; exit {code}'
    asked.unlink(missing_ok=True)
    with instance.devices("/dev/accel/accel0"), instance.tools_for_a_while(hl_smi=script):
        yield asked
