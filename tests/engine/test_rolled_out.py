"""A real shim with a running job, rolled out to by dstack's own instance check with the extension.

As much of a server as checks instances, of a stock release, over the shim's own port; the record is in
a database of its own, and the operator's command is the installed one.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest
from dstack_shim_contracts.statuses import TaskStatus

from tests.engine.test_upgrade import (
    NEW,
    OLD,
    built,
    files,
    make_site,
    runner,
    site,
)
from tests.eventually import eventually
from tests.lab.images import Images
from tests.lab.shim import PORT
from tests.lab.shim_files import WHEN_CHECKED, variant
from tests.lab.site import PATIENCE, Site, digest
from tests.releases import environments
from tests.server_ext import databases
from tests.server_ext.databases import Database
from tests.shim.file_server import Reply

__all__ = ["built", "files", "make_site", "runner", "site"]  # fixtures

CHECKING = Path(__file__).parents[1] / "server" / "checking.py"
# The first by itself restarts no busy shim at all.
STOCK = ["0.21.2", pytest.param("0.22.5", marks=pytest.mark.full)]
TASK = "t1"
FORGETFUL = "from dstack_shim.tasks import core; core.Core.list = lambda self: ()"


class Servers:
    """A process that checks the instance, and what an operator sees of it."""

    def __init__(self, release: str, database: Database, folder: Path) -> None:
        self.python = environments.with_plugin(release)
        self.database = database
        self.folder = folder
        self.log = folder / "server.log"

    def environ(self, **choices: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "DSTACK_SERVER_DIR": str(self.folder / "server"),
            "DSTACK_DATABASE_URL": self.database.url,
            **{f"DSTACK_SHIM_RESTART_{name}": value for name, value in choices.items()},
        }

    @contextmanager
    def checking(self, **choices: str) -> Iterator[None]:
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [self.python, CHECKING],
                env=self.environ(**choices),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        assert process.stdin is not None
        shim = {"name": "box", "port": PORT, "job": TASK}
        process.stdin.write(json.dumps({"shims": [shim]}).encode() + b"\n")
        process.stdin.flush()
        try:
            yield
        finally:
            process.communicate(timeout=PATIENCE)

    def fleet(self, *command: str) -> str:
        """What `dstack-shim-fleet` prints, as installed beside the server."""
        script = self.python.with_name("dstack-shim-fleet")
        ran = subprocess.run(
            [script, *command], env=self.environ(), capture_output=True, text=True, check=False
        )
        return ran.stdout

    def restarts(self) -> list[dict[str, Any]]:
        try:
            return self.database.ask(
                "SELECT * FROM shim_restart_restarts WHERE outcome IS NOT NULL"
            )
        except Exception:  # noqa: BLE001  the table is being made
            return []


@pytest.fixture(params=STOCK)
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Servers:
    return Servers(request.param, databases.make_sqlite(tmp_path), tmp_path)


def offered(site: Site, content: bytes, version: str = NEW) -> dict[str, str]:
    """Settings of a server that wants this file."""
    site.files.replies[f"/{version}/amd64"] = Reply(content)
    return {
        "VERSION": version,
        "DOWNLOAD_URL": site.files.url("/") + "{version}/{arch}",
        "SHA256": digest(content),
    }


def job(site: Site, client: docker.APIClient) -> tuple[str, str, int]:
    """What must not change: container, start, process."""
    container = site.client.task(TASK).container_id
    state = client.inspect_container(container)["State"]
    return container, state["StartedAt"], state["Pid"]


def finished(servers: Servers) -> Callable[[], bool]:
    return lambda: bool(servers.restarts())


def test_an_upgrade_under_a_running_job_is_confirmed_and_the_job_never_notices(
    servers: Servers, site: Site, built: Path, images: Images, client: docker.APIClient
) -> None:
    site.run_task(TASK, images)
    before = job(site, client)
    with servers.checking(**offered(site, variant(built, NEW))):
        eventually(finished(servers), within=PATIENCE, saying="the restart has an outcome")
        eventually(lambda: " current " in servers.fleet("status"), within=PATIENCE, every=0.5)
    (row,) = servers.restarts()
    assert (row["from_version"], row["to_version"], row["outcome"]) == (OLD, NEW, "confirmed")
    assert site.client.healthcheck().version == NEW
    assert job(site, client) == before
    assert f"It runs {NEW} (has persisted-state, guarded-shutdown)" in servers.fleet("why", "box")
    assert "Task t1 is running." in servers.fleet("why", "box")
    assert "failed while" not in servers.log.read_text("utf-8")


def test_a_file_that_its_own_check_refuses_is_reported_and_not_tried_again(
    servers: Servers, site: Site, built: Path, images: Images, client: docker.APIClient
) -> None:
    site.run_task(TASK, images)
    before = job(site, client)
    bad = variant(built, NEW, shell=WHEN_CHECKED + "exit 7")
    with servers.checking(**offered(site, bad)):
        eventually(finished(servers), within=PATIENCE, saying="the restart has an outcome")
    (row,) = servers.restarts()
    assert row["outcome"] == "rolled back by the shim"
    assert row["why"].startswith(f"{NEW} refused ")
    assert site.client.healthcheck().version == OLD
    assert job(site, client) == before
    assert "rolled back by the shim" in servers.fleet("history")


def test_a_version_that_forgets_a_task_is_stopped(
    servers: Servers, site: Site, built: Path, images: Images, client: docker.APIClient
) -> None:
    site.run_task(TASK, images)
    lossy = variant(built, NEW, patch=FORGETFUL)
    with servers.checking(**offered(site, lossy)):
        eventually(finished(servers), within=PATIENCE, saying="the restart has an outcome")
    (row,) = servers.restarts()
    assert row["outcome"] == "lost tasks"
    status = servers.fleet("status")
    assert f"Version {NEW} is stopped for " in status
    assert f"task {TASK} was running and is not known any more" in status
    assert site.client.task(TASK).status is TaskStatus.RUNNING  # it was only made to look so
