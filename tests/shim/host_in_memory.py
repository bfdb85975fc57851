"""A host without a kernel of its own: a home on disk, an engine in memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.record import TaskRecord

from dstack_shim.doctor import Examination, examine
from dstack_shim.engine.container import LABEL_GPUS
from dstack_shim.engine.protocol import (
    LABEL_HOME,
    LABEL_IS_TASK,
    LABEL_TASK_ID,
    ContainerSpec,
    Mount,
)
from dstack_shim.log import event_log
from dstack_shim.settings import Settings
from dstack_shim.store import Store
from tests.lab.fake_engine import FakeEngine, Program

IMAGE = "job:latest"


def kept_ids(seen: Examination) -> tuple[str, ...]:
    """The ids of the tasks that a start would know again."""
    return tuple(task.id for task in seen.kept)


class Host:
    """A home and an engine, and the doctor called to them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.engine = FakeEngine()
        self.engine.images[IMAGE] = Program(after=None)
        self.store = Store(home, event_log())
        self.store.open()

    def record(self, task_id: str, **fields: object) -> Path:
        """A task's directory with its record; the path of the record."""
        name = container_name("job", task_id)
        config = TaskConfig(id=task_id, name="job")
        record = TaskRecord(task_id, **{"config": config, **fields})  # type: ignore[arg-type]  # any of its fields
        self.store.create(name, record)
        return self.home / "runners" / name / "task.json"

    def run(
        self, task_id: str, *, home: str = "", gpus: tuple[str, ...] = (), other_name: str = ""
    ) -> str:
        """A task's running container; its id."""
        name = container_name("job", task_id)
        labels = {
            LABEL_IS_TASK: "true",
            LABEL_TASK_ID: task_id,
            LABEL_HOME: home or str(self.home),
        }
        mount = Mount(f"{self.home}/runners/{name}/runner", "/tmp/runner")
        spec = ContainerSpec(
            other_name or (name if not home else f"{name}-other"),
            IMAGE,
            {**labels, LABEL_GPUS: json.dumps(gpus)},
            mounts=(mount,),
        )

        async def run() -> str:
            container_id = await self.engine.create(spec)
            await self.engine.start(container_id)
            return container_id

        return asyncio.run(run())

    def examine(self) -> Examination:
        """What the doctor says, once it is sure that nothing was touched."""
        before = snapshot(self.home)
        self.engine.calls.clear()
        seen = asyncio.run(examine(Settings(shim_home=str(self.home)), self.engine))
        assert snapshot(self.home) == before
        assert {call.name for call in self.engine.calls} <= {"ping", "list_task_containers"}
        return seen


def snapshot(home: Path) -> dict[str, tuple[object, ...]]:
    return {
        str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns, path.lstat().st_ctime_ns)
        for path in (home, *home.rglob("*"))
    }
