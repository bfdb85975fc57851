"""Many tasks, many kills at random instants, and a census after each."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.crash.soak import Churn
from tests.crash.stage import Stage
from tests.evidence import Evidence

SERVERS = 8
SAMPLE, FULL = 60.0, 600.0  # s
SEED = 4  # and one more for each part


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_at_random_instants_under_load_lose_and_leak_nothing(
    stage: Stage, evidence: Evidence
) -> None:
    """What single tasks cannot show: starts, ends and removals of many, cut at once."""
    seed = SEED + evidence.part - 1
    seconds = FULL / evidence.parts if evidence.full else SAMPLE
    chance = random.Random(seed)
    churn = Churn(stage, SERVERS, seed)
    stage.start()
    churn.start()
    rounds = 0
    began = time.monotonic()
    pause = threading.Event()  # never set: the schedule of the kills, not a wait for anything
    try:
        while time.monotonic() < began + seconds:
            pause.wait(chance.uniform(1, 5))
            stage.shim.kill()
            rounds += 1
            stage.start()
            with churn.paused():
                churn.take_census()
    finally:
        churn.stop()
    evidence.write(
        "soak",
        soak_seconds=round(time.monotonic() - began),
        soak_kills=rounds,
        soak_tasks=churn.finished,
        census_violations=len(churn.problems),
    )
    assert churn.problems == []
    assert churn.finished >= SERVERS
    assert stage.leftovers() == []
