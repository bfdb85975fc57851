"""Many tasks, many kills at random instants, and a census after each."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests import evidence
from tests.crash.soak import Churn
from tests.crash.stage import Stage

SERVERS = 8
SAMPLE, FULL = 30.0, 600.0  # s
SEED = 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_at_random_instants_under_load_lose_and_leak_nothing(
    stage: Stage, full_counts: bool
) -> None:
    """What single tasks cannot show: starts, ends and removals of many, cut at once."""
    chance = random.Random(SEED)
    churn = Churn(stage, SERVERS, SEED)
    stage.start()
    churn.start()
    rounds = 0
    began = time.monotonic()
    pause = threading.Event()  # never set: the schedule of the kills, not a wait for anything
    try:
        while time.monotonic() < began + (FULL if full_counts else SAMPLE):
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
        full=full_counts,
        seed=SEED,
        seconds=round(time.monotonic() - began),
        kill9_rounds=rounds,
        tasks=churn.finished,
        census_violations=len(churn.problems),
    )
    assert churn.problems == []
    assert churn.finished >= SERVERS
    assert stage.leftovers() == []
