"""A: the health of GPUs, with a stand-in for NVIDIA's libdcgm made from its public structures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import lab
from tests.conformance import gpus
from tests.conformance.conftest import MakeShim
from tests.conformance.instance import Instance, command
from tests.conformance.rows import row
from tests.conformance.shim import PATIENCE, Shim
from tests.eventually import eventually

SOURCE = Path(lab.__path__[0], "stand_in_dcgm.c")
FIELDS = {"system", "health", "error_message", "error_code", "entity_group_id", "entity_id"}

GpuHost = Callable[..., Shim]


@pytest.fixture(scope="module")
def library(instance: Instance) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here to compile the stand-in for libdcgm")
    folder = instance.root / "libdcgm"
    folder.mkdir()
    command("gcc", "-shared", "-fPIC", SOURCE, "-o", folder / "libdcgm.so.4")
    return folder


@pytest.fixture
def gpu_host(new_shim: MakeShim, instance: Instance, library: Path) -> Iterator[GpuHost]:
    """Starts a shim on a host with two cards and the library, which is in this mood."""
    mood = library / "mood"

    def start(*arguments: str, how: str = "", **variables: str) -> Shim:
        mood.write_text(how)
        place = {"LD_LIBRARY_PATH": str(library), "STAND_IN_DCGM": str(mood)}
        return new_shim(*arguments, variables=place | variables)

    with gpus.nvidia(instance):
        yield start


def health(shim: Shim) -> Any:
    """What it says within a server's patience."""
    answer = shim.get("/api/instance/health", timeout=PATIENCE)
    assert answer.status_code == 200
    return answer.json()["dcgm"]


def told(shim: Shim) -> Any:
    """The health, once there is one."""
    return eventually(lambda: health(shim), within=20, saying="there is a health")


@row("A28")
def test_healthy_gpus_are_0_and_an_empty_list(gpu_host: GpuHost) -> None:
    assert told(gpu_host()) == {"overall_health": 0, "incidents": []}


@row("A28")
def test_incidents_have_all_their_fields(gpu_host: GpuHost) -> None:
    found = told(gpu_host(how="fail"))
    assert found["overall_health"] == 20
    assert [one["health"] for one in found["incidents"]] == [20, 10]
    assert [one["entity_id"] for one in found["incidents"]] == [0, 1]
    assert all(set(one) >= FIELDS for one in found["incidents"])


@row("A28")
@pytest.mark.parametrize("how", ["odd-overall", "fail odd-incident"])
def test_other_numbers_never_reach_a_server(how: str, gpu_host: GpuHost) -> None:
    found = health(gpu_host(how=how)) or {"overall_health": 0, "incidents": []}
    assert found["overall_health"] in {0, 10, 20}
    assert {one["health"] for one in found["incidents"]} <= {0, 10, 20}


@row("A27")
@pytest.mark.parametrize("how", ["crash", "hang", "lost", "init-fails"])
def test_library_that_fails_is_no_health_and_no_harm(how: str, gpu_host: GpuHost) -> None:
    shim = gpu_host(how=how)
    assert health(shim) is None
    assert shim.get("/api/healthcheck").status_code == 200


@row("L13", "A28")
@pytest.mark.parametrize("how", ["flag", "variable", "default"])
def test_host_engine_is_reached_at_its_address(how: str, gpu_host: GpuHost) -> None:
    address = "10.0.0.1:5555"
    arguments = [f"--dcgm-address={address}"] if how == "flag" else []
    variables = {"DSTACK_DCGM_ADDRESS": address} if how == "variable" else {}
    found = told(gpu_host(*arguments, how="fail", **variables))
    connected = "embedded" if how == "default" else address
    assert connected in found["incidents"][0]["error_message"]
