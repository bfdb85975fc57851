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


class ShimClient:
    # What dstack itself takes for safe: up to 0.21.3 only terminated, later running too.
    stock = (TaskStatus.TERMINATED,)
    api_v2 = True

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.requests: list[str] = []

    def healthcheck(self) -> Any:
        return self._request("GET", "/api/healthcheck", raise_for_status=True)

    def get_components(self) -> Any:
        return self._request("GET", "/api/components", raise_for_status=True)

    def list_tasks(self) -> list[TaskStatus]:
        response = self._request("GET", "/api/tasks", raise_for_status=True)
        return [TaskStatus(task["status"]) for task in json.loads(response.content)["tasks"]]

    def shutdown(self, *, force: bool) -> bool:
        self._request("POST", "/api/shutdown", {"force": force})
        return True

    def is_safe_to_restart(self) -> bool:
        if not self.api_v2:
            return False
        listed = self.list_tasks()
        safe = self._get_restart_safe_task_statuses()
        return all(status in safe for status in listed)

    def _get_restart_safe_task_statuses(self) -> list[TaskStatus]:
        return list(self.stock)

    def _request(
        self, method: str, path: str, body: object = None, *, raise_for_status: bool = False
    ) -> Any:
        self.requests.append(f"{method} {path}")
        answer = self.answers.get(path, b"\n")
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            if raise_for_status:
                raise ConnectionError(f"{path} answered {answer}")
            return SimpleNamespace(status_code=answer, content=b"")
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        return SimpleNamespace(status_code=200, content=content)
