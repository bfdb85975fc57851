"""The record in running stock servers: their own database, their own check, their own /metrics."""

from __future__ import annotations

import http.client
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.eventually import eventually
from tests.releases import environments
from tests.server import truth
from tests.server.dstack_server import TOKEN, DstackServer, dstack_server
from tests.server.stub_shim import StubShim, stub_shim
from tests.server.test_decisions import VERSIONS
from tests.server.truth import IDLE
from tests.server_ext import databases

OLD, NEW = "0.22.4", "0.22.5"
RUNNING = ("running", "terminated")
WITH_METRICS = {
    "DSTACK_SHIM_RESTART_CANARIES": "1",
    "DSTACK_ENABLE_PROMETHEUS_METRICS": "1",
}


@pytest.fixture(scope="module", params=VERSIONS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DstackServer]:
    version = request.param
    folder = tmp_path_factory.mktemp(version) / "run"
    with dstack_server(version, folder, environment=WITH_METRICS) as running:
        eventually(lambda: "the record is in use" in running.log, within=30)
        yield running


@pytest.fixture(scope="module")
def shim() -> Iterator[StubShim]:
    with stub_shim() as running:
        yield running


def rows(server: DstackServer, query: str) -> list[dict[str, Any]]:
    """Ask the server's database beside the server."""
    database = sqlite3.connect(server.folder / "server" / "data" / "sqlite.db")
    database.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in database.execute(query)]
    finally:
        database.close()


def check(server: DstackServer, shim: StubShim, name: str, running: str) -> truth.Seen:
    component = {"name": "dstack-shim", "version": NEW, "status": "installed"}
    healthcheck = {"service": "dstack-shim", "version": running}
    return truth.check(server, shim, healthcheck, component, RUNNING, instance=name)


def metrics(server: DstackServer) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200, text
    return text


def test_a_canary_is_restarted_proved_and_then_the_next(
    server: DstackServer, shim: StubShim
) -> None:
    assert check(server, shim, "one", OLD).restarted
    waiting = check(server, shim, "two", OLD)
    assert not waiting.restarted
    assert "instance two: not now: waits for canaries: 0 of 1 confirmed in 0.22.5" in server.log

    def confirmed() -> bool:
        assert not check(server, shim, "one", NEW).restarted
        found = rows(server, "SELECT outcome FROM shim_restart_restarts")
        return found == [{"outcome": "confirmed"}]

    eventually(confirmed, within=30, every=0.5)
    after = check(server, shim, "two", OLD)
    assert after.restarted
    # Nothing but the shutdown is asked for more than where the roll-out said no.
    assert [r for r in after.asked if r != truth.SHUTDOWN] == list(waiting.asked)


def test_the_servers_own_metrics_show_ours(server: DstackServer, shim: StubShim) -> None:
    def shown() -> bool:
        check(server, shim, "three", NEW)
        return 'dstack_shim_restart_instances{state="current"}' in metrics(server)

    eventually(shown, within=60, every=1.0, saying="rows have been counted again")
    assert 'dstack_shim_restart_decisions_total{answer="restart"}' in metrics(server)


def test_a_server_without_the_plugin_runs_on_the_same_database(
    server: DstackServer, shim: StubShim, tmp_path: Path
) -> None:
    """The plugin was removed again: its tables are left, and nobody minds."""
    source = sqlite3.connect(server.folder / "server" / "data" / "sqlite.db")
    folder = tmp_path / "run"
    (folder / "server" / "data").mkdir(parents=True)
    target = sqlite3.connect(folder / "server" / "data" / "sqlite.db")
    source.backup(target)
    source.close()
    target.close()
    with dstack_server(server.version, folder, plugins=["shim_restart_probe"]) as plain:
        assert check(plain, shim, "two", OLD).asked
        assert "shim_restart: " not in plain.log
        assert rows(plain, "SELECT count(*) AS n FROM shim_restart_restarts")[0]["n"] >= 2


@pytest.mark.slow
@pytest.mark.full
def test_a_server_upgrade_in_the_middle_of_a_restart_proves_it_all_the_same(
    shim: StubShim, tmp_path: Path
) -> None:
    """Slow: a server's start, twice, with dstack's own migrations between."""
    older, newer = environments.SERVERS
    folder = tmp_path / "run"
    with dstack_server(older, folder, environment=WITH_METRICS) as server:
        eventually(lambda: "the record is in use" in server.log, within=30)
        assert check(server, shim, "one", OLD).restarted
    with dstack_server(newer, folder, environment=WITH_METRICS) as server:
        eventually(lambda: "the record is in use" in server.log, within=30)

        def confirmed() -> bool:
            check(server, shim, "one", NEW)
            found = rows(server, "SELECT outcome FROM shim_restart_restarts")
            return found == [{"outcome": "confirmed"}]

        eventually(confirmed, within=30, every=0.5)


def test_a_server_on_postgresql_keeps_its_record_there(shim: StubShim, tmp_path: Path) -> None:
    if why := databases.why_no_postgres():
        pytest.skip(why)
    version = environments.SERVERS[-1]
    with databases.postgres() as running:
        running.database("postgres").ask("CREATE DATABASE dstack", alone=True)
        database = running.database("dstack")
        choices = {"DSTACK_DATABASE_URL": database.url, "DSTACK_SHIM_RESTART_CANARIES": "0"}
        with dstack_server(version, tmp_path / "run", environment=choices) as server:
            eventually(lambda: "the record is in use" in server.log, within=30)
            assert check(server, shim, "one", OLD).restarted
            (row,) = database.ask("SELECT instance, outcome FROM shim_restart_restarts")
            assert row == {"instance": "one", "outcome": None}
            assert "fleets have no names" not in server.log
            assert "shim_restart: failed while" not in server.log


@pytest.mark.slow
@pytest.mark.full
def test_two_servers_on_one_database_keep_one_record(shim: StubShim, tmp_path: Path) -> None:
    """Slow: two whole servers, loading at the same time on a database that is new to both."""
    if why := databases.why_no_postgres():
        pytest.skip(why)
    version = environments.SERVERS[-1]
    with databases.postgres() as running, ExitStack() as stack:
        running.database("postgres").ask("CREATE DATABASE dstack", alone=True)
        database = running.database("dstack")
        choices = {**WITH_METRICS, "DSTACK_DATABASE_URL": database.url}
        one, other = (
            stack.enter_context(dstack_server(version, tmp_path / name, environment=choices))
            for name in ("one", "other")
        )
        for server in (one, other):
            eventually(lambda: "the record is in use" in server.log, within=30)  # noqa: B023
        assert check(one, shim, "box", OLD).restarted
        assert not check(other, shim, "box", OLD).restarted  # under way, whoever asked for it
        assert not check(other, shim, "second", OLD).restarted
        assert "waits for canaries: 0 of 1 confirmed" in other.log

        def confirmed() -> bool:
            check(other, shim, "box", NEW)
            found = database.ask("SELECT outcome FROM shim_restart_restarts")
            return found == [{"outcome": "confirmed"}]

        eventually(confirmed, within=30, every=0.5)
        check(one, shim, "third", NEW)  # so that it looks at the record once more
        eventually(lambda: check(one, shim, "second", OLD).restarted, within=30, every=1.0)
        assert len(database.ask("SELECT id FROM shim_restart_replicas")) == 2


def test_where_the_database_is_is_found_as_the_server_finds_it(server: DstackServer) -> None:
    assert (server.folder / "server" / "data" / "sqlite.db").is_file()
    assert rows(server, "SELECT * FROM shim_restart_replicas")


@pytest.mark.full
def test_observing_with_a_record_every_decision_is_stocks(
    server: DstackServer, shim: StubShim
) -> None:
    table = truth.rows(full=False)
    mode = "DSTACK_SHIM_RESTART_MODE"
    try:
        assert server.ask("/reload", environment={mode: "observe"})["active"]
        observed = truth.decided(server, shim, table, IDLE, RUNNING)
        assert not server.ask("/reload", environment={mode: "off"})["active"]
        assert truth.decided(server, shim, table, IDLE, RUNNING) == observed
    finally:
        server.ask("/reload", environment=WITH_METRICS)


def test_nothing_of_ours_failed(server: DstackServer) -> None:
    assert "shim_restart: failed while" not in server.log
    assert server.version in environments.ALL_SERVERS
