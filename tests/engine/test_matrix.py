"""The restore matrix on a real engine: many cells on one host, a shim started once."""

from __future__ import annotations

from collections.abc import Sequence

import docker
import pytest

from tests.eventually import eventually
from tests.evidence import Evidence
from tests.lab.host import Host
from tests.matrix.cells import Cell, cells, wrong
from tests.matrix.real_host import POSSIBLE, RealHost

BATCH = 50
"""Cells on one host: as many containers are made in the minute in which they are new."""
CELLS = tuple(cell for cell in cells() if cell.container in POSSIBLE)


def sample() -> list[Cell]:
    """Each task with each record once, the containers taking turns."""
    pairs = list(dict.fromkeys((cell.record, cell.task) for cell in CELLS))
    tasks = len({cell.task for cell in CELLS})
    chosen = {
        pair: POSSIBLE[(number + number // tasks) % len(POSSIBLE)]
        for number, pair in enumerate(pairs)
    }
    return [cell for cell in CELLS if chosen[cell.record, cell.task] == cell.container]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_restart_makes_of_every_task_what_the_table_says(
    instance: Host, client: docker.APIClient, evidence: Evidence
) -> None:
    """What the fake only says of containers, an engine does."""
    chosen = evidence.share(CELLS) if evidence.full else sample()
    for start in range(0, len(chosen), BATCH):
        restore(instance, client, chosen[start : start + BATCH], f"home{start}")
    evidence.write("matrix_real", matrix_cells_real=len(chosen), census_violations=0)


def restore(instance: Host, client: docker.APIClient, chosen: Sequence[Cell], home: str) -> None:
    """Start a shim on them, twice, then have everything removed."""
    host = RealHost(instance, client, chosen, home)
    unknown = {cell.task_id for cell in chosen if cell.word == "unknown"}

    def is_as_it_must_be() -> bool:
        host.look()
        assert wrong(host.seen, chosen) == {}
        return True

    for _ in range(2):
        host.shim.start()
        eventually(is_as_it_must_be, within=20)
        host.shim.kill()
    host.shim.start()

    def is_empty() -> bool:
        host.remove_all()
        assert host.left() == unknown
        return True

    eventually(is_empty, within=60)
    host.close()
