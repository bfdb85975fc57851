"""The extension remembers and keeps threads for as long as the process lives; a test does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dstack_shim_server import activation, guard
from dstack_shim_server.record import recorder
from dstack_shim_server.record.recorder import Recorder
from tests.server_ext import databases
from tests.server_ext.databases import Database, Postgres


@pytest.fixture(autouse=True)
def nothing_reported_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_reported", set())


@pytest.fixture
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    """For who reads what is logged of things that go well."""
    caplog.set_level("INFO", logger="dstack.plugins.shim_restart")


@pytest.fixture(autouse=True)
def records_end_with_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorder]]:
    """Every record that a test starts, told to end when the test does."""
    started: list[Recorder] = []
    start = Recorder.start

    def noted_start(self: Recorder) -> None:
        started.append(self)
        start(self)

    monkeypatch.setattr(Recorder, "start", noted_start)
    monkeypatch.setattr(activation, "at_exit", lambda *_, **__: None)
    # Nobody waits for a batch to fill.
    monkeypatch.setattr(recorder, "BATCH", 0.0)
    monkeypatch.setattr(recorder, "COUNT", 0.0)
    yield started
    for one in started:
        one.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if why := databases.why_no_postgres():
        pytest.skip(why)
    with databases.postgres() as running:
        yield running


# What PostgreSQL makes of our statements does not depend on the Python.
@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.one_python)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A database that a dstack server has made."""
    if request.param == "sqlite":
        return databases.make_sqlite(tmp_path)
    running: Postgres = request.getfixturevalue("postgres")
    return running.make()


@pytest.fixture
def sqlite(tmp_path: Path) -> Database:
    return databases.make_sqlite(tmp_path)
