"""A typed client of the shim's API, for tools, test suites and benchmarks.

The one place on the calling side that knows paths and methods. It needs the extra ``client``.
"""

from types import TracebackType
from typing import Any, Final, TypeVar
from urllib.parse import quote

import httpx
from dstack_shim_contracts.api import (
    DEFAULT_PORT,
    ComponentInstallRequest,
    Components,
    HealthcheckResponse,
    InstanceHealth,
    InstanceInfo,
    ShutdownRefusal,
    ShutdownRequest,
    TaskConfig,
    TaskInfo,
    TaskList,
    TaskListItem,
    TerminateRequest,
)
from dstack_shim_contracts.codec import decode, encode
from dstack_shim_contracts.errors import (
    BodyError,
    ShimResponseError,
    ShimUnreachable,
    ShutdownRefused,
    UnexpectedAnswer,
)
from dstack_shim_contracts.wire import parse_json

REQUEST_TIMEOUT: Final = 9.0
"""Seconds that servers give every call, in all their releases."""

T = TypeVar("T")


class ShimClient:
    """Calls one shim. Close it, or use it as a context manager.

    ``shim`` is a port on localhost or a base URL. ``timeout`` in seconds holds for each call.
    Another ``transport`` reaches shims by other ways, a Unix socket for one.

    Every method raises ShimUnreachable without an answer, ShimResponseError for an error status,
    UnexpectedAnswer for a body that breaks the contract.
    """

    def __init__(
        self,
        shim: int | str = DEFAULT_PORT,
        *,
        timeout: float = REQUEST_TIMEOUT,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=f"http://localhost:{shim}" if isinstance(shim, int) else shim,
            timeout=timeout,
            transport=transport,
            # A shim is on this host or at the end of a tunnel, never behind a proxy.
            trust_env=False,
        )

    def __enter__(self) -> "ShimClient":  # noqa: PYI034 -- Self is not in Python 3.10
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def healthcheck(self) -> HealthcheckResponse:
        """Which shim answers, and what it promises."""
        return self._get(HealthcheckResponse, "/api/healthcheck")

    def shutdown(self, request: ShutdownRequest | None = None) -> None:
        """Ask the shim to stop serving and exit, or to make way for the file that waits.

        Raises ShutdownRefused if the request has ``only_if_safe`` and something is in the way.
        """
        request = request or ShutdownRequest()
        try:
            self._call("POST", "/api/shutdown", request)
        except ShimResponseError as error:
            if error.status != httpx.codes.CONFLICT or not request.only_if_safe:
                raise
            raise ShutdownRefused(_refusal(error.message)) from None

    def instance_health(self) -> InstanceHealth:
        """What DCGM says. Shims before 0.19.22 answer 404."""
        return self._get(InstanceHealth, "/api/instance/health")

    def instance_info(self) -> InstanceInfo:
        """GPU vendor and driver. Shims before 0.21.0 answer 404."""
        return self._get(InstanceInfo, "/api/instance/info")

    def components(self) -> Components:
        """The installed programs. Shims before 0.20.0 answer 404."""
        return self._get(Components, "/api/components")

    def install_component(self, request: ComponentInstallRequest) -> None:
        """Begin to install a component; its entry tells how that goes."""
        self._call("POST", "/api/components/install", request)

    def tasks(self) -> tuple[TaskListItem, ...]:
        """All tasks, terminated ones included."""
        return self._get(TaskList, "/api/tasks").tasks

    def submit(self, config: TaskConfig) -> None:
        """Submit a task. 409 if its id is known already."""
        self._call("POST", "/api/tasks", config)

    def task(self, task_id: str) -> TaskInfo:
        """One task. 404 if its id is unknown."""
        return self._get(TaskInfo, _task_path(task_id))

    def terminate(self, task_id: str, request: TerminateRequest | None = None) -> TaskInfo:
        """Terminate a task, whatever its status."""
        path = f"{_task_path(task_id)}/terminate"
        return _read(TaskInfo, self._call("POST", path, request or TerminateRequest()))

    def remove(self, task_id: str) -> None:
        """Remove a terminated task. 409 if it is not terminated."""
        self._call("POST", f"{_task_path(task_id)}/remove")

    def task_metrics(self, task_id: str) -> str:
        """DCGM metrics of a task's GPUs in Prometheus text. 404 without an exporter."""
        return self._call("GET", f"/metrics/tasks/{quote(task_id, safe='')}").text

    def document(self, path: str) -> object:
        """The JSON of any GET route as it came, for those who judge it themselves."""
        response = self._call("GET", path)
        try:
            return parse_json(response.content)
        except BodyError as error:
            raise UnexpectedAnswer(f"GET {path}: {error}") from None

    def _get(self, shape: type[T], path: str) -> T:
        return _read(shape, self._call("GET", path))

    def _call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        content = None if body is None else encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            response = self._http.request(method, path, content=content, headers=headers)
        except httpx.RequestError as error:
            raise ShimUnreachable(f"{method} {path}: {error!r}") from error
        if response.status_code != httpx.codes.OK:
            raise ShimResponseError(response.status_code, response.text.strip())
        return response


def _task_path(task_id: str) -> str:
    return f"/api/tasks/{quote(task_id, safe='')}"


def _refusal(text: str) -> ShutdownRefusal:
    try:
        return decode(ShutdownRefusal, text)
    except BodyError as error:
        raise UnexpectedAnswer(f"POST /api/shutdown: 409, {error}") from None


def _read(shape: type[T], response: httpx.Response) -> T:
    try:
        return decode(shape, response.content)
    except BodyError as error:
        request = response.request
        raise UnexpectedAnswer(f"{request.method} {request.url.path}: {error}") from None
