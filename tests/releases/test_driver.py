"""
The driver the engine's tests use on a real shim: each release's client gets through a task's life.

Here the shim is one of words; that a real one does the work is shown where there is an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.releases import environments
from tests.releases.running import run_inside
from tests.server.stub_shim import StubShim, stub_shim

DRIVER = Path(__file__).with_name("drive_shim.py")
ID = "00000000-0000-4000-8000-000000000001"
TASK: dict[str, object] = {
    "id": ID,
    "status": "running",
    "termination_reason": "",
    "termination_message": "",
    "ports": [],
    "image_pull_progress": None,
}


def drive(version: str, shim: StubShim, *words: str) -> Any:
    python = environments.pristine(version)
    return run_inside(python, DRIVER, str(shim.server_port), *words)


@pytest.mark.parametrize("version", environments.CONTRACT)
def test_a_whole_life_is_driven_and_told(version: str) -> None:
    with stub_shim() as shim:
        shim.documents = {
            "/api/healthcheck": {"service": "dstack-shim", "version": "0.22.5"},
            "/api/tasks": {"tasks": [{"id": ID, "status": "running"}]},
            f"/api/tasks/{ID}": TASK,
        }
        told = drive(version, shim, "life", "--reason", "terminated_by_server")
    assert told["release"] == version
    names = ["healthcheck", "submit", "list", "started", "info", "terminate", "info", "remove"]
    assert [step["step"] for step in told["steps"]] == [*names, "list"]
    assert all("answer" in step for step in told["steps"])
    assert told["steps"][4]["answer"]["status"] == "running"
    assert [request for request in shim.asked if request[0] == "POST"] == [
        ("POST", "/api/tasks"),
        ("POST", f"/api/tasks/{ID}/terminate"),
        ("POST", f"/api/tasks/{ID}/remove"),
    ]


def test_a_step_that_raises_is_told_with_those_before_it() -> None:
    with stub_shim() as shim:
        shim.documents = {"/api/healthcheck": {"service": "dstack-shim", "version": "0.22.5"}}
        with pytest.raises(RuntimeError, match=r'"step": "list", "raised": "ShimResponseStatus'):
            drive("0.22.5", shim, "life")
