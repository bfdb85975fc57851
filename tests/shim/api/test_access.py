"""Who is answered: by the names in a request, and by who holds the other end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dstack_shim.api.access import AccessCheck
from dstack_shim.api.server import Server, listen
from dstack_shim.host.callers import Address, Caller, Callers
from tests.shim.api.test_server import free_port


class StandIn(Callers):
    """Answers what it is told, and counts."""

    def __init__(self, answer: Caller | Exception, *, sees_everybody: bool = True) -> None:
        self._answer = answer
        self.sees_everybody = sees_everybody
        self.looks = 0

    def look_up(self, caller: Address, called: Address) -> Caller:
        assert caller[0] == called[0] == "127.0.0.1"
        self.looks += 1
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


async def here(_: Request) -> Response:
    return PlainTextResponse("here")


@asynccontextmanager
async def served(callers: Callers | None) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=[Route("/api/healthcheck", here), Route("/api/tasks", here)])
    with listen(free_port()) as sock:
        server = Server(AccessCheck(app, callers), sock)
        server.start()
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{sock.getsockname()[1]}"
        ) as client:
            yield client
        server.stop_accepting()
        await server.drain(1)


@pytest.fixture(params=["/api/healthcheck", "/api/tasks"])
def path(request: pytest.FixtureRequest) -> str:
    path: str = request.param
    return path


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "LocalHost:65535", "127.0.0.1", "127.0.0.1:80", "[::1]:9"]
)
async def test_our_names_are_answered_with_any_port(path: str, host: str) -> None:
    async with served(None) as client:
        answer = await client.get(path, headers={"Host": host})
    assert (answer.status_code, answer.text) == (200, "here")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "evil:80", "localhost:", "localhost:80:80", "::1"],
)
async def test_another_host_is_refused_by_name(path: str, host: str) -> None:
    async with served(None) as client:
        answer = await client.get(path, headers={"Host": host})
    assert answer.status_code == 403
    assert answer.text.startswith("Host: expected localhost")


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost", "null", ""])
async def test_a_web_page_is_refused(path: str, origin: str) -> None:
    async with served(None) as client:
        answer = await client.get(path, headers={"Origin": origin})
    assert answer.status_code == 403
    assert answer.text.startswith("Origin:")


async def test_a_job_sees_the_healthcheck_and_nothing_else() -> None:
    async with served(StandIn(Caller.CONTAINER)) as client:
        assert (await client.get("/api/healthcheck")).status_code == 200
        refused = await client.get("/api/tasks")
    assert (refused.status_code, refused.headers["content-type"]) == (
        403,
        "text/plain; charset=utf-8",
    )
    assert "inside a container" in refused.text


async def test_a_connection_is_looked_up_once() -> None:
    callers = StandIn(Caller.HOST)
    async with served(callers) as client:
        for _ in range(3):
            assert (await client.get("/api/tasks")).status_code == 200
    assert callers.looks == 1


@pytest.mark.parametrize(("sees_everybody", "status"), [(True, 403), (False, 200)])
async def test_who_cannot_be_found_is_refused_only_where_everybody_can_be_seen(
    sees_everybody: bool, status: int
) -> None:
    async with served(StandIn(Caller.UNKNOWN, sees_everybody=sees_everybody)) as client:
        assert (await client.get("/api/tasks")).status_code == status


async def test_a_look_that_fails_shuts_nobody_out() -> None:
    async with served(StandIn(ValueError("an odd line"))) as client:
        assert (await client.get("/api/tasks")).status_code == 200
        assert (await client.get("/api/tasks")).status_code == 200
