"""Every cell of the restore matrix on the fake engine, all on one host."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from dstack_shim.errors import TaskNotFound
from tests.evidence import Evidence
from tests.matrix.cells import GOOD, STEPS, Seen, cells, wrong
from tests.matrix.fake_host import FakeHost

CELLS = cells()


def test_the_table_has_every_cell_once_and_no_word_that_nobody_explains() -> None:
    text = (Path(__file__).with_name("expected.md")).read_text("utf-8")
    found = {(cell.record, cell.task, cell.container) for cell in CELLS}
    records, tasks, containers = (
        {cell.record for cell in CELLS},
        {cell.task for cell in CELLS},
        {cell.container for cell in CELLS},
    )
    assert found == set(product(records, tasks, containers))
    assert len(found) == len(CELLS) == 5 * 10 * 11
    assert tasks == set(STEPS)
    for word in {cell.word for cell in CELLS}:
        assert f"\n| {word} |" in text


def test_a_restart_makes_of_every_task_what_the_table_says(
    tmp_path: Path, evidence: Evidence
) -> None:
    """All on one host: none of them costs another anything."""
    host = FakeHost(tmp_path, CELLS)

    async def scene() -> None:
        await host.stage.round()  # what was started is seen to run
        assert wrong(host.seen, CELLS) == {}
        await host.stage.restart()
        await host.stage.round()
        assert wrong(host.seen, CELLS) == {}, "after another restart"
        await _remove_all(host)
        assert host.left() == {cell.task_id for cell in CELLS if cell.word == "unknown"}

    host.stage.play(scene)
    evidence.write("matrix", matrix_cells=len(CELLS), census_violations=0)


def test_a_word_of_the_table_claims_all_there_is_to_see() -> None:
    (cell,) = (
        cell
        for cell in CELLS
        if (cell.record, cell.task, cell.container) == (GOOD, "pulling", "none")
    )
    assert cell.expected() == Seen(
        "terminated",
        "executor_error",
        "interrupted while pulling: the shim was restarted",
        container="none",
    )


async def _remove_all(host: FakeHost) -> None:
    """As a server that knows none of these tasks."""
    while tasks := host.stage.core.list():
        for task in tasks:
            await host.stage.terminate(task.id)
            await host.stage.remove(task.id)
            with pytest.raises(TaskNotFound):
                host.stage.core.info(task.id)
        await host.stage.round()
