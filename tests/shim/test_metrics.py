"""The text that a Prometheus reads, by the rules of its format."""

from __future__ import annotations

import logging
import re

import attrs
import pytest
from dstack_shim_contracts.api import HealthcheckResponse, Implementation, LastUpgrade
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.log import LOGGER_NAME, EventLog
from dstack_shim.metrics import EventCounts, Snapshot, render
from dstack_shim.tasks.leaks import Leak
from dstack_shim.timing import Timing

SNAPSHOT = Snapshot(
    health=HealthcheckResponse(
        "dstack-shim", "0.22.5", implementation=Implementation("ours", "1", 3, "2026-01-01")
    ),
    started_at=1700000000.25,
    statuses=[TaskStatus.RUNNING, TaskStatus.RUNNING, TaskStatus.TERMINATED],
    steps=Timing(4, 0.5, 0.125),
    restore_seconds=0.75,
    is_watching=True,
    gpus_idle=1,
    gpus_held=7,
    quarantined=2,
    leaks=[Leak("volume", "data")],
    events={("error", "record.damaged"): 2, ("info", "task.running"): 5},
)
SAMPLE = re.compile(r'[a-z_]+(\{([a-z]+="(\\.|[^"\\\n])*",?)+\})? -?[0-9.e+-]+')


def values(text: str) -> dict[str, float]:
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def test_what_is_told() -> None:
    told = values(render(SNAPSHOT))
    assert told['dstack_shim_tasks{status="running"}'] == 2
    assert told['dstack_shim_tasks{status="pulling"}'] == 0
    assert told['dstack_shim_gpus{state="held"}'] == 7
    assert told['dstack_shim_leaked_resources{kind="volume"}'] == 1
    assert told['dstack_shim_leaked_resources{kind="gpu"}'] == 0
    assert told["dstack_shim_quarantined_records"] == 2
    assert told["dstack_shim_step_seconds_sum"] == 0.5
    assert told["dstack_shim_step_seconds_count"] == 4
    assert told["dstack_shim_step_latest_seconds"] == 0.125
    assert told["dstack_shim_restore_seconds"] == 0.75
    assert told["dstack_shim_generation"] == 3
    assert told["dstack_shim_start_time_seconds"] == 1700000000.25
    assert told["dstack_shim_engine_events_healthy"] == 1
    assert told['dstack_shim_events_total{level="error",event="record.damaged"}'] == 2
    assert told['dstack_shim_info{version="0.22.5",implementation="ours 1"}'] == 1


def test_the_last_upgrade_is_told_once_there_was_one() -> None:
    assert "last_upgrade" not in render(SNAPSHOT)
    last = LastUpgrade("1", 'a"b\\c\nd', "rolled-back", "why", "2026-01-01")
    assert SNAPSHOT.health.implementation is not None
    own = attrs.evolve(SNAPSHOT.health.implementation, last_upgrade=last)
    health = attrs.evolve(SNAPSHOT.health, implementation=own)
    text = render(attrs.evolve(SNAPSHOT, health=health))
    assert 'outcome="rolled-back"' in text
    assert 'to="a\\"b\\\\c\\nd"' in text


def test_every_line_is_of_the_format_and_every_metric_says_what_it_is() -> None:
    lines = render(SNAPSHOT).splitlines()
    names = []
    for line in lines:
        if line.startswith("# HELP "):
            names.append(line.split()[2])
        elif line.startswith("# TYPE "):
            assert line.split()[2] == names[-1]
            assert line.split()[3] in {"gauge", "counter", "summary"}
        else:
            assert SAMPLE.fullmatch(line), line
            assert line.startswith(names[-1])
    assert len(names) == len(set(names))


def test_no_event_yet_is_a_metric_without_samples() -> None:
    assert "dstack_shim_events_total{" not in render(attrs.evolve(SNAPSHOT, events={}))


def test_events_are_counted_by_level_and_name() -> None:
    logger = logging.getLogger(LOGGER_NAME)
    before = logger.handlers[:]
    logger.setLevel(logging.INFO)
    EventCounts.attached()
    counts = EventCounts.attached()
    try:
        log = EventLog(logger)
        log.info("task.running", task="a")
        log.bind(task="b").info("task.running")
        log.error("record.damaged")
        log.debug("step.undecided")
        assert counts.now == {("info", "task.running"): 2, ("error", "record.damaged"): 1}
    finally:
        logger.handlers[:] = before


@pytest.mark.parametrize(("number", "text"), [(1.0, "1"), (0.1, "0.1"), (1e-9, "1e-09")])
def test_numbers_are_whole_where_they_can_be(number: float, text: str) -> None:
    snapshot = attrs.evolve(SNAPSHOT, restore_seconds=number)
    assert f"dstack_shim_restore_seconds {text}\n" in render(snapshot)
