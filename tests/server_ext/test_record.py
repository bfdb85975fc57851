"""The record in the server's database: what is written, by whom, and what a lame database costs."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from dstack_shim_server.errors import RecordUnusable
from dstack_shim_server.record import database as databases
from dstack_shim_server.record import recorder as recorder_module
from dstack_shim_server.record import schema, writing
from dstack_shim_server.record.recorder import Recorder
from dstack_shim_server.record.tables import VERSION_TABLE, metadata
from dstack_shim_server.settings import Settings
from tests.eventually import eventually
from tests.server_ext.databases import Database
from tests.server_ext.records import (
    NEW,
    OLD,
    Clock,
    check,
    claim,
    outcomes,
    policy,
    recorder,
    restart,
    see,
)

pytestmark = pytest.mark.usefixtures("all_levels")

INSTANCES = "SELECT * FROM shim_restart_instances ORDER BY name"


# Tables ------------------------------------------------------------------------------------------


def test_the_tables_are_made_at_load_and_are_those_the_code_knows(database: Database) -> None:
    recorder(database)

    def difference(connection: Connection) -> list[object]:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": VERSION_TABLE,
                "include_name": lambda name, kind, _: kind != "table" or "shim_restart" in name,
            },
        )
        return list(compare_metadata(context, metadata))

    async def compare() -> list[object]:
        engine = databases.open_engine(database.url)
        async with engine.connect() as connection:
            found = await connection.run_sync(difference)
        await engine.dispose()
        return found

    assert asyncio.run(compare()) == []


def test_nothing_of_dstacks_tables_is_changed(database: Database) -> None:
    def theirs() -> object:
        return [database.ask(f"SELECT * FROM {table}") for table in ("projects", "fleets")]

    before = theirs()
    see(recorder(database), check())
    assert theirs() == before


def test_replicas_that_load_at_once_make_the_tables_once(database: Database) -> None:
    async def ensure() -> None:
        engine = databases.open_engine(database.url)
        await schema.ensure(engine)
        await engine.dispose()

    threads = [threading.Thread(target=lambda: asyncio.run(ensure())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.ask(f"SELECT * FROM {VERSION_TABLE}") == [{"version_num": schema.newest()}]


def test_the_tables_can_be_taken_away_again(database: Database) -> None:
    """After uninstalling; the history knows the way back."""
    recorder(database).stop()

    async def downgrade() -> None:
        engine = databases.open_engine(database.url)
        async with engine.begin() as connection:
            await connection.run_sync(down)
        await engine.dispose()

    def down(connection: Connection) -> None:
        config = schema._config()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")

    asyncio.run(downgrade())
    with pytest.raises(Exception, match="shim_restart_instances"):
        database.ask(INSTANCES)


# What is written ---------------------------------------------------------------------------------


def test_a_check_is_recorded_with_all_it_saw(database: Database) -> None:
    seen = check(
        running_features=("persisted-state",),
        installed_features=(),
        implementation={"name": "ours", "generation": 2},
        wanted_version="0.22.6",
        answer=False,
        reason="not safe: task job-1 is pulling",
        blocking={"pulling": 1},
    )
    see(recorder(database), seen)
    (row,) = database.ask(INSTANCES)
    assert row == {
        "id": "id of box",
        "name": "box",
        "project": "main",
        "fleet": "gpu",
        "running_version": OLD,
        "running_features": '["persisted-state"]',
        "implementation": '{"name": "ours", "generation": 2}',
        "installed_version": NEW,
        "installed_status": "installed",
        "installed_features": "[]",
        "wanted_version": "0.22.6",
        "state": "waiting",
        "answer": 0,
        "reason": "not safe: task job-1 is pulling",
        "blocking": '{"pulling": 1}',
        "tasks": '[["job-1", "running"]]',
        "seen_at": 1_800_000_000.0,
        "reason_since": 1_800_000_000.0,
    }


def test_a_later_check_replaces_it_and_the_age_of_a_reason_is_kept(database: Database) -> None:
    keeper = recorder(database)
    see(keeper, check(reason="not safe: a", answer=False, at=100.0))
    see(keeper, check(reason="not safe: a", answer=False, at=200.0))
    (row,) = database.ask(INSTANCES)
    assert (row["seen_at"], row["reason_since"]) == (200.0, 100.0)
    see(keeper, check(reason="not safe: b", answer=False, at=300.0))
    (row,) = database.ask(INSTANCES)
    assert (row["seen_at"], row["reason_since"]) == (300.0, 300.0)


def test_an_instance_of_an_unknown_fleet_has_no_names(database: Database) -> None:
    see(recorder(database), check("a", fleet_id="gone"), check("b", fleet_id=""))
    assert [(row["project"], row["fleet"]) for row in database.ask(INSTANCES)] == [("", "")] * 2


def test_fleets_that_cannot_be_read_cost_their_names_only(database: Database) -> None:
    database.ask("ALTER TABLE fleets RENAME TO flotillas")
    see(recorder(database), check())
    assert [row["fleet"] for row in database.ask(INSTANCES)] == [""]


def test_fleets_that_do_not_exist_are_told_once(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = recorder(database, **policy(hold_fleets=frozenset({"gpu", "main/cpu", "gpus"})))
    for _ in range(2):
        see(keeper, check())
    assert [line for line in caplog.messages if "no fleet" in line] == [
        "shim_restart: no fleet is called gpus, as the settings have it"
    ]


def test_many_checks_are_one_transaction(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = recorder(database)
    written = []
    real = writing.write_instances

    async def counted(connection: object, seen: object, fleets: object) -> None:
        found = list(seen)  # type: ignore[call-overload]
        written.append(len(found))
        await real(connection, found, fleets)  # type: ignore[arg-type]

    monkeypatch.setattr(recorder_module, "BATCH", 30.0)
    monkeypatch.setattr(writing, "write_instances", counted)
    for number in range(200):
        keeper.notes.see(check(f"box {number}"))
    keeper.flush()
    assert max(written) == 200
    assert len(database.ask(INSTANCES)) == 200


def test_what_was_noted_last_is_written_at_the_end(database: Database) -> None:
    keeper = recorder(database)
    keeper.notes.see(check())
    keeper.stop()
    assert len(database.ask(INSTANCES)) == 1


def test_the_record_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    keeper = recorder(database, clock, retention_days=30, return_within=1e9, **policy())
    for number in range(6):
        assert claim(keeper, f"box {number}") == ""
        for _ in range(2):
            see(keeper, check(f"box {number}", running=NEW, at=clock.wall))
        clock.pass_by(60)
    assert claim(keeper, "open") == ""
    see(keeper, check("old", at=clock.wall))
    monkeypatch.setattr(writing, "MOST_RESTARTS", 3)
    clock.pass_by(3601)
    keeper.flush()
    assert set(outcomes(database)) == {"box 3 1", "box 4 1", "box 5 1", "open 1"}
    clock.pass_by(31 * 86_400)
    see(keeper, check("new", at=clock.wall))
    assert set(outcomes(database)) == {"open 1"}
    assert [row["name"] for row in database.ask(INSTANCES)] == ["new"]


def test_a_server_says_that_it_is_there_and_with_which_settings(database: Database) -> None:
    recorder(database, name="host/7/abc", **policy(max_under_way=3))
    (row,) = database.ask("SELECT * FROM shim_restart_replicas")
    assert row["id"] == "host/7/abc"
    assert "max_under_way=3" in row["settings"]


# A lame database ---------------------------------------------------------------------------------


def unready(database: Database, **settings: object) -> Recorder:
    """A recorder whose first transactions fail; it goes on trying."""
    keeper = Recorder(database.url, Settings(**settings))  # type: ignore[arg-type]
    keeper.start()
    eventually(lambda: keeper.trouble != "the record was not opened yet")
    return keeper


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "RETRY", (0.01, 0.05))
    monkeypatch.setattr(databases, "LOCK_TIMEOUT", 0.05)


@contextmanager
def locked(database: Database) -> Iterator[None]:
    """Somebody else is writing and does not end."""
    other = sqlite3.connect(
        database.url.removeprefix("sqlite+aiosqlite:///"), isolation_level=None
    )
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.rollback()
        other.close()


@pytest.mark.usefixtures("_impatient")
def test_a_locked_database_delays_the_record(
    sqlite: Database, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = recorder(sqlite)
    with locked(sqlite):
        keeper.see(check("one"))
        keeper.see(check("two"))
        eventually(lambda: "locked" in keeper.trouble)
    eventually(lambda: not keeper.trouble)
    keeper.flush()
    assert [row["name"] for row in sqlite.ask(INSTANCES)] == ["one", "two"]
    waits = [line for line in caplog.messages if "the record waits" in line]
    assert len(waits) == 1
    assert caplog.messages[-1] == "shim_restart: the record is in use"


@pytest.mark.usefixtures("_impatient")
def test_a_claim_on_a_locked_database_is_no_restart_and_ends_in_time(sqlite: Database) -> None:
    keeper = recorder(sqlite, **policy())
    with locked(sqlite), pytest.raises(Exception, match="locked"):
        claim(keeper)
    assert claim(keeper) == ""


def test_a_claim_without_an_answer_is_given_up(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = recorder(sqlite, **policy())
    monkeypatch.setattr(recorder_module, "CLAIM", 0.05)
    with locked(sqlite), pytest.raises(futures.TimeoutError):
        claim(keeper)
    eventually(lambda: claim(keeper, number=2) == "")
    assert outcomes(sqlite) == {"box 2": None}


@pytest.mark.usefixtures("_impatient")
def test_a_database_that_is_not_there_is_not_made(sqlite: Database) -> None:
    gone = Database(sqlite.url + ".gone")
    keeper = unready(gone)
    assert keeper.trouble.startswith("RecordUnusable: there is no database ")
    with pytest.raises(RecordUnusable, match="there is no database"):
        claim(keeper)


@pytest.mark.usefixtures("_impatient")
def test_a_database_that_is_down_delays_the_record_and_no_password_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeper = unready(Database("postgresql+asyncpg://dstack:hunter2@127.0.0.1:1/dstack"))
    keeper.see(check())
    assert keeper.trouble
    assert "hunter2" not in caplog.text + repr(keeper)


@pytest.mark.usefixtures("_impatient")
def test_a_read_only_database_suspends_the_record(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder(sqlite).stop()
    real = databases._existing_file
    # Not by permissions: root may write everywhere.
    monkeypatch.setattr(
        databases,
        "_existing_file",
        lambda url: real(url).update_query_dict({"mode": "ro"}),
    )
    keeper = unready(sqlite)
    eventually(lambda: "readonly" in keeper.trouble)
    keeper.see(check())
    with pytest.raises(RecordUnusable, match="readonly"):
        claim(keeper)


@pytest.mark.usefixtures("_impatient")
def test_newer_tables_suspend_the_record_and_are_left_alone(database: Database) -> None:
    recorder(database).stop()
    database.ask(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    keeper = unready(database)
    keeper.see(check())
    assert "version 9999, newer than this code's" in keeper.trouble
    assert database.ask(INSTANCES) == []
    database.ask(f"UPDATE {VERSION_TABLE} SET version_num = '{schema.newest()}'")
    eventually(lambda: not keeper.trouble)
    keeper.flush()
    assert len(database.ask(INSTANCES)) == 1


@pytest.mark.usefixtures("_impatient")
def test_tables_that_become_newer_while_we_run_stop_the_writing(database: Database) -> None:
    keeper = recorder(database, **policy())
    database.ask(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(RecordUnusable, match="newer"):
        claim(keeper)
    keeper.see(check())
    eventually(lambda: "newer" in keeper.trouble)
    assert database.ask(INSTANCES) == []


@pytest.mark.usefixtures("_impatient")
def test_older_tables_are_brought_up_to_date(database: Database) -> None:
    """None at all are the oldest there are."""
    keeper = recorder(database)
    for table in ("version", "instances", "restarts", "stops", "rollout", "replicas"):
        database.ask(f"DROP TABLE shim_restart_{table}")
    keeper.see(check())
    eventually(lambda: not keeper.trouble and database_has_a_row(database))


def database_has_a_row(database: Database) -> bool:
    try:
        return len(database.ask(INSTANCES)) == 1
    except Exception:  # noqa: BLE001  the table is not there yet
        return False


def test_restarts_made_without_a_claim_are_recorded_too(database: Database) -> None:
    keeper = recorder(database)
    keeper.notes.restarted(restart(check()))
    keeper.flush()
    (row,) = database.ask("SELECT * FROM shim_restart_restarts")
    assert (row["from_version"], row["to_version"], row["outcome"]) == (OLD, NEW, None)
    assert json.loads(row["tasks_before"]) == [["job-1", "running", ""]]
