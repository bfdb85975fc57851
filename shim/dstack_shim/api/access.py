"""Who may ask: nobody through a browser, and no job.

The API listens on loopback, which two kinds of strangers can reach: a web page in a browser on
the host or behind a tunnel (it sends ``Origin``, or after DNS rebinding a ``Host`` of its own),
and a job with the host's network. Stock servers send ``localhost`` with or without a port.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from dstack_shim.api.errors import text
from dstack_shim.host.callers import Caller, Callers
from dstack_shim.log import event_log

OPEN_TO_ALL = "/api/healthcheck"
_OUR_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_MADE_FOR = "caller"  # the key of a connection's state


class AccessCheck:
    """Answers 403 instead of passing a request on to ``app``.

    ``callers`` None lets jobs ask, too.
    """

    def __init__(self, app: ASGIApp, callers: Callers | None) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        refusal = _from_elsewhere(scope) or await self._from_a_job(scope)
        if not refusal:
            return await self._app(scope, receive, send)
        event_log().warning("api.stranger", path=scope["path"], refused=refusal)
        return await text(403, refusal)(scope, receive, send)

    async def _from_a_job(self, scope: Scope) -> str:
        if self._callers is None or scope["path"] == OPEN_TO_ALL:
            return ""
        kind = await self._kind(scope, self._callers)
        if kind is Caller.CONTAINER:
            return "requests from inside a container are not answered"
        if kind is Caller.UNKNOWN and self._callers.sees_everybody:
            # Sent and gone, or passed to somebody: nobody waits for an answer.
            return "who asks cannot be found"
        return ""

    async def _kind(self, scope: Scope, callers: Callers) -> Caller:
        """Looked up at a connection's first request, in a thread: it may walk all open files."""
        connection: Connection = scope["state"][_MADE_FOR]
        if connection.caller is None:
            look = asyncio.to_thread(callers.look_up, scope["client"], scope["server"])
            connection.caller = asyncio.ensure_future(look)
        try:
            return await asyncio.shield(connection.caller)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not shut the server out
            event_log().fault("api.caller_unknown", error)
            return Caller.HOST


class Connection:
    """What is known of one connection; every request on it sees the same."""

    def __init__(self) -> None:
        self.caller: asyncio.Future[Caller] | None = None

    @classmethod
    def state(cls) -> dict[str, Any]:
        """The ASGI state of a new connection."""
        return {_MADE_FOR: cls()}


def _from_elsewhere(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"origin":
            return "Origin: requests of web pages are not answered"
        if name == b"host" and not _is_ours(value.decode("latin-1")):
            return "Host: expected localhost or 127.0.0.1, with or without a port"
    return ""


def _is_ours(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, "0"
    return name.lower() in _OUR_NAMES and port.isascii() and port.isdigit()
