"""What status and show tell where everybody answers, on fixed data."""

from __future__ import annotations

from pathlib import Path

import pytest
from dstack_shim_contracts.api import (
    Dcgm,
    HealthcheckResponse,
    ImagePullProgress,
    Implementation,
    Incident,
    InstanceHealth,
    LastUpgrade,
    PortMapping,
    TaskConfig,
    TaskListItem,
)
from dstack_shim_contracts.record import Intent, Step, TaskRecord
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.console import ps, show, status
from dstack_shim.console.screen import Cell
from dstack_shim.console.sources import ShimSays, Sources
from dstack_shim.console.times import age, rfc3339, told
from dstack_shim.console.view import TaskView
from dstack_shim.engine.protocol import Container, ContainerDetails, ContainerState, EngineInfo

NOW = 1_700_000_000.0
UPGRADE = LastUpgrade("1", "2", "rolled-back", "too slow", "2023-11-14T22:00:00Z")


def sources(
    health: InstanceHealth | None = None,
    upgrade: LastUpgrade | None = None,
    *,
    stock: bool = False,
) -> Sources:
    program = Implementation("ours", "0.1", 3, "2023-11-14T21:13:20.000+00:00", 3600, upgrade)
    check = HealthcheckResponse(
        "dstack-shim", "0.22.5", None if stock else ("a", "b"), None if stock else program
    )
    says = ShimSays(check, (TaskListItem("t1", TaskStatus.RUNNING),), {}, health)
    return Sources(Path("/h"), 10998, (), says, (), EngineInfo("20.10", "1.41", "/d"), 7)


def lines(facts: list[tuple[str, Cell]]) -> dict[str, str]:
    return {name: cell.text for name, cell in facts}


def test_status_of_a_shim_that_serves() -> None:
    here = sources(InstanceHealth(None), UPGRADE)
    assert lines(list(status.facts(here, (), NOW))) == {
        "shim": "serves on 127.0.0.1:10998",
        "version": "0.22.5",
        "program": "ours 0.1",
        "features": "a, b",
        "generation": "3",
        "since": "2023-11-14T21:13:20Z (1h ago)",
        "last upgrade": "rolled-back, 1 to 2, 2023-11-14T22:00:00Z: too slow",
        "GPU health": "not watched (no DCGM)",
        "home": "/h",
        "process": "7",
        "engine": "20.10, API 1.41",
        "tasks": "none",
    }


def test_status_of_dstacks_own_shim() -> None:
    told_of = lines(list(status.facts(sources(stock=True), (), NOW)))
    assert told_of["program"] == "dstack's own shim, or one like it"
    assert "generation" not in told_of
    assert status.document(sources(stock=True), ())["shim"] == {
        "version": "0.22.5",
        "features": None,
        "implementation": None,
        "gpu_health": None,
    }


@pytest.mark.parametrize(
    ("verdict", "words", "style"),
    [(0, "passed", "green"), (10, "warning", "yellow"), (20, "failed", "red")],
)
def test_status_tells_the_health_of_the_gpus(verdict: int, words: str, style: str) -> None:
    incident = Incident(1, verdict, "it is hot\x1b[2J", 5, 1, 2)
    here = sources(InstanceHealth(Dcgm(verdict, (incident,))))
    facts = list(status.facts(here, (), NOW))
    assert ("GPU health", Cell(words, style)) in facts
    assert ("", Cell("GPU 2: it is hot\x1b[2J")) in facts  # made fit where it is printed
    document = status.document(here, ())["shim"]
    assert isinstance(document, dict)
    assert document["gpu_health"]["overall_health"] == verdict


def test_status_for_programs() -> None:
    document = status.document(sources(upgrade=UPGRADE), ())
    shim = document["shim"]
    assert isinstance(shim, dict)
    assert shim["implementation"]["last_upgrade"]["outcome"] == "rolled-back"
    assert document["engine"] == {"version": "20.10", "api_version": "1.41", "root_dir": "/d"}


BOX = Container(
    "c" * 64,
    "job-1",
    ContainerState.EXITED,
    NOW - 100,
    "t1",
    ports=(PortMapping(32768, 10999),),
    network_mode="bridge",
)


def task(**fields: object) -> TaskView:
    record = TaskRecord(
        "t1",
        TaskConfig(id="t1", name="job", image_name="image:1", network_mode="bridge"),
        intent=Intent(Step.RUNNING, NOW - 100),
    )
    whole = {"status": TaskStatus.RUNNING, "record": record, "container": BOX, **fields}
    return TaskView("t1", **whole)  # type: ignore[arg-type]  # any of its fields


def test_show_tells_how_a_container_ended() -> None:
    details = ContainerDetails(
        BOX, 137, oom_killed=True, error="no such file", started_at=NOW - 90, finished_at=NOW - 5
    )
    told_of = lines(list(show.facts(task(ports=BOX.ports), details, sources(), NOW)))
    assert told_of["container"] == "job-1 (cccccccccccc), exited"
    assert told_of["started"].endswith("(1m ago)")
    assert told_of["ended"].endswith("(5s ago)")
    assert told_of["exit code"] == "137, killed for want of memory"
    assert told_of["error"] == "no such file"
    assert told_of["ports"] == "32768 -> 10999"
    document = show.document(task(), details, sources())
    container = document["container"]
    assert isinstance(container, dict)
    assert (container["exit_code"], container["oom_killed"]) == (137, True)


def test_show_tells_what_the_list_says_where_the_container_is_gone_since() -> None:
    told_of = lines(list(show.facts(task(), None, sources(), NOW)))
    assert told_of["container"] == "job-1 (cccccccccccc), exited"
    assert "exit code" not in told_of
    assert (
        lines(list(show.facts(task(container=None), None, sources(), NOW)))["container"] == "none"
    )


def test_show_and_ps_tell_how_far_a_pull_is() -> None:
    pulling = task(
        status=TaskStatus.PULLING, container=None, progress=ImagePullProgress(5, 5, 10, True)
    )
    assert lines(list(show.facts(pulling, None, sources(), NOW)))["pull"] == "50% of 10 B"
    assert ps.task_document(pulling)["pull"] == {
        "downloaded_bytes": 5,
        "extracted_bytes": 5,
        "total_bytes": 10,
        "is_total_bytes_final": True,
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [({}, "-"), ({"ports": ()}, "-"), ({"ports": BOX.ports * 2}, "32768,32768")],
)
def test_ports_in_short(fields: dict[str, object], words: str) -> None:
    assert ps.ports_in_short(task(**fields)) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0s"),
        (0.9, "0s"),
        (59, "59s"),
        (60, "1m"),
        (7199, "1h"),
        (86_400 * 400, "400d"),
        (float("nan"), "-"),
    ],
)
def test_ages(seconds: float, words: str) -> None:
    assert age(seconds) == words


@pytest.mark.parametrize("seconds", [None, 1e20, float("inf"), float("nan"), -1e20])
def test_a_time_that_no_calendar_has_is_none(seconds: float | None) -> None:
    assert rfc3339(seconds) is None
    assert told(seconds, NOW) == "-"
