"""A: who is answered at all."""

from __future__ import annotations

import pytest

from tests.conformance.conftest import MakeShim
from tests.conformance.images import Images
from tests.conformance.rows import row
from tests.conformance.shim import Shim

GET = "timeout 20 wget -qO- $api/$1 2>&1 | tr -d '\\n'; echo"


def asks(shim: Shim) -> str:
    """A job on the host's network that asks who is there, then for the tasks."""
    api = f"http://127.0.0.1:{shim.port}/api"
    return f"api={api}; ask() {{ {GET}; }}; ask healthcheck; ask tasks; exit 9"


@row("A58")
@pytest.mark.parametrize("name", ["localhost", "localhost:8080", "127.0.0.1", "127.0.0.1:1"])
def test_our_own_names_are_answered_with_any_port(shim: Shim, name: str) -> None:
    assert shim.get("/api/tasks", headers={"Host": name}).status_code == 200


@row("A58")
@pytest.mark.parametrize("path", ["/api/healthcheck", "/api/tasks"])
@pytest.mark.parametrize("name", ["rebound.example", "rebound.example:10998"])
def test_another_name_is_refused(shim: Shim, path: str, name: str) -> None:
    assert shim.get(path, headers={"Host": name}).status_code == 403


@row("A58")
@pytest.mark.parametrize("origin", ["https://page.example", "http://localhost", "null"])
def test_a_web_page_is_refused(shim: Shim, origin: str) -> None:
    assert shim.get("/api/tasks", headers={"Origin": origin}).status_code == 403


@row("A59")
def test_a_job_is_told_who_is_there_and_nothing_else(shim: Shim, images: Images) -> None:
    told = shim.submit(images.job(asks(shim))).outcome()[1].splitlines()
    assert '"dstack-shim"' in told[0]
    assert "403" in told[1]


@row("A59")
def test_jobs_can_be_answered(new_shim: MakeShim, images: Images) -> None:
    shim = new_shim("--answer-jobs")
    told = shim.submit(images.job(asks(shim))).outcome()[1].splitlines()
    assert '"tasks"' in told[1]
