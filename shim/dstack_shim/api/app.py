"""The routes, over what the daemon passes in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from dstack_shim_contracts.api import (
    ComponentInstallRequest,
    Components,
    HealthcheckResponse,
    InstanceHealth,
    InstanceInfo,
    ShutdownRequest,
    TaskConfig,
    TaskInfo,
    TaskList,
    TaskListItem,
    TerminateRequest,
)
from dstack_shim_contracts.codec import validate_submit
from dstack_shim_contracts.errors import BodyError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dstack_shim.api.bodies import json_answer, read_body
from dstack_shim.api.errors import on_http, on_known, on_unknown, on_unsafe, text
from dstack_shim.errors import ShimError, ShutdownUnsafe

T = TypeVar("T")
_PROMETHEUS = "text/plain; version=0.0.4"
Handler = Callable[[Request], Awaitable[Response]]


class Tasks(Protocol):
    """What the API needs of the core; see :class:`dstack_shim.tasks.core.Core`."""

    async def submit(self, config: TaskConfig) -> None:
        """Accept a task."""

    def list(self) -> tuple[TaskListItem, ...]:
        """Every known task."""

    def info(self, task_id: str) -> TaskInfo:
        """One task."""

    async def terminate(self, task_id: str, reason: str, message: str, timeout: int) -> TaskInfo:
        """End a task."""

    async def remove(self, task_id: str) -> None:
        """Take a terminated task away."""

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` to its end whoever goes away."""


class Shim(Protocol):
    """What the API needs of the daemon."""

    @property
    def tasks(self) -> Tasks:
        """The core."""

    def healthcheck(self) -> HealthcheckResponse:
        """Who answers."""

    async def components(self) -> Components:
        """What is installed."""

    def install(self, request: ComponentInstallRequest) -> None:
        """Begin to install a component."""

    async def instance_health(self) -> InstanceHealth:
        """What DCGM says of the GPUs."""

    async def task_metrics(self, task_id: str) -> str:
        """Prometheus text of the task's GPUs."""

    async def metrics(self) -> str:
        """Prometheus text about the shim itself."""

    def instance_info(self) -> InstanceInfo:
        """Which GPUs this instance has."""

    async def shut_down(self, *, force: bool, only_if_safe: bool = False) -> None:
        """Begin to go away or to be replaced; called again it only adds force.

        Raises ``ShutdownUnsafe`` if it is to be safe and is not.
        """


def make_app(shim: Shim) -> Starlette:
    """The ASGI application."""
    api = _Api(shim)
    app = Starlette(
        routes=[
            _route("/api/healthcheck", GET=api.healthcheck),
            _route("/api/shutdown", POST=api.shutdown),
            _route("/api/instance/health", GET=api.instance_health),
            _route("/api/instance/info", GET=api.instance_info),
            _route("/api/components", GET=api.components),
            _route("/api/components/install", POST=api.install),
            _route("/api/tasks", GET=api.list, POST=api.submit),
            _route("/api/tasks/{id}", GET=api.info),
            _route("/api/tasks/{id}/terminate", POST=api.terminate),
            _route("/api/tasks/{id}/remove", POST=api.remove),
            _route("/metrics", GET=api.metrics),
            _route("/metrics/tasks/{id}", GET=api.task_metrics),
        ],
        exception_handlers={
            ShutdownUnsafe: on_unsafe,
            ShimError: on_known,
            BodyError: on_known,
            HTTPException: on_http,
            Exception: on_unknown,
        },
    )
    app.router.redirect_slashes = False
    return app


def _route(path: str, **handlers: Handler) -> Route:
    """One route for all methods of a path, so that a 405 names every one of them."""

    async def endpoint(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, endpoint, methods=list(handlers))


class _Api:
    """The handlers. What changes something runs to its end even if the client goes away:
    servers give up after 9 s and rely on the rest happening all the same.
    """

    def __init__(self, shim: Shim) -> None:
        self._shim = shim
        self._tasks = shim.tasks

    async def healthcheck(self, _: Request) -> Response:
        return json_answer(self._shim.healthcheck())

    async def shutdown(self, request: Request) -> Response:
        body = await read_body(request, ShutdownRequest)
        await self._shim.shut_down(force=body.force, only_if_safe=body.only_if_safe)
        return text(200, "")

    async def components(self, _: Request) -> Response:
        return json_answer(await self._shim.components())

    async def instance_health(self, _: Request) -> Response:
        return json_answer(await self._shim.instance_health())

    async def task_metrics(self, request: Request) -> Response:
        metrics = await self._shim.task_metrics(request.path_params["id"])
        return PlainTextResponse(metrics, media_type=_PROMETHEUS)

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(await self._shim.metrics(), media_type=_PROMETHEUS)

    async def instance_info(self, _: Request) -> Response:
        return json_answer(self._shim.instance_info())

    async def install(self, request: Request) -> Response:
        self._shim.install(await read_body(request, ComponentInstallRequest))
        return text(200, "")

    async def list(self, _: Request) -> Response:
        return json_answer(TaskList(self._tasks.list()))

    async def submit(self, request: Request) -> Response:
        config = await read_body(request, TaskConfig)
        validate_submit(config)
        await self._finished(self._tasks.submit(config))
        return text(200, "")

    async def info(self, request: Request) -> Response:
        return json_answer(self._tasks.info(request.path_params["id"]))

    async def terminate(self, request: Request) -> Response:
        body = await read_body(request, TerminateRequest)
        return json_answer(
            await self._finished(
                self._tasks.terminate(
                    request.path_params["id"],
                    body.termination_reason,
                    body.termination_message,
                    body.timeout,
                )
            )
        )

    async def remove(self, request: Request) -> Response:
        await self._finished(self._tasks.remove(request.path_params["id"]))
        return text(200, "")

    async def _finished(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._tasks.spawn(work))
