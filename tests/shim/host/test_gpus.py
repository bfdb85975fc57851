"""GPU detection: what each vendor's tool prints, in every shape it is known to print."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstack_shim.errors import CommandMissing, CommandTimedOut
from dstack_shim.host import amd, intel, nvidia, tenstorrent
from dstack_shim.host.commands import Finished
from dstack_shim.host.detection import detect_gpus
from dstack_shim.host.gpus import (
    DetectionError,
    Gpu,
    GpuInventory,
    GpuVendor,
    known_version,
    vendor_of,
    whole_number,
)
from dstack_shim.log import event_log
from tests.shim.host.fake_commands import FakeCommands

OUTPUTS = Path(__file__).parent / "outputs"
GIB = 1024


def printed(name: str, code: int = 0) -> Finished:
    return Finished(code, (OUTPUTS / name).read_text())


def make(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def link_render_nodes(root: Path, **nodes: str) -> Path:
    """``link_render_nodes(root, renderD128="0000:05:00.0")``, as udev does."""
    by_path = root / "dev/dri/by-path"
    by_path.mkdir(parents=True)
    for node, bdf in nodes.items():
        (root / "dev/dri" / node).touch()
        (by_path / f"pci-{bdf}-render").symlink_to(f"../{node}")
    return root


# --- which vendor


@pytest.mark.parametrize(
    ("nodes", "vendor"),
    [
        ((), GpuVendor.NONE),
        (("dev/null", "dev/dri/renderD128"), GpuVendor.NONE),
        (("dev/nvidiactl",), GpuVendor.NVIDIA),
        (("dev/dxg", "usr/lib/wsl/lib/nvidia-smi"), GpuVendor.NVIDIA),
        (("dev/dxg",), GpuVendor.NONE),
        (("dev/kfd",), GpuVendor.AMD),
        (("dev/tenstorrent/0",), GpuVendor.TENSTORRENT),
        (("dev/accel/accel0",), GpuVendor.INTEL),
        (("dev/kfd", "dev/nvidiactl"), GpuVendor.NVIDIA),
        (("dev/kfd", "dev/tenstorrent/0"), GpuVendor.TENSTORRENT),
        (("dev/kfd", "dev/accel/accel0"), GpuVendor.AMD),
        (
            ("dev/kfd", "dev/accel/accel0", "dev/tenstorrent/0", "dev/nvidiactl"),
            GpuVendor.NVIDIA,
        ),
    ],
)
def test_vendor_is_told_by_device_nodes_in_their_order(
    tmp_path: Path, nodes: tuple[str, ...], vendor: GpuVendor
) -> None:
    assert vendor_of(make(tmp_path, *nodes)) is vendor


# --- NVIDIA


def test_nvidia_rows_are_gpus_by_uuid() -> None:
    gpus, driver = nvidia.read(printed("nvidia-smi-8xh100.csv"))

    assert len(gpus) == 8
    assert gpus[7] == Gpu(
        "GPU-1d0c7a60-51c4-7a2d-9a38-000000000007", "NVIDIA H100 80GB HBM3", 81559
    )
    assert driver == "550.127.05"


def test_nvidia_unreadable_memory_is_0() -> None:
    gpus, driver = nvidia.read(printed("nvidia-smi-gb10-shared-memory.csv"))

    assert [gpu.memory_mib for gpu in gpus] == [0]
    assert driver == "580.95.05"


def test_nvidia_bad_row_keeps_only_the_rows_before_it() -> None:
    gpus, driver = nvidia.read(printed("nvidia-smi-lost-gpu.csv"))

    assert [gpu.id for gpu in gpus] == ["GPU-aaaaaaaa-0000-0000-0000-000000000000"]
    assert driver == "535.183.01"


@pytest.mark.parametrize(
    "row",
    ['"open, 1, GPU-2, 3', "only, three, fields", "a, 1, , 2", ", 1, GPU-2, 3", "a, 1, b, c, d"],
)
def test_nvidia_first_bad_row_of_any_kind_ends_the_list(row: str) -> None:
    text = f"Tesla T4, 15360, GPU-1, 550.1\n\n{row}\nTesla T4, 15360, GPU-2, 550.1\n"

    gpus, _ = nvidia.read(Finished(0, text))

    assert [gpu.id for gpu in gpus] == ["GPU-1"]


def test_nvidia_unsupported_driver_version_is_none() -> None:
    _, driver = nvidia.read(printed("nvidia-smi-no-driver-version.csv"))

    assert driver is None


async def test_nvidia_smi_is_asked_exactly_once_with_the_documented_query(tmp_path: Path) -> None:
    commands = FakeCommands({"nvidia-smi": printed("nvidia-smi-8xh100.csv")})

    await nvidia.detect(commands, tmp_path)

    query = "--query-gpu=name,memory.total,uuid,driver_version"
    assert commands.asked == [("nvidia-smi", query, "--format=csv,noheader,nounits")]


async def test_nvidia_smi_of_wsl_is_used_when_path_has_none(tmp_path: Path) -> None:
    root = make(tmp_path, "usr/lib/wsl/lib/nvidia-smi")
    tool = str(root / "usr/lib/wsl/lib/nvidia-smi")
    commands = FakeCommands({tool: printed("nvidia-smi-8xh100.csv")})

    gpus, _ = await nvidia.detect(commands, root)

    assert len(gpus) == 8


# --- Intel


def test_intel_rows_are_gpus_by_index() -> None:
    assert intel.read(printed("hl-smi-gaudi2.csv")) == tuple(
        Gpu(str(index), "HL-225", 98304) for index in range(4)
    )


def test_intel_bad_row_keeps_only_the_rows_before_it() -> None:
    assert intel.read(printed("hl-smi-bad-row.csv")) == (
        Gpu("0", "HL-325L", 131072),
        Gpu("1", "HL-325L", 0),
    )


@pytest.mark.parametrize("index", ["", "-1", '0" 1', "0;rm", "0,1", "²", "99999"])
def test_intel_index_is_a_number_or_the_row_is_bad(index: str) -> None:
    assert intel.read(Finished(0, f'HL-225, 1, "{index}"\n')) == ()


async def test_hl_smi_is_asked_with_the_documented_query() -> None:
    commands = FakeCommands({"hl-smi": printed("hl-smi-gaudi2.csv")})

    await intel.detect(commands)

    assert commands.asked == [
        ("hl-smi", "--query-aip=name,memory.total,index", "--format=csv,noheader,nounits")
    ]


# --- AMD

AMD_SMI = (
    *("docker", "run", "--rm", "--device", "/dev/kfd", "--device", "/dev/dri"),
    *("dstackai/amd-smi:latest", "static", "--json", "--asic", "--vram", "--bus"),
)


def test_amd_list_of_rocm_6(tmp_path: Path) -> None:
    root = link_render_nodes(tmp_path, renderD128="0000:05:00.0", renderD129="0000:26:00.0")

    assert amd.read(printed("amd-smi-rocm6.json"), root) == (
        (
            Gpu("/dev/dri/renderD128", "AMD Instinct MI300X", 196592),
            Gpu("/dev/dri/renderD129", "AMD Instinct MI300X", 196592),
        ),
        "6.8.5",
    )


def test_amd_older_name_of_the_driver_version(tmp_path: Path) -> None:
    root = link_render_nodes(tmp_path, renderD128="0000:05:00.0")

    gpus, driver = amd.read(printed("amd-smi-rocm6-driver-before-6.1.json"), root)

    assert (gpus[0].memory_mib, driver) == (65520, "6.3.6")


def test_amd_object_of_rocm_7(tmp_path: Path) -> None:
    root = link_render_nodes(tmp_path, renderD128="0000:05:00.0")

    assert amd.read(printed("amd-smi-rocm7.json"), root) == (
        (Gpu("/dev/dri/renderD128", "AMD Instinct MI355X", 294896),),
        "6.14.14",
    )


def test_amd_gpu_without_render_node_is_skipped_and_unreadable_memory_is_0(
    tmp_path: Path,
) -> None:
    root = link_render_nodes(tmp_path, renderD128="0000:26:00.0")

    assert amd.read(printed("amd-smi-rocm7-without-driver.json"), root) == (
        (Gpu("/dev/dri/renderD128", "AMD Radeon PRO W7900", 0),),
        None,
    )


def test_amd_two_partitions_of_one_card_are_one_gpu(tmp_path: Path) -> None:
    root = link_render_nodes(tmp_path, renderD128="0000:05:00.0")
    entry = {"asic": {"market_name": "X"}, "bus": {"bdf": "0000:05:00.0"}}

    gpus, _ = amd.read(Finished(0, json.dumps([entry, entry])), root)

    assert [gpu.id for gpu in gpus] == ["/dev/dri/renderD128"]


def test_amd_bus_address_in_capitals_finds_its_node(tmp_path: Path) -> None:
    root = link_render_nodes(tmp_path, renderD128="0000:c1:00.0")
    entry = {"asic": {"market_name": "X"}, "bus": {"bdf": "0000:C1:00.0"}}

    gpus, _ = amd.read(Finished(0, json.dumps([entry])), root)

    assert [gpu.id for gpu in gpus] == ["/dev/dri/renderD128"]


@pytest.mark.parametrize("bdf", ["../../../etc/x", "", None, 5, "0000:05:00.0/../x", "05:00.0"])
def test_amd_bus_address_that_is_none_is_never_looked_up(tmp_path: Path, bdf: object) -> None:
    root = link_render_nodes(tmp_path, renderD128="0000:05:00.0")
    entry = {"asic": {"market_name": "X"}, "bus": {"bdf": bdf}}

    assert amd.read(Finished(0, json.dumps([entry])), root) == ((), None)


def test_amd_link_to_something_else_than_a_render_node_is_skipped(tmp_path: Path) -> None:
    root = link_render_nodes(tmp_path, card0="0000:05:00.0")

    gpus, driver = amd.read(printed("amd-smi-rocm7.json"), root)

    assert (gpus, driver) == ((), "6.14.14")


async def test_amd_driver_is_asked_for_first_and_left_out_after_an_error(tmp_path: Path) -> None:
    root = link_render_nodes(tmp_path, renderD128="0000:26:00.0")
    unknown = Finished(2, err="amd-smi static: error: unrecognized arguments: --driver\n")
    commands = FakeCommands({"docker": [unknown, printed("amd-smi-rocm7-without-driver.json")]})

    gpus, driver = await amd.detect(commands, root)

    assert commands.asked == [(*AMD_SMI, "--driver"), AMD_SMI]
    assert commands.timeouts == [120.0, 120.0]
    assert (len(gpus), driver) == (1, None)


@pytest.mark.parametrize(
    "answer",
    [
        CommandTimedOut("docker took longer than 120 s"),
        CommandMissing("docker cannot be run"),
        Finished(0, "not JSON"),
    ],
)
async def test_amd_is_asked_again_only_after_a_non_zero_exit(
    tmp_path: Path, answer: Finished | Exception
) -> None:
    commands = FakeCommands({"docker": answer})

    with pytest.raises((CommandTimedOut, CommandMissing, DetectionError)):
        await amd.detect(commands, tmp_path)

    assert len(commands.asked) == 1


# --- Tenstorrent


def boards(name: str) -> list[tuple[str, str, int]]:
    gpus = tenstorrent.read(printed(name))
    return [(gpu.id, gpu.name, gpu.memory_mib // GIB) for gpu in gpus]


def test_tenstorrent_right_half_adds_its_memory_and_is_dropped_without_a_left_one() -> None:
    assert boards("tt-smi-two-n300.json") == [("0", "n300", 24), ("1", "n300", 24)]


def test_tenstorrent_chips_of_a_galaxy_share_a_board_id_and_are_devices_each() -> None:
    assert boards("tt-smi-wormhole-galaxy.json") == [
        (str(index), "tt-galaxy-wh", 12) for index in range(32)
    ]


def test_tenstorrent_blackhole_chips_stand_alone_under_their_products_name() -> None:
    assert boards("tt-smi-blackhole-boards.json") == [
        ("0", "p100a", 28),
        ("1", "p100a", 28),
        ("2", "p100a", 28),
        ("3", "p150", 32),
        ("4", "p150", 32),
        ("5", "p300", 32),
        ("6", "p300", 32),
        ("7", "tt-galaxy-bh", 32),
        ("8", "tt-galaxy-bh", 32),
    ]


def test_tenstorrent_remote_blackhole_chip_belongs_to_the_local_one_of_its_board_and_name() -> (
    None
):
    assert boards("tt-smi-blackhole-remote.json") == [("0", "p300", 64)]


def test_tenstorrent_left_halves_come_first_then_boards_and_unknown_chips_in_order() -> None:
    assert boards("tt-smi-mixed.json") == [
        ("0", "n150", 12),
        ("1", "n150", 12),
        ("2", "n300", 24),
        ("3", "wibble", 0),
    ]


def test_tenstorrent_chips_without_a_board_id_are_not_merged() -> None:
    chip = {"board_info": {"board_type": "n150", "bus_id": "0000:01:00.0"}}

    gpus = tenstorrent.read(Finished(0, json.dumps({"device_info": [chip, chip]})))

    assert [gpu.memory_mib for gpu in gpus] == [12 * GIB, 12 * GIB]


async def test_tenstorrent_driver_is_read_from_the_kernel_module(tmp_path: Path) -> None:
    version = tmp_path / "sys/module/tenstorrent/version"
    version.parent.mkdir(parents=True)
    version.write_text("2.3.0\n")
    commands = FakeCommands({"docker": printed("tt-smi-two-n300.json")})

    gpus, driver = await tenstorrent.detect(commands, tmp_path)

    assert (len(gpus), driver) == (2, "2.3.0")
    assert commands.asked == [
        (
            *("docker", "run", "--rm", "--device", "/dev/tenstorrent"),
            *("dstackai/tt-smi:latest", "-s"),
        )
    ]


def test_tenstorrent_without_a_version_file_has_no_driver_version(tmp_path: Path) -> None:
    assert tenstorrent.driver_version(tmp_path) is None


# --- versions and numbers


@pytest.mark.parametrize(
    "text",
    ["N/A", "[N/A]", "unknown", "[Unknown]", "[Not Supported]", "[not available]", " ", "", None],
)
def test_ways_of_saying_there_is_no_version(text: str | None) -> None:
    assert known_version(text) is None


def test_a_version_is_trimmed() -> None:
    assert known_version(" 550.127.05\n") == "550.127.05"


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("81559", 81559),
        (" 7 ", 7),
        (196592, 196592),
        (16368.0, 16368),
        ("[N/A]", 0),
        ("-5", 0),
        (-5, 0),
        (True, 0),
        (None, 0),
        (float("nan"), 0),
        (float("inf"), 0),
        ("9" * 5000, 0),
        ("9" * 30, 0),
        ({}, 0),
    ],
)
def test_memory_is_a_number_of_mib_or_0(value: object, number: int) -> None:
    assert whole_number(value) == number


# --- all of it: never an error


async def test_host_without_devices_has_no_gpus_and_asks_no_tool(tmp_path: Path) -> None:
    commands = FakeCommands({})

    assert await detect_gpus(commands, event_log(), root=tmp_path) == GpuInventory()
    assert commands.asked == []


@pytest.mark.parametrize(
    ("node", "tool", "output", "count"),
    [
        ("dev/nvidiactl", "nvidia-smi", "nvidia-smi-8xh100.csv", 8),
        ("dev/accel/accel0", "hl-smi", "hl-smi-gaudi2.csv", 4),
        ("dev/tenstorrent/0", "docker", "tt-smi-wormhole-galaxy.json", 32),
        ("dev/kfd", "docker", "amd-smi-rocm6.json", 2),
    ],
)
async def test_each_vendor_is_detected_with_its_own_tool(
    tmp_path: Path, node: str, tool: str, output: str, count: int
) -> None:
    link_render_nodes(tmp_path, renderD128="0000:05:00.0", renderD129="0000:26:00.0")
    make(tmp_path, node)

    inventory = await detect_gpus(
        FakeCommands({tool: printed(output)}), event_log(), root=tmp_path
    )

    assert len(inventory.gpus) == count
    assert inventory.vendor is vendor_of(tmp_path)


async def test_amd_graphics_beside_an_nvidia_card_gives_nvidia(tmp_path: Path) -> None:
    make(tmp_path, "dev/kfd", "dev/nvidiactl")
    commands = FakeCommands({"nvidia-smi": printed("nvidia-smi-8xh100.csv")})

    inventory = await detect_gpus(commands, event_log(), root=tmp_path)

    assert inventory.vendor is GpuVendor.NVIDIA
    assert [argv[0] for argv in commands.asked] == ["nvidia-smi"]


@pytest.mark.parametrize(
    "answer",
    [
        Finished(9, err="NVIDIA-SMI has failed because it couldn't communicate with the driver"),
        Finished(0, ""),
        Finished(-11),
        CommandMissing("no tool"),
        CommandTimedOut("too slow"),
        RuntimeError("a fault of ours"),
    ],
)
@pytest.mark.parametrize(
    ("node", "tool"),
    [
        ("dev/nvidiactl", "nvidia-smi"),
        ("dev/accel/accel0", "hl-smi"),
        ("dev/tenstorrent/0", "docker"),
        ("dev/kfd", "docker"),
    ],
)
async def test_a_failing_tool_means_no_gpus_and_never_an_error(
    tmp_path: Path, node: str, tool: str, answer: Finished | Exception
) -> None:
    make(tmp_path, node)

    inventory = await detect_gpus(FakeCommands({tool: answer}), event_log(), root=tmp_path)

    assert inventory == GpuInventory(GpuVendor.NONE, (), None)


KEYS = [
    "gpu_data",
    "device_info",
    "board_info",
    "board_type",
    "board_id",
    "bus_id",
    "asic",
    "market_name",
    "bus",
    "bdf",
    "vram",
    "size",
    "value",
    "driver",
    "version",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)
    ),
    max_leaves=20,
)


@given(JSON)
@settings(deadline=None)
def test_no_json_however_odd_breaks_a_parser(document: object) -> None:
    finished = Finished(0, json.dumps(document))
    with suppress(DetectionError):
        amd.read(finished, Path("/nowhere"))
    with suppress(DetectionError):
        tenstorrent.read(finished)


@given(st.text(max_size=200))
@settings(deadline=None)
def test_no_text_however_odd_breaks_a_row_parser(text: str) -> None:
    for gpu in (*nvidia.read(Finished(0, text))[0], *intel.read(Finished(0, text))):
        assert gpu.id
        assert gpu.memory_mib >= 0


@pytest.mark.parametrize("text", ["[" * 100_000, "", "null", '"x"', '{"gpu_data": 5}'])
def test_output_that_is_no_list_of_gpus_is_a_detection_error(text: str) -> None:
    with pytest.raises(DetectionError):
        amd.read(Finished(0, text), Path("/nowhere"))
    with pytest.raises(DetectionError):
        tenstorrent.read(Finished(0, text))
