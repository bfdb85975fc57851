"""Errors to statuses, in one place."""

from __future__ import annotations

from dstack_shim_contracts.errors import BodyError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dstack_shim import errors
from dstack_shim.api.bodies import json_answer
from dstack_shim.log import event_log

_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (BodyError, 400),
    (errors.InstallRefused, 400),
    (errors.TaskNotFound, 404),
    (errors.TaskExists, 409),
    (errors.TaskNotTerminated, 409),
    (errors.IllegalTransition, 409),
    (errors.InstallInProgress, 409),
    (errors.NoExporter, 404),
    (errors.ExporterFailed, 502),
    (errors.ShuttingDown, 503),
    (errors.ShimError, 500),
)


def text(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An answer as dstack's shim words it: plain text and a line break."""
    return PlainTextResponse(message + "\n", status_code=status, headers=headers)


async def on_known(request: Request, error: Exception) -> Response:
    """Answer an error raised on purpose."""
    status = next(status for kind, status in _STATUSES if isinstance(error, kind))
    event_log().info(
        "api.refused" if status < 500 else "api.failed",
        method=request.method,
        path=request.url.path,
        status=status,
        error=error,
    )
    return text(status, str(error))


async def on_unsafe(request: Request, error: Exception) -> Response:
    """Answer a shutdown that is not safe with the list of what is in the way."""
    assert isinstance(error, errors.ShutdownUnsafe)
    event_log().info("api.refused", path=request.url.path, status=409, error=error)
    return json_answer(error.refusal, status=409)


async def on_http(_: Request, error: Exception) -> Response:
    """Answer what the router refuses: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return text(error.status_code, error.detail, headers)


async def on_unknown(request: Request, error: Exception) -> Response:
    """Answer a fault of ours; its text stays in the log."""
    event_log().fault("api.broken", error, method=request.method, path=request.url.path)
    return text(500, f"internal error: {type(error).__name__}")
