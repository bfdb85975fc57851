"""K: a shim replaced in place, by a file made of the judged one under another version."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.conftest import MakeShim
from tests.conformance.images import Images
from tests.conformance.instance import Instance
from tests.conformance.rows import row
from tests.conformance.shim import Shim, free_port
from tests.conformance.web import Web
from tests.eventually import eventually
from tests.lab.shim_files import WHEN_CHECKED, WHEN_TAKING_OVER, variant

NEXT = "0.22.5.post7"

Offer = Callable[..., bytes]


@pytest.fixture
def shim(new_shim: MakeShim, instance: Instance, executable: Path) -> Shim:
    """One that runs from a path of its own, as installed."""
    if not _can_take_over(executable):
        pytest.skip("the judged shim is not replaced in place: it has no such document")
    folder = instance.root / f"replaced-{free_port()}"
    folder.mkdir()
    made = new_shim(start=False)
    made.executable = folder / "dstack-shim"
    made.executable.write_bytes(executable.read_bytes())
    made.executable.chmod(0o755)
    return made.start()


def _can_take_over(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            document = json.loads(archive.read("dstack-shim.json"))
    except (zipfile.BadZipFile, KeyError):
        return False
    return bool(document.get("takeover") == 1)


@pytest.fixture
def offer(shim: Shim, executable: Path, web: Web) -> Offer:
    """Install the next version, sound or not, until it waits beside the path; its content."""

    def install(**how: str) -> bytes:
        content = variant(executable, NEXT, **how)  # type: ignore[arg-type]  # names of strings
        body = {"name": "dstack-shim", "url": web.serve(f"/{free_port()}", content)}
        assert shim.post("/api/components/install", body).status_code == 200
        eventually(lambda: component(shim) == (NEXT, "installed"), within=15)
        return content

    return install


def component(shim: Shim) -> tuple[str, str]:
    url = f"http://localhost:{shim.port}/api/components"
    listed = httpx.get(url, trust_env=False, timeout=9).json()["components"]
    (found,) = [one for one in listed if one["name"] == "dstack-shim"]
    return found["version"], found["status"]


def healthcheck(shim: Shim) -> Any:
    """On a connection of its own each time: one that is refused is an error of the case."""
    url = f"http://localhost:{shim.port}/api/healthcheck"
    return httpx.get(url, trust_env=False, timeout=9).json()


@row("K23", "K3")
def test_new_file_waits_beside_the_old_one(shim: Shim, offer: Offer) -> None:
    before = shim.executable.read_bytes()
    version = healthcheck(shim)["version"]
    offer()
    assert shim.executable.read_bytes() == before
    assert healthcheck(shim)["version"] == version
    shim.restart()  # whatever dies meanwhile
    assert healthcheck(shim)["version"] == version


@row("K24", "K23", "A24")
def test_shutdown_makes_it_the_next_program_of_the_process(
    shim: Shim, offer: Offer, images: Images
) -> None:
    task = shim.run(images.idle)
    info = task.info()
    content = offer()
    assert shim.post("/api/shutdown", {"force": False}).status_code == 200
    eventually(lambda: healthcheck(shim)["version"] == NEXT, within=30, every=0.02)
    assert shim.alive
    assert healthcheck(shim)["implementation"]["generation"] == 1
    assert task.info() == info
    eventually(lambda: shim.executable.read_bytes() == content, within=10)


@row("K25", "K24", "K23")
@pytest.mark.parametrize("when", [WHEN_CHECKED, WHEN_TAKING_OVER], ids=["checked", "taking-over"])
def test_file_that_does_not_serve_is_given_up(
    when: str, shim: Shim, offer: Offer, images: Images
) -> None:
    before = shim.executable.read_bytes()
    version = healthcheck(shim)["version"]
    task = shim.run(images.idle)
    offer(shell=f"{when}exit 3")
    assert shim.post("/api/shutdown", {"force": False}).status_code == 200
    if when == WHEN_TAKING_OVER:
        eventually(lambda: not shim.alive, within=30, saying="the process has ended")
        shim.start()  # as its supervisor does
    eventually(lambda: component(shim) == (NEXT, "error"), within=30)
    assert shim.alive
    assert healthcheck(shim)["version"] == version
    assert shim.executable.read_bytes() == before
    assert task.status == "running"
