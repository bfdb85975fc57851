"""Serving on a socket of our own, with real connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dstack_shim.api.server import Server, listen
from dstack_shim.errors import StartupError
from tests.eventually import eventually_async


class Gated:
    """An application whose answers wait for a gate."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.gate = asyncio.Event()

        async def slow(_: Request) -> Response:
            self.arrived.set()
            await self.gate.wait()
            return PlainTextResponse("late")

        async def quick(_: Request) -> Response:
            return PlainTextResponse("here")

        self.app = Starlette(routes=[Route("/slow", slow), Route("/quick", quick)])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with listen(free_port()) as sock:
        yield sock


@pytest.fixture
def base(sock: socket.socket) -> str:
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_only_loopback_is_listened_on(sock: socket.socket) -> None:
    assert sock.getsockname()[0] == "127.0.0.1"


def test_a_taken_port_is_named(sock: socket.socket) -> None:
    port = sock.getsockname()[1]
    with pytest.raises(StartupError, match=str(port)):
        listen(port)


async def test_who_connected_before_the_start_is_answered_after_it(
    sock: socket.socket, base: str
) -> None:
    gated = Gated()
    async with httpx.AsyncClient() as client:
        request = asyncio.ensure_future(client.get(f"{base}/quick"))
        await asyncio.sleep(0)
        server = Server(gated.app, sock)
        server.start()
        assert (await request).text == "here"
    server.stop_accepting()
    await server.drain(1)


async def test_the_second_part_of_an_answer_does_not_wait_until_the_first_is_acknowledged(
    sock: socket.socket, base: str
) -> None:
    held: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for connection in server._state.connections:
            accepted = connection.transport.get_extra_info("socket")
            held.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await PlainTextResponse("here")(scope, receive, send)

    server = Server(app, sock)
    server.start()
    async with httpx.AsyncClient() as client:
        await client.get(base)
    assert [bool(item) for item in held] == [True]
    server.stop_accepting()
    await server.drain(1)


async def test_a_request_under_way_is_answered_in_the_drain(
    sock: socket.socket, base: str
) -> None:
    gated = Gated()
    server = Server(gated.app, sock)
    server.start()
    async with httpx.AsyncClient() as client:
        request = asyncio.ensure_future(client.get(f"{base}/slow"))
        await gated.arrived.wait()
        server.stop_accepting()
        drain = asyncio.ensure_future(server.drain(10))
        await asyncio.sleep(0)
        gated.gate.set()
        assert (await request).text == "late"
        await drain


async def test_what_is_not_answered_in_time_is_cut_off(sock: socket.socket, base: str) -> None:
    gated = Gated()
    server = Server(gated.app, sock)
    server.start()
    async with httpx.AsyncClient() as client:
        request = asyncio.ensure_future(client.get(f"{base}/slow"))
        await gated.arrived.wait()
        server.stop_accepting()
        await server.drain(0.05)
        with pytest.raises(httpx.TransportError):
            await request
    gated.gate.set()


async def test_who_comes_after_the_stop_waits_in_the_backlog_for_the_next_one(
    sock: socket.socket, base: str
) -> None:
    gated = Gated()
    first = Server(gated.app, sock)
    first.start()
    first.stop_accepting()
    await first.drain(1)
    async with httpx.AsyncClient() as client:
        request = asyncio.ensure_future(client.get(f"{base}/quick"))
        await asyncio.sleep(0)
        second = Server(gated.app, sock)
        second.start()
        assert (await request).text == "here"
    second.stop_accepting()
    await second.drain(1)


async def test_an_idle_connection_does_not_hold_up_the_drain(
    sock: socket.socket, base: str
) -> None:
    gated = Gated()
    server = Server(gated.app, sock)
    server.start()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{base}/quick")).text == "here"
        server.stop_accepting()
        await asyncio.wait_for(server.drain(30), 5)


async def test_who_was_accepted_and_asks_a_moment_later_is_answered(
    sock: socket.socket, base: str
) -> None:
    """To close such a connection would be to refuse it: it is not in the backlog any more."""
    server = Server(Gated().app, sock)
    server.start()
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    await eventually_async(lambda: connections(server))
    server.stop_accepting()
    drain = asyncio.ensure_future(server.drain(10))
    await asyncio.sleep(0)
    writer.write(b"GET /quick HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.endswith(b"here")
    assert b"connection: close" in answer.lower()
    await drain
    writer.close()


async def test_who_never_asks_does_not_hold_up_the_drain(sock: socket.socket) -> None:
    server = Server(Gated().app, sock)
    server.start()
    _, writer = await asyncio.open_connection(*sock.getsockname())
    await eventually_async(lambda: connections(server))
    server.stop_accepting()
    await asyncio.wait_for(server.drain(30), 5)
    writer.close()


async def test_a_server_that_is_about_to_go_keeps_no_connection(
    sock: socket.socket, base: str
) -> None:
    server = Server(Gated().app, sock)
    server.start()
    async with httpx.AsyncClient() as client:
        assert "connection" not in (await client.get(f"{base}/quick")).headers
        server.say_goodbye()
        assert (await client.get(f"{base}/quick")).headers["connection"] == "close"
        server.say_goodbye()  # as a drain does that comes after it
        assert (await client.get(f"{base}/quick")).headers["connection"] == "close"
    server.stop_accepting()
    await server.drain(1)


async def connections(server: Server) -> int:
    """How many it has accepted and not closed."""
    return len(server._state.connections)
