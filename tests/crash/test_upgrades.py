"""Killed while it is replaced: no task touched, nothing leaked, always a file that starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import docker
import pytest

from tests.crash.kill_points import choose
from tests.crash.upgrade_points import BACK, FORWARD, OLD_WAITS_LESS, WAYS, Upgrading
from tests.evidence import Evidence
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


@attrs.define
class Tally:
    """What was tried in the module."""

    upgrade_kill_points: int = 0
    census_violations: int = 0


@pytest.fixture(scope="module")
def tally(evidence: Evidence) -> Iterator[Tally]:
    tally = Tally()
    yield tally
    evidence.write("upgrades", **attrs.asdict(tally))


@pytest.mark.parametrize("way", WAYS)
def test_a_kill_at_any_call_of_a_replacement_costs_no_task_and_no_file(
    upgrading: Upgrading, way: str, evidence: Evidence, tally: Tally
) -> None:
    """What only a real ``execve`` between real files can tell."""
    chosen = choose(upgrading.points(way), SAMPLE[way], evidence)
    problems = [problem for point in chosen for problem in upgrading.kill(point)]
    tally.upgrade_kill_points += len(chosen)
    tally.census_violations += len(problems)
    assert problems == []
