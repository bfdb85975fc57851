"""
A server's client module in our own words: the same names and calls as dstack's, nothing more.

Its shim is a dictionary of answers by path; every request is noted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any


class TaskStatus(str, Enum):
    PENDING = "pending"
    PREPARING = "preparing"
    PULLING = "pulling"
    CREATING = "creating"
    RUNNING = "running"
    TERMINATED = "terminated"


class Body:
    """A request model, with the ways to its keys of both generations of models."""

    def __init__(self, **keys: Any) -> None:
        self.keys = keys
        self.name = keys.get("name")

    def dict(self) -> Any:
        return self.keys

    def model_dump(self) -> Any:
        return self.keys


class ShimClient:
    # What dstack itself takes for safe: up to 0.21.3 only terminated, later running too.
    stock = (TaskStatus.TERMINATED,)
    api_v2 = True

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.requests: list[str] = []
        self.bodies: list[Any] = []

    def healthcheck(self) -> Any:
        return self._request("GET", "/api/healthcheck", raise_for_status=True)

    def get_components(self) -> Any:
        return self._request("GET", "/api/components", raise_for_status=True)

    def list_tasks(self) -> list[TaskStatus]:
        response = self._request("GET", "/api/tasks", raise_for_status=True)
        return [TaskStatus(task["status"]) for task in json.loads(response.content)["tasks"]]

    def shutdown(self, *, force: bool) -> bool:
        response = self._request("POST", "/api/shutdown", Body(force=force))
        if response.status_code >= 400:
            raise ConnectionError(f"/api/shutdown answered {response.status_code}")
        return True

    def install_shim(self, url: str) -> None:
        body = Body(name="dstack-shim", url=url)
        self._request("POST", "/api/components/install", body, raise_for_status=True)

    def is_safe_to_restart(self) -> bool:
        if not self.api_v2:
            return False
        listed = self.list_tasks()
        safe = self._get_restart_safe_task_statuses()
        return all(status in safe for status in listed)

    def _get_restart_safe_task_statuses(self) -> list[TaskStatus]:
        return list(self.stock)

    def _request(
        self, method: str, path: str, body: Any = None, *, raise_for_status: bool = False
    ) -> Any:
        self.requests.append(f"{method} {path}")
        if body is not None:
            self.bodies.append((path, body.model_dump()))
        answer = self.answers.get(path, b"\n")
        if isinstance(answer, Exception):
            raise answer
        status, answer = answer if isinstance(answer, tuple) else (200, answer)
        if isinstance(answer, int):
            status, answer = answer, b""
        if raise_for_status and status >= 400:
            raise ConnectionError(f"{path} answered {status}")
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        return SimpleNamespace(status_code=status, content=content)
