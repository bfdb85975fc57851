"""Reading a request's body: its type, its size, its shape."""

from __future__ import annotations

from typing import TypeVar

from dstack_shim_contracts.api import MAX_BODY_BYTES
from dstack_shim_contracts.codec import decode, encode
from dstack_shim_contracts.errors import BodyError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

T = TypeVar("T")

_SWALLOWED = 16 * MAX_BODY_BYTES
"""A body too large is still read, up to here: closed while it sends, a client never sees why."""


async def read_body(request: Request, shape: type[T]) -> T:
    """The body as ``shape``.

    Raises ``HTTPException`` (413, 415) and ``BodyError``.
    """
    kind = request.headers.get("content-type")
    raw = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            raw += chunk
        elif size > _SWALLOWED:
            break
    if size > MAX_BODY_BYTES:
        raise HTTPException(413, f"body: expected at most {MAX_BODY_BYTES} bytes")
    if kind is not None and kind.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "Content-Type: expected application/json")
    if not raw.strip():
        raise BodyError("body", "a JSON object, not an empty body")
    return decode(shape, bytes(raw))


def json_answer(model: object, *, status: int = 200) -> Response:
    """The model as JSON."""
    return Response(encode(model), status_code=status, media_type="application/json")
