"""The doctor on a real host: beside a running shim, after its death, and without an engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.census import VOLUMES, mounted_volumes
from tests.lab.host import Host, public_key
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


def words(answer: dict[str, Any], what: str) -> str:
    (found,) = [item["words"] for item in answer["findings"] if item["what"] == what]
    assert isinstance(found, str)
    return found


def files(shim: ShimProcess) -> dict[str, tuple[int, int]]:
    """What would show that something was written: inode and change time of everything but the
    log and what jobs write.
    """
    return {
        str(path): (path.lstat().st_ino, path.lstat().st_ctime_ns)
        for path in shim.home.rglob("*")
        if path != shim.log_file and "runner" not in path.parts
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
    assert (code, answer["level"]) == (0, "ok"), answer["findings"]
    assert {task["id"]: (task["status"], task["next"]) for task in answer["tasks"]} == {
        "t1": ("running", "nothing"),
        "t2": ("running", "nothing"),
    }
    assert f"pid {shim.pid}" in words(answer, "home")
    assert files(shim) == before
    shim.kill()
    code, answer = doctor(shim, **environ)
    assert (code, answer["level"]) == (1, "warning")
    assert "unused" in words(answer, "home")
    assert words(answer, "shim") == "none runs on this home"
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
        assert what in {item["what"] for item in answer["findings"] if item["level"] == "warning"}
        assert [task["id"] for task in answer["tasks"]] == ["t1"]
        if not shim.is_running:
            shim.start()
    assert shim.statuses() == {"t1": "running"}


def test_without_an_engine_it_cannot_tell(instance: Host) -> None:
    shim = instance.shim()
    code, answer = doctor(shim, DOCKER_HOST="unix:///nowhere.sock")
    assert (code, answer["level"], answer["plan"]) == (2, "broken", None)
    assert list(shim.home.iterdir()) == []


THEIRS = b"ssh-ed25519 AAAATHEIRS somebody\r\n# added by dstack\n\n"


def test_it_gives_back_what_is_nobodys_and_touches_nothing_else(instance: Host) -> None:
    """As a shim leaves it that was lost with its records: a mount, and a key that still logs in."""
    shim = instance.shim()
    alice = instance.user("alice")
    keys = alice / ".ssh" / "authorized_keys"
    keys.parent.mkdir(exist_ok=True)
    line = " ".join(public_key(1).split()[:2]) + " # added by dstack-shim\n"
    keys.write_bytes(line.encode() + THEIRS)
    for path in (keys.parent, keys):
        shutil.chown(path, "alice")
    instance.disk("data", file_system=True)
    point = Path(VOLUMES, "data")
    point.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "/dev/disk/by-id/google-data", point], check=True, timeout=60)
    _, answer = doctor(shim, **instance.engine.environ)
    fixes = {item["what"]: item["fix"] for item in answer["findings"] if item["fix"]}
    assert fixes == {"volume data": "unmount", "keys of alice": "forget_keys"}
    done = subprocess.run(
        [*executable(), "doctor", "--fix", f"--shim-home={shim.home}"],
        env={**os.environ, **instance.engine.environ},
        input="y\ny\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.count(": mended") == 2, done.stdout + done.stderr
    assert keys.read_bytes() == THEIRS
    assert mounted_volumes() == []
