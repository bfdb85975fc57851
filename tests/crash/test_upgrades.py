"""Killed while it is replaced: no task touched, nothing leaked, always a file that starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests import evidence
from tests.crash.upgrade_points import BACK, FORWARD, OLD_WAITS_LESS, WAYS, Upgrading, choose
from tests.lab.engine import PrivateEngine
from tests.lab.images import write_runner
from tests.lab.shim_files import variant
from tests.lab.site import Site
from tests.shim.file_server import serving

SAMPLE = {FORWARD: 7, BACK: 3}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * 3600)]


@pytest.fixture(scope="module")
def upgrading(
    tmp_path_factory: pytest.TempPathFactory,
    crash_engine: PrivateEngine,
    crash_client: docker.APIClient,
    executable: Path,
) -> Iterator[Upgrading]:
    folder = tmp_path_factory.mktemp("upgrades")
    write_runner(Path("/usr/local/bin/dstack-runner"))
    old = variant(executable, "0.22.5", patch=OLD_WAITS_LESS)
    with serving() as files:
        site = Site(folder, crash_engine, old, files, environ={"no_proxy": "*"})
        site.start()
        yield Upgrading(site, executable, crash_client, folder)
        for task in site.client.tasks():
            site.client.terminate(task.id)
            site.client.remove(task.id)
        site.close()


@pytest.fixture(scope="module")
def killed(full_counts: bool) -> Iterator[dict[str, int]]:
    counts: dict[str, int] = {}
    yield counts
    evidence.write("upgrades", full=full_counts, kill_points=sum(counts.values()), by_way=counts)


@pytest.mark.parametrize("way", WAYS)
def test_a_kill_at_any_call_of_a_replacement_costs_no_task_and_no_file(
    upgrading: Upgrading, way: str, full_counts: bool, killed: dict[str, int]
) -> None:
    """What only a real ``execve`` between real files can tell."""
    points = upgrading.points(way)
    chosen = choose(points, None if full_counts else SAMPLE[way])
    problems = [problem for point in chosen for problem in upgrading.kill(point)]
    killed[way] = len(chosen)
    assert problems == []
