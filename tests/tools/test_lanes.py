"""Lanes are tried with a nox of our own making: a script in its place."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.eventually import eventually
from tools import lanes
from tools.lanes import Lanes, Session, describe

NOX = """
import json, os, pathlib, subprocess, sys, time
report, name = sys.argv[2], sys.argv[4]
print("output of", name)
if name == "hangs":
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("child").write_text(str(child.pid))
    child.wait()
if name == "dies":
    os.kill(os.getpid(), 9)
if name == "meets":  # its partner of the other lane, or never ends
    pathlib.Path(os.environ["ME"] + sys.argv[4]).touch()
    while len(list(pathlib.Path().glob("met-*"))) < 2:
        time.sleep(0.01)
result = "failed" if name == "fails" else "success"
pathlib.Path(report).write_text(json.dumps({"sessions": [{"result": result, "reason": None}]}))
"""


@pytest.fixture(autouse=True)
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nox.py").write_text(NOX)
    monkeypatch.setattr(lanes, "ROOT", tmp_path)
    monkeypatch.setattr(lanes, "LOGS", tmp_path / "logs")
    return tmp_path


def lanes_of(limit: float = 60.0) -> Lanes:
    return Lanes(dict(os.environ), limit)


def results(ran: Lanes) -> dict[str, str]:
    return {session.name: session.result for session in ran.finished}


def test_a_lane_goes_on_after_a_failure() -> None:
    ran = lanes_of()
    ran.run([["fails", "works"]])
    assert results(ran) == {"fails": "failed", "works": "success"}


def test_a_session_that_is_killed_has_died() -> None:
    ran = lanes_of()
    ran.run([["dies"]])
    assert results(ran) == {"dies": "died"}


def test_lanes_run_side_by_side(workshop: Path) -> None:
    meet = NOX.replace('os.environ["ME"] + sys.argv[4]', '"met-" + str(os.getpid())')
    (workshop / "nox.py").write_text(meet)
    ran = lanes_of()
    ran.run([["meets"], ["meets"]])
    assert [session.result for session in ran.finished] == ["success", "success"]


def test_what_takes_too_long_is_killed_with_its_children(workshop: Path) -> None:
    ran = lanes_of(limit=2.0)
    ran.run([["hangs"]])
    assert ran.finished[0].reason == "not done in 2 s"
    eventually(lambda: not is_alive(workshop / "child"), saying="the child is gone")


def test_an_interrupt_ends_what_is_running(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        eventually((workshop / "child").exists)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    ran = lanes_of()
    with pytest.raises(KeyboardInterrupt):
        ran.run([["hangs", "works"]])
    eventually(lambda: not is_alive(workshop / "child"), saying="the child is gone")
    assert "works" not in results(ran)


def test_a_success_is_one_line_and_a_failure_is_told_in_full(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("nox > Running\n==== 3 passed, 1 skipped in 0.12s ====\n")
    assert describe(Session("fast", "success", "", 2.0, log)).splitlines() == [
        "--- fast: success in 2 s",
        "    3 passed, 1 skipped in 0.12s",
    ]
    assert "nox > Running" in describe(Session("fast", "failed", "", 2.0, log))


def is_alive(file: Path) -> bool:
    """Whether the process named there runs; a zombie does not."""
    try:
        status = Path(f"/proc/{file.read_text()}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
