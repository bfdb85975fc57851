"""What the plugin costs an instance check: no request, and hardly any time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path

import pytest

from tests.releases import environments
from tests.server.stub_shim import stub_shim
from tests.server_ext.databases import make_sqlite

SCRIPT = Path(__file__).with_name("timing.py")


@pytest.mark.parametrize(
    ("running", "tasks"),
    [("0.22.5", 1), ("0.22.4", 8)],
    ids=["nothing to decide", "a decision at each check"],
)
def test_a_check_gains_no_request_and_no_more_than_two_milliseconds(
    running: str, tasks: int, tmp_path: Path, *, full_counts: bool
) -> None:
    count = 2_000 if full_counts else 200
    database = make_sqlite(tmp_path)
    component = {"name": "dstack-shim", "version": "0.22.5", "status": "installed"}
    # A task under way: the answer is always no, and the shim is never restarted.
    listed = [{"id": f"job-{n}", "status": "pulling"} for n in range(tasks)]
    with stub_shim() as shim:
        healthcheck = {"service": "dstack-shim", "version": running}
        shim.says(healthcheck, {"components": [component]}, {"tasks": listed})
        ran = subprocess.run(
            [environments.with_plugin("0.22.5"), SCRIPT, str(shim.server_port), str(count)],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "DSTACK_SERVER_DIR": str(tmp_path / "server"),
                "DSTACK_DATABASE_URL": database.url,
            },
            check=True,
            capture_output=True,
            text=True,
            timeout=110,
        )
        asked = list(shim.asked)
    took = json.loads(ran.stdout.splitlines()[-1])
    half = len(asked) // 2
    assert asked[:half] == asked[half:]
    gained = statistics.median(took["loaded"]) - statistics.median(took["stock"])
    assert gained <= 0.002
