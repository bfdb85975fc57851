"""Installing the plugin beside a release changes nothing of it, and loading it says what it does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dstack_shim_server import shapes
from tests.releases import environments
from tests.releases.running import run_inside

OURS = {"dstack-shim-contracts", "dstack-shim-server"}
WITH_DECISION = [v for v in environments.EVERY if v != environments.WITHOUT_DECISION]


def releases(versions: list[str]) -> list[Any]:
    return [
        pytest.param(v, marks=[] if v in environments.SAMPLE else pytest.mark.full)
        for v in versions
    ]


@pytest.mark.parametrize("version", releases(list(environments.EVERY)))
def test_no_installed_version_changes(version: str) -> None:
    before = environments.installed(environments.pristine(version))
    after = environments.installed(environments.with_plugin(version))
    assert f"dstack=={version}" in before
    assert before <= after
    added = {re.split(r"==| @ ", line)[0] for line in after - before}
    assert added >= OURS
    assert added <= OURS | {"cattrs"}


@pytest.mark.parametrize("version", releases(list(environments.EVERY)))
def test_no_requirement_is_broken(version: str) -> None:
    before = environments.complaints(environments.pristine(version))
    after = environments.complaints(environments.with_plugin(version))
    assert after == before


@pytest.mark.parametrize("version", releases(WITH_DECISION))
def test_the_plugin_is_active_and_knows_the_release_by_its_row_of_the_table(version: str) -> None:
    said = run_inside(environments.with_plugin(version), "load_plugin.py")
    (row,) = [shape for shape in shapes.known_shapes() if version in shape.releases]
    assert said["active"]
    # There is no server here and no database of one, which the record's thread may say any time.
    log = [line for line in said["log"] if "the record waits: RecordUnusable" not in line]
    assert log == [f"shim_restart: {said['summary']}"]
    start = f"active: mode enforce, dstack {version} (decision code of {row}), patched ShimClient."
    assert said["summary"].startswith(start)
    assert said["policies"] == []
    assert "active already" in said["again"]


@pytest.mark.parametrize("version", releases(WITH_DECISION))
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"DSTACK_SERVER_DIR": "a/../relative"},
        {"DSTACK_DATABASE_URL": "postgresql+asyncpg://me@db/dstack"},
    ],
    ids=["default", "a folder", "a url"],
)
def test_the_database_is_where_the_server_has_it(
    version: str, environment: dict[str, str]
) -> None:
    python = environments.with_plugin(version)
    found = run_inside(python, "database_url.py", environment=environment)
    assert found["ours"] == found["server"]


def test_a_release_without_a_restart_decision_is_left_alone_and_says_so() -> None:
    python = environments.with_plugin(environments.WITHOUT_DECISION)
    for environment in ({}, {"DSTACK_SHIM_RESTART_UNKNOWN": "allow"}):
        said = run_inside(python, "load_plugin.py", environment=environment)
        assert not said["active"]
        assert said["summary"] == (
            "inactive: dstack 0.20.0: it has no restart decision "
            "(ShimClient._get_restart_safe_task_statuses is missing)"
        )
        assert said["log"] == [f"shim_restart: {said['summary']}"]


def test_every_shape_has_a_release_that_is_tried() -> None:
    tried = set(environments.EVERY)
    assert all(tried & set(shape.releases) for shape in shapes.known_shapes())


def test_the_pins_of_each_release_are_those_of_that_release() -> None:
    for version in environments.EVERY:
        pins = (environments.PINS / f"{version}.txt").read_text("utf-8").splitlines()
        assert f"dstack=={version}" in pins
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==\S+", pin) for pin in pins)
