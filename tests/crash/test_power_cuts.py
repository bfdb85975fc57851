"""The power is cut when something was acknowledged: it is still so when the host comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.crash.power import KINDS, Boot, Disk, PowerCuts
from tests.crash.stage import Stage
from tests.evidence import Evidence
from tests.lab.engine import PrivateEngine

SAMPLE, FULL = 40, 34 * len(KINDS)


@pytest.fixture
def power(
    tmp_path_factory: pytest.TempPathFactory,
    crash_engine: PrivateEngine,
    crash_client: docker.APIClient,
    executable: Path,
) -> Iterator[PowerCuts]:
    folder = tmp_path_factory.mktemp("power")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    disk, boot = Disk(folder), Boot(folder / "boot_id")
    stage = Stage(folder, crash_engine, crash_client, executable, place=disk.point)
    yield PowerCuts(stage, disk, boot)
    stage.close()
    disk.close()
    boot.close()


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_what_was_acknowledged_is_there_after_a_power_cut(
    power: PowerCuts, evidence: Evidence
) -> None:
    """A kill leaves what was written, a power cut only what was flushed."""
    count = FULL if evidence.full else SAMPLE
    kinds = evidence.share([list(KINDS)[number % len(KINDS)] for number in range(count)])
    outcomes = [power.cut(kind) for kind in kinds]
    bad = [outcome for outcome in outcomes if outcome.problems]
    evidence.write(
        "power_cuts",
        power_cuts=len(outcomes),
        kinds=Counter(kinds),
        census_violations=sum(len(outcome.problems) for outcome in bad),
    )
    assert bad == []
