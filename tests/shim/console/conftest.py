from __future__ import annotations

from pathlib import Path

import pytest
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.record import Intent, TaskRecord

from dstack_shim import cli
from dstack_shim.log import event_log
from dstack_shim.store import Store

NOW = 1_700_000_000.0


class Home:
    """A home with records, and the command line called on it; no shim and no engine answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store(path, event_log())
        self.store.open()

    def record(
        self,
        task_id: str,
        *,
        image: str = "image:1",
        name: str = "",
        step: str = "running",
        **fields: object,
    ) -> Path:
        """A task's record; the directory it is in."""
        name = name or f"{task_id}-name"
        config = TaskConfig(id=task_id, name=name, image_name=image)
        intent = Intent(step, NOW - 3600)
        directory = container_name(name, task_id)
        self.store.create(
            directory,
            TaskRecord(task_id, **{"config": config, "intent": intent, **fields}),  # type: ignore[arg-type]  # any of its fields
        )
        return self.path / "runners" / directory

    def ended(self, task_id: str, reason: str = "done_by_runner", message: str = "") -> Path:
        """The record of a task that has ended."""
        return self.record(
            task_id,
            terminated=True,
            termination_reason=reason,
            termination_message=message,
            ended_at=NOW - 60,
            cleaned_up=True,
            gpus=("GPU-1",),
        )

    def call(self, *words: str) -> int:
        """The command line; its exit code."""
        return cli.main([f"--shim-home={self.path}", "--shim-http-port=1", *words])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("time.time", lambda: NOW)
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")
