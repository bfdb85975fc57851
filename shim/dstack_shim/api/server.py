"""Serves the application on a listening socket that is ours, not the server library's.

uvicorn's protocol speaks HTTP; accepting is done here, one ``accept`` per readiness event,
because a replacement in place hands the listening socket to its successor: clients that were
not accepted wait in the backlog, and none may be accepted and then dropped (uvicorn's own
server shows a rare reset at its last drain).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from dstack_shim.api.access import Connection
from dstack_shim.errors import StartupError

HOST = "127.0.0.1"
_BACKLOG = 1024
_GOODBYE = (b"connection", b"close")
_FIRST_WORD = 0.5  # s for a connection that was accepted to ask something
_LOOK = 0.01  # s between looks at the connections that still answer


def listen(port: int) -> socket.socket:
    """The API's listening socket: loopback only.

    Raises ``StartupError`` when the port is taken.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HOST, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise StartupError(f"cannot listen on {HOST}:{port}: {error.strerror}") from error
    return sock


class Server:
    """Accepts connections on one socket and answers them with one application."""

    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        self._sock = sock
        self._config = Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
        )
        self._config.load()
        self._state = ServerState()
        self._connecting: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Answer from now on; who connected before waits in the backlog and is answered too."""
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def stop_accepting(self) -> None:
        """Accept nobody new; they wait in the backlog for whoever has the socket next."""
        asyncio.get_running_loop().remove_reader(self._sock)

    def say_goodbye(self) -> None:
        """Close each connection with its next answer, so that none is idle when all are closed.

        Also part of :meth:`drain`; said once however often.
        """
        self._state.default_headers = [_GOODBYE]

    async def drain(self, limit: float) -> None:
        """Answer what is under way, for at most ``limit`` seconds, then close everything.

        Who was accepted and has not asked yet is waited for too, if not as long: to close such a
        connection would be to refuse it.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self.say_goodbye()
        if self._connecting:
            await asyncio.wait(self._connecting, timeout=limit)
        # Polled: the library tells nobody when a connection closes
        while self._state.connections and loop.time() < begun + limit:
            await asyncio.sleep(_LOOK)
            is_late = loop.time() >= begun + _FIRST_WORD
            for connection in tuple(self._state.connections):
                asked = getattr(connection, "cycle", None) is not None
                if (asked or is_late) and not _is_closing(connection):
                    connection.shutdown()
        for connection in tuple(self._state.connections):
            transport = connection.transport
            if transport is not None:
                transport.abort()

    def _accept(self) -> None:
        try:
            connection, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        connection.setblocking(False)
        # Head and body leave in two pieces; else the second waits for the client's delayed
        # acknowledgement of the first, 40 ms. asyncio only does this for sockets made with a
        # protocol number, which accepted ones have of their listener: ours has none.
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.ensure_future(self._serve(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _serve(self, connection: socket.socket) -> None:
        make: Callable[[], asyncio.Protocol] = lambda: H11Protocol(  # noqa: E731
            self._config, self._state, Connection.state()
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(make, connection)
        except OSError:
            connection.close()  # the client is gone again


def _is_closing(connection: Any) -> bool:
    transport = connection.transport
    return transport is None or transport.is_closing()
