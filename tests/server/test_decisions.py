"""
A stock server decides as the gate says: the truth table, inside real server processes.

Each server is started once, as an operator would start it; for the other modes the plugin is loaded
again in the same process, in `./dev prove` in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.releases import environments
from tests.server import skew, truth
from tests.server.dstack_server import DstackServer, dstack_server
from tests.server.stub_shim import StubShim, stub_shim
from tests.server.truth import IDLE, PULLING, RUNNING, SHUTDOWN, Row, Table

MODE = "DSTACK_SHIM_RESTART_MODE"
# The gate alone: each row is one decision, and a roll-out would remember those before.
GATE = {"DSTACK_SHIM_RESTART_RECORD": "off"}

VERSIONS = [
    pytest.param(version, marks=[] if version in environments.SERVERS else pytest.mark.full)
    for version in environments.ALL_SERVERS
]


@attrs.frozen
class Tables:
    """What one release decides, in each mode; ``stock`` is with the plugin taken out."""

    stock: Table
    observe: Table
    enforce: Table
    log: str


@pytest.fixture(scope="module", params=VERSIONS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DstackServer]:
    version = request.param
    folder = tmp_path_factory.mktemp(version) / "run"
    with dstack_server(version, folder, environment=GATE) as running:
        yield running


@pytest.fixture(scope="module")
def shim() -> Iterator[StubShim]:
    with stub_shim() as running:
        yield running


@pytest.fixture(scope="module")
def rows(server: DstackServer, *, full_counts: bool) -> list[Row]:
    # All 2,000 pairs on two releases: how they are told apart is the same code on the others.
    return truth.rows(full=full_counts and server.version in environments.SERVERS)


@pytest.fixture(scope="module")
def tables(server: DstackServer, shim: StubShim, rows: list[Row]) -> Tables:
    # The modes in this order: the first is the one the server was started with.
    enforce = truth.decided(server, shim, rows, IDLE, RUNNING, PULLING)
    assert server.ask("/reload", environment={**GATE, MODE: "observe"})["active"]
    observe = truth.decided(server, shim, rows, RUNNING)
    assert not server.ask("/reload", environment={**GATE, MODE: "off"})["active"]
    stock = truth.decided(server, shim, rows, IDLE, RUNNING)
    assert server.ask("/reload", environment=GATE)["active"]
    return Tables(stock=stock, observe=observe, enforce=enforce, log=server.log)


def test_the_server_says_in_one_line_that_the_plugin_is_active_and_how(
    server: DstackServer,
) -> None:
    first = next(line for line in server.log.splitlines() if "shim_restart: " in line)
    assert (
        f"active: mode enforce, without a record, dstack {server.version} (decision code of "
        in first
    )
    assert "patched ShimClient._request, " in first
    assert "Loaded plugin shim_restart" in server.log


def test_making_the_plugin_a_second_time_does_nothing(server: DstackServer) -> None:
    before = server.ask("/state")
    again = server.ask("/load", environment={})
    assert again["active"]
    assert "active already" in again["summary"]
    assert server.ask("/state") == before


def test_enforcing_running_tasks_are_restarted_under_exactly_where_the_gate_says(
    tables: Tables, rows: list[Row]
) -> None:
    assert len(rows) >= 60
    wrong = {}
    for row in rows:
        # Where dstack does not come to a decision (same version, unreadable, no file) we add none.
        comes_to_it = tables.stock[row.name, IDLE].restarted
        wanted = comes_to_it and row.both_keep_state
        if tables.enforce[row.name, RUNNING].restarted != wanted:
            wrong[row.name] = wanted
    assert not wrong


def test_enforcing_both_answers_occur(tables: Tables, rows: list[Row]) -> None:
    answers = [tables.enforce[row.name, RUNNING].restarted for row in rows]
    assert answers.count(True) >= 12
    assert answers.count(False) >= 60


def test_enforcing_an_idle_shim_is_restarted_as_stock_does(
    tables: Tables, rows: list[Row]
) -> None:
    assert [tables.enforce[row.name, IDLE] for row in rows] == [
        tables.stock[row.name, IDLE] for row in rows
    ]


def test_a_task_under_way_is_never_restarted_under(tables: Tables, rows: list[Row]) -> None:
    assert not any(tables.enforce[row.name, PULLING].restarted for row in rows)


def test_observing_every_decision_is_stocks(tables: Tables, rows: list[Row]) -> None:
    for row in rows:
        assert tables.observe[row.name, RUNNING] == tables.stock[row.name, RUNNING]


def test_observing_says_what_would_differ(tables: Tables, rows: list[Row]) -> None:
    for row in rows:
        stock = tables.stock[row.name, RUNNING].restarted
        if tables.stock[row.name, IDLE].restarted and stock != row.both_keep_state:
            word, gate = ("safe", "not safe") if stock else ("not safe", "safe")
            said = f"instance {row.name}: {word} by dstack's own rule; by the gate {gate}: "
            assert said in tables.log


def test_no_request_is_added_to_a_check(tables: Tables, rows: list[Row]) -> None:
    for row in rows:
        seen, stock = (table[row.name, RUNNING] for table in (tables.enforce, tables.stock))
        assert [r for r in seen.asked if r != SHUTDOWN] == [
            r for r in stock.asked if r != SHUTDOWN
        ]
        assert seen.result == stock.result


def test_every_decision_is_logged_with_its_reason(tables: Tables, rows: list[Row]) -> None:
    for row in rows:
        if tables.stock[row.name, IDLE].restarted:
            word = "safe" if row.both_keep_state else "not safe"
            assert f"shim_restart: instance {row.name}: {word}: " in tables.log


def test_every_copy_of_the_instance_check_decides_by_the_gate(
    server: DstackServer, shim: StubShim
) -> None:
    """0.20.13 to 0.20.16 have an old and a new one, and a setting that says which is used."""
    component = {"name": "dstack-shim", "version": "0.22.5", "status": "installed"}
    for copy in range(server.ask("/state")["copies"]):
        for running, safe in (("0.21.3", True), ("0.21.2", False)):
            healthcheck = {"service": "dstack-shim", "version": running}
            name = f"copy-{copy}"
            seen = truth.check(
                server, shim, healthcheck, component, RUNNING, instance=name, copy=copy
            )
            assert seen.restarted is safe
            word = "safe" if safe else "not safe"
            assert f"shim_restart: instance {name}: {word}: running shim {running}" in server.log


def test_nothing_of_ours_failed(tables: Tables, server: DstackServer) -> None:
    assert "shim_restart: failed while" not in server.log


@pytest.mark.parametrize("running", ["0.21.3", "0.21.5", "0.22.5"])
def test_rolled_back_to_a_release_whose_shim_keeps_nothing_no_job_is_restarted_under(
    server: DstackServer, shim: StubShim, running: str
) -> None:
    """
    The server went back to 0.21.2 and has put its own shim on disk, as it does by itself.

    Only 0.21.2 and before expect such a file; later servers meet it when they are those rolled back
    to and the file is older than they are, with downgrades allowed.
    """
    release = None if server.version == "0.21.2" else "0.21.2"
    component = {"name": "dstack-shim", "version": "0.21.2", "status": "installed"}
    healthcheck = {"service": "dstack-shim", "version": running}
    busy = truth.check(server, shim, healthcheck, component, RUNNING, expected=release)
    assert busy.asked.count(("GET", "/api/tasks")) == 2  # it came to the decision
    assert not busy.restarted
    idle = truth.check(server, shim, healthcheck, component, IDLE, expected=release)
    assert idle.restarted


def test_the_page_of_servers_and_shims_says_what_they_do(
    server: DstackServer, shim: StubShim
) -> None:
    assert not server.ask("/reload", environment={**GATE, MODE: "off"})["active"]
    stock = skew.decided(server, shim)
    assert server.ask("/reload", environment=GATE)["active"]
    line = skew.row(server.version, stock, skew.decided(server, shim))
    skew.note(server.version, line)
    assert line in skew.PAGE.read_text("utf-8").splitlines()


def test_a_server_with_bad_settings_runs_on_and_says_what_was_wrong(
    server: DstackServer, shim: StubShim
) -> None:
    outcome = server.ask("/reload", environment={**GATE, MODE: "yes"})
    try:
        assert not outcome["active"]
        assert f"{MODE} must be off, observe or enforce, not 'yes'" in outcome["summary"]
        assert server.ask("/state")["patched"] == []
        last = [line for line in server.log.splitlines() if "shim_restart: " in line][-1]
        assert last.startswith("WARNING ")
        assert outcome["summary"] in last
    finally:
        server.ask("/reload", environment=GATE)


@pytest.mark.full
@pytest.mark.parametrize("version", environments.ALL_SERVERS)
@pytest.mark.parametrize("mode", ["off", "observe"])
def test_the_mode_of_the_environment_holds_from_the_start(
    version: str, mode: str, tmp_path: Path, shim: StubShim
) -> None:
    """What loading again in one process cannot show: a server that never had the patches."""
    rows = truth.rows(full=False)
    with dstack_server(version, tmp_path / "run", environment={**GATE, MODE: mode}) as server:
        assert bool(server.ask("/state")["patched"]) is (mode == "observe")
        table = truth.decided(server, shim, rows, RUNNING)
        server.ask("/reload", environment={**GATE, MODE: "off"})
        assert truth.decided(server, shim, rows, RUNNING) == table
