"""Cells on the tests' fake engine, a real directory and sets for what tasks take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.shapes import structure

from dstack_shim.engine.protocol import ContainerState
from dstack_shim.errors import TaskNotFound
from tests.lab.fake_engine import FakeContainer, Program
from tests.matrix import records
from tests.matrix.cells import LINES, Cell, Seen
from tests.matrix.kept import kept_record
from tests.shim.tasks.stage import Stage
from tests.simulation.shim import spec_of

IMAGE = "runs-on"
LONG_AGO = 600.0  # in the same boot
_NONE = "none"
_ENDED = {
    "exited 0": (ContainerState.EXITED, 0),
    "exited 7": (ContainerState.EXITED, 7),
    "OOM": (ContainerState.EXITED, 137),
    "dead": (ContainerState.DEAD, 7),
    "removing": (ContainerState.REMOVING, 0),
}
_ALIVE = {
    "running": ContainerState.RUNNING,
    "paused": ContainerState.PAUSED,
    "two": ContainerState.RUNNING,
}


class FakeHost:
    """A host on which a shim was killed; all its cells are restored at once."""

    def __init__(self, home: Path, cells: Sequence[Cell]) -> None:
        self.stage = Stage(home)
        self.stage.engine.images[f"{IMAGE}:latest"] = Program(after=None)
        self.stage.all_gpus = tuple(_gpu(cell) for cell in cells)
        self._cells = tuple(cells)
        self._raw: dict[Cell, bytes | None] = {}
        self._boxes: dict[Cell, FakeContainer] = {}
        self._before: dict[Cell, tuple[object, ...]] = {}
        for cell in cells:
            self._place(cell)

    def _place(self, cell: Cell) -> None:
        config = records.config(cell, IMAGE, _key(cell))
        dir = self._dir(cell)
        (dir / "runner").mkdir(parents=True)
        now, boot_id = self.stage.clock.now(), self.stage.boot.id
        raw = records.record(cell, config, gpu=_gpu(cell), boot_id=str(boot_id), now=now)
        if raw is not None:
            (dir / "task.json").write_bytes(raw)
        self._raw[cell] = raw
        if cell.has_things:
            keys = self.stage.host.keys.get(records.USER, ())
            self.stage.host.keys[records.USER] = (*keys, _key(cell))
            self.stage.host.mounted[cell.task_id] = None
        if cell.container != _NONE:
            self._boxes[cell] = self._make_container(cell, structure(TaskConfig, config))
            self._before[cell] = _state(self._boxes[cell])

    def _make_container(self, cell: Cell, config: TaskConfig) -> FakeContainer:
        now = self.stage.clock.now()
        dir = self._dir(cell).name
        spec = spec_of(config, dir, dir, (_gpu(cell),), home=str(self.stage.home))
        box = FakeContainer(f"{cell.number:064x}", spec, created=now - 1)
        if cell.container == "created long ago":
            box.created = now - LONG_AGO
        elif cell.container in _ENDED:
            box.state, box.exit_code = _ENDED[cell.container]
            box.started_at, box.finished_at = now - 2, now - 1
            box.oom_killed = cell.container == "OOM"
            box.output = list(LINES) if box.exit_code == 7 else []
        elif cell.container in _ALIVE:
            box.state, box.starts, box.started_at = _ALIVE[cell.container], 1, now - 1
        if cell.container == "two":
            other = FakeContainer(f"{cell.number + 10_000:064x}", spec, created=now - 9)
            other.state, other.exit_code, other.output = ContainerState.EXITED, 7, list(LINES)
            self.stage.engine.containers[other.id] = other
        self.stage.engine.containers[box.id] = box
        return box

    # Looking at it.

    def seen(self, cell: Cell) -> Seen:
        """How the cell looks now."""
        try:
            info = self.stage.core.info(cell.task_id)
        except TaskNotFound:
            told = ("unknown", "", "")
        else:
            told = (info.status.value, info.termination_reason, info.termination_message)
        return Seen(
            *told,
            has_gpu=self.stage.gpus.held().get(cell.task_id, ()) == (_gpu(cell),),
            has_volume=cell.task_id in self.stage.host.mounted,
            has_key=_key(cell) in self.stage.host.keys.get(records.USER, ()),
            container=self._container(cell),
            record=kept_record(self._dir(cell), self._raw[cell]),
        )

    def _container(self, cell: Cell) -> str:
        box = self._boxes.get(cell)
        if box is None:
            return _NONE
        if box.id not in self.stage.engine.containers:
            return "gone"
        if _state(box) == self._before[cell]:
            return "as it was"
        if box.state is ContainerState.RUNNING and box.starts == 1:
            return "started"
        return "stopped" if box.state is ContainerState.EXITED else str(_state(box))

    def left(self) -> set[str]:
        """Which cells anything is left of: a directory, container, mount, key or GPU."""
        runners = self.stage.home / "runners"
        names = {self._dir(cell).name: cell.task_id for cell in self._cells}
        keys = self.stage.host.keys.get(records.USER, ())
        return {
            *(names[dir.name] for dir in runners.iterdir()),
            *(names[box.spec.name] for box in self.stage.engine.containers.values()),
            *self.stage.host.mounted,
            *self.stage.gpus.held(),
            *(cell.task_id for cell in self._cells if _key(cell) in keys),
        }

    def _dir(self, cell: Cell) -> Path:
        return self.stage.home / "runners" / container_name(cell.task_id, cell.task_id)


def _state(box: FakeContainer) -> tuple[object, ...]:
    return box.state, box.starts, box.started_at, box.finished_at, box.exit_code


def _gpu(cell: Cell) -> str:
    return f"GPU of {cell.task_id}"


def _key(cell: Cell) -> str:
    return f"key of {cell.task_id}"
