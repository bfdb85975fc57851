"""
Two processes, one database, many instances: the roll-out goes as the policy says, whoever dies.

Each process runs dstack's own instance check with the plugin in it; only the tunnel is left out.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.eventually import eventually
from tests.releases import environments
from tests.server.live_shims import LiveShim, live_shims
from tests.server_ext import databases
from tests.server_ext.databases import Database

OLD, NEW, LOSSY = "0.22.4", "0.22.5", "0.22.6"
CANARIES, MOST = 2, 3
VERSION = environments.SERVERS[-1]
SCRIPT = Path(__file__).with_name("checking.py")
RESTARTS = "SELECT * FROM shim_restart_restarts ORDER BY requested_at, id"


@attrs.define
class Servers:
    """Processes that check the same instances."""

    database: Database
    folder: Path
    shims: Sequence[LiveShim]
    running: list[subprocess.Popen[bytes]] = attrs.Factory(list)
    started: int = 0

    def start(self, **choices: object) -> subprocess.Popen[bytes]:
        """Start another one."""
        self.started += 1
        log = (self.folder / f"log-{self.started}").open("wb")
        with log:
            process = subprocess.Popen(
                [environments.with_plugin(VERSION), SCRIPT],
                env={**self._environment(), **{k: str(v) for k, v in choices.items()}},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        assert process.stdin is not None
        listed = [
            {"name": shim.name, "port": shim.server_port, "job": f"job-of-{shim.name}"}
            for shim in self.shims
        ]
        process.stdin.write(json.dumps({"shims": listed}).encode() + b"\n")
        process.stdin.flush()
        self.running.append(process)
        return process

    def _environment(self) -> Mapping[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "DSTACK_SERVER_DIR": str(self.folder / "server"),
            "DSTACK_DATABASE_URL": self.database.url,
            "DSTACK_SHIM_RESTART_CANARIES": str(CANARIES),
            "DSTACK_SHIM_RESTART_MAX_UNDER_WAY": str(MOST),
            "DSTACK_SHIM_RESTART_RETURN_WITHIN": "15",
            "DSTACK_SHIM_RESTART_VERSION": NEW,
            "DSTACK_SHIM_RESTART_DOWNLOAD_URL": "http://127.0.0.1:9/{version}/{arch}",
        }

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL: nothing is written any more."""
        self.running.remove(process)
        process.kill()
        process.communicate()

    def stop(self) -> None:
        """Let all of them end."""
        for process in self.running:
            process.communicate(timeout=60)

    @property
    def log(self) -> str:
        """What all of them said."""
        return "".join(file.read_text("utf-8") for file in sorted(self.folder.glob("log-*")))


@pytest.fixture(scope="module")
def make_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Database]]:
    """PostgreSQL, as servers with replicas have it; where there is none, SQLite locks as well."""
    if databases.why_no_postgres():
        yield lambda: databases.make_sqlite(tmp_path_factory.mktemp("database"))
        return
    with databases.postgres() as running:
        yield running.make


@pytest.fixture
def count(*, full_counts: bool) -> int:
    return 40 if full_counts else 8


@contextmanager
def two_servers(
    database: Database, folder: Path, count: int, lossy: Sequence[str] = (), **choices: object
) -> Iterator[Servers]:
    with live_shims(count, OLD, lossy) as shims:
        servers = Servers(database, folder, shims)
        try:
            servers.start(**choices)
            servers.start(**choices)
            yield servers
        finally:
            servers.stop()


def most_at_once(rows: Sequence[dict[str, Any]]) -> int:
    """The most restarts that were under way at the same time, by the record's own times."""
    changes = [(row["requested_at"], 1) for row in rows]
    changes += [(row["outcome_at"], -1) for row in rows if row["outcome_at"] is not None]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def assert_canaries_first(rows: Sequence[dict[str, Any]]) -> None:
    confirmed = sorted(row["outcome_at"] for row in rows if row["outcome"] == "confirmed")
    # Killed between claim and shutdown: nobody was asked.
    made = [row for row in rows if row["outcome"] != "withdrawn"]
    assert all(row["requested_at"] >= confirmed[CANARIES - 1] for row in made[CANARIES:])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_canaries_first_never_more_than_may_be_and_none_twice_whoever_is_killed(
    make_database: Callable[[], Database], tmp_path: Path, count: int
) -> None:
    """Slow: eight instances (forty in full), three at a time, each proved by two checks."""
    database, chance = make_database(), random.Random(6)
    with two_servers(database, tmp_path, count) as servers:
        killed_at = time.monotonic() + 4.0

        def done() -> bool:
            nonlocal killed_at
            if time.monotonic() > killed_at and servers.started < 8:
                servers.kill(chance.choice(servers.running))
                servers.start()
                killed_at = time.monotonic() + chance.uniform(3.0, 9.0)
            assert all(shim.running == NEW for shim in servers.shims)
            rows = database.ask(RESTARTS)
            return all(row["outcome"] is not None for row in rows)

        eventually(done, within=360, every=0.3, saying="all are restarted and confirmed")
        rows = database.ask(RESTARTS)
    assert servers.started >= 3
    assert [shim.restarts for shim in servers.shims] == [[NEW]] * count
    assert sum(row["outcome"] == "confirmed" for row in rows) == count
    assert {row["outcome"] for row in rows} <= {"confirmed", "withdrawn"}
    assert most_at_once(rows) <= MOST
    assert_canaries_first(rows)
    assert all(shim.tasks == {f"job-of-{shim.name}": "running"} for shim in servers.shims)
    assert "failed while" not in servers.log


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_version_that_loses_tasks_is_stopped_after_its_canaries(
    make_database: Callable[[], Database], tmp_path: Path, count: int
) -> None:
    """Slow: the check that it goes no further takes as long as going further would."""
    database = make_database()
    chosen = {"DSTACK_SHIM_RESTART_VERSION": LOSSY}
    with two_servers(database, tmp_path, count, lossy=[LOSSY], **chosen) as servers:
        stopped = "SELECT version FROM shim_restart_stops"

        def is_stopped() -> bool:
            try:
                return database.ask(stopped) == [{"version": LOSSY}]
            except Exception:  # noqa: BLE001  the table is being made
                return False

        eventually(is_stopped, within=120, every=0.2)
        seen = database.ask("SELECT max(seen_at) AS at FROM shim_restart_instances")[0]["at"]
        every_one_since = (
            "SELECT count(*) AS n FROM shim_restart_instances "
            f"WHERE seen_at > {seen} + 3 AND installed_version = '{LOSSY}'"
        )
        eventually(lambda: database.ask(every_one_since)[0]["n"] == count, within=120, every=0.5)
    hurt = [shim for shim in servers.shims if shim.restarts]
    assert 1 <= len(hurt) <= CANARIES
    assert f"version {LOSSY} is not rolled out any further" in servers.log
    assert f"version {LOSSY} is stopped: instance {hurt[0].name}" in servers.log
