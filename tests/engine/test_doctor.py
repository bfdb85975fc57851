"""The doctor on a real host: beside a running shim, after its death, and without an engine."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.host import Host
from tests.lab.images import RUNS_ON, Images
from tests.lab.shim import ShimProcess, executable

RUNNING = TaskStatus.RUNNING


def doctor(shim: ShimProcess, *flags: str, **environ: str) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of ``doctor --json`` for the shim's home."""
    done = subprocess.run(
        [*executable(), "doctor", "--json", f"--shim-home={shim.home}", *flags],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def files(shim: ShimProcess) -> dict[str, tuple[int, int]]:
    """What would show that something was written: inode and change time of everything."""
    return {
        str(path): (path.lstat().st_ino, path.lstat().st_ctime_ns)
        for path in shim.home.rglob("*")
        if path != shim.log_file
    }


def test_it_tells_beside_a_running_shim_and_after_it_what_a_start_would_keep(
    instance: Host, images: Images
) -> None:
    shim = instance.start_shim()
    environ = instance.engine.environ
    image = images.job(RUNS_ON)
    for task_id in ("t1", "t2"):
        shim.submit(task_id, image)
        shim.wait_for(task_id, RUNNING)
    before = files(shim)
    code, answer = doctor(shim, **environ)
    assert (code, answer["level"]) == (0, "ok")
    assert {task["id"]: (task["status"], task["next"]) for task in answer["tasks"]} == {
        "t1": ("running", "nothing"),
        "t2": ("running", "nothing"),
    }
    assert f"pid {shim.pid}" in answer["findings"][0]["words"]
    assert files(shim) == before
    shim.kill()
    code, answer = doctor(shim, **environ)
    assert code == 0
    assert "unused" in answer["findings"][0]["words"]
    assert files(shim) == before
    shim.start()
    assert shim.statuses() == {"t1": "running", "t2": "running"}


def test_it_names_a_damaged_record_before_the_start_and_after_it(
    instance: Host, images: Images
) -> None:
    shim = instance.start_shim()
    shim.submit("t1", images.job(RUNS_ON))
    name = shim.wait_for("t1", RUNNING).container_name
    shim.kill()
    (shim.home / "runners" / name / "task.json").write_bytes(b"")
    for what in (f"record in {name}", f"record {name}/.task.json.damaged-1"):
        code, answer = doctor(shim, **instance.engine.environ)
        assert code == 1
        assert what in {item["what"] for item in answer["findings"] if item["level"] == "look"}
        assert [task["id"] for task in answer["tasks"]] == ["t1"]
        if not shim.is_running:
            shim.start()
    assert shim.statuses() == {"t1": "running"}


def test_without_an_engine_it_cannot_tell(instance: Host) -> None:
    shim = instance.shim()
    code, answer = doctor(shim, DOCKER_HOST="unix:///nowhere.sock")
    assert (code, answer["level"], answer["plan"]) == (2, "unknown", None)
    assert list(shim.home.iterdir()) == []
