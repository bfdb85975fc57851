from __future__ import annotations

from typing import Any

import pytest

from dstack_shim_server.observation import (
    MOST_FEATURES,
    MOST_TASKS,
    Observation,
    Subject,
    features_of,
    listed_tasks,
    observe,
)
from tests.server_ext.records import check
from tests.server_ext.servers import healthcheck

BOX = Subject("id", "box")


def seen(running: object, installed: object = None, tasks: object = None) -> Observation:
    return observe(BOX, 1.0, running, installed, tasks)


@pytest.mark.parametrize("document", [None, [], 7, "x", {}, {"version": 7}, {"version": None}])
def test_a_healthcheck_not_understood_says_nothing(document: object) -> None:
    found = seen(document)
    assert (found.running_version, found.running_features, found.process) == ("", None, "")


@pytest.mark.parametrize("features", ["persisted-state", 7, None, {}, [7], ["x", None], [["x"]]])
def test_features_not_understood_are_unknown(features: object) -> None:
    assert features_of(healthcheck("1.0", features=features)) is None


def test_ten_thousand_features_are_cut() -> None:
    features = [f"feature-{n}" for n in range(10_000)]
    found = features_of({"features": features})
    assert found == tuple(features[:MOST_FEATURES])


def test_long_words_are_cut_and_fit_every_database() -> None:
    found = seen({"version": "1\0" * 500, "features": ["x" * 500]})
    assert len(found.running_version) == 128
    assert "\0" not in found.running_version
    assert found.running_features == ("x" * 128,)


def test_an_implementation_that_is_huge_or_none_is_left_out() -> None:
    assert seen({"implementation": {"x": "y" * 2000}}).implementation == {}
    assert seen({"implementation": []}).implementation == {}
    kept = {"name": "ours", "last_upgrade": 7, "started_at": 8}
    found = seen({"implementation": kept})
    assert (found.implementation, found.process, found.upgrade_words) == (kept, "", "")


@pytest.mark.parametrize(
    "tasks",
    [
        *(None, {}, {"tasks": None}, {"tasks": {}}, {"tasks": [7]}, {"tasks": [{}]}),
        *(
            {"tasks": [{"id": "a", "status": "asleep"}]},
            {"tasks": [{"id": 7, "status": "running"}]},
        ),
        {"tasks": [{"id": "a", "status": ["running"]}]},
        {"tasks": [{"id": str(n), "status": "running"} for n in range(MOST_TASKS + 1)]},
    ],
)
def test_a_list_of_tasks_not_understood_in_every_entry_is_none(tasks: object) -> None:
    assert listed_tasks(tasks) is None


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"running": "1.0", "installed": "1.0"}, "current"),
        ({"running": "1.0", "installed": "1.0", "wanted_version": "1.0"}, "current"),
        ({"running": "1.0", "installed": "1.0", "wanted_version": "2.0"}, "to install"),
        ({"answer": False}, "waiting"),
        ({}, "waiting"),
        ({"answer": True}, "restarting"),
        ({"answer": False, "held": True}, "held"),
        ({"installed": ""}, "unknown"),
    ],
)
def test_a_state_is_one_word(more: dict[str, Any], state: str) -> None:
    assert check(**more).state == state


@pytest.mark.parametrize("status", ["installing", "error"])
def test_an_install_under_way_or_failed_is_told(status: str) -> None:
    found = seen(healthcheck("1.0"), {"version": "2.0", "status": status})
    assert found.state == f"install {status}"
