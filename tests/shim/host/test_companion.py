"""A program beside the daemon: real processes, because starting and ending them is the point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dstack_shim.host import companion
from dstack_shim.host.companion import Companion
from dstack_shim.log import event_log
from tests.eventually import eventually, eventually_async

Make = Callable[[str], Companion]


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


@pytest.fixture
async def make(pids: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Make a companion of a shell script, which has added its pid to ``pids``."""
    monkeypatch.setattr(companion, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(companion, "LONGEST_PAUSE", 0.02)
    made: list[Companion] = []

    def make_one(script: str) -> Companion:
        made.append(Companion("helper", ["sh", "-c", f"echo $$ >> {pids}; {script}"], event_log()))
        return made[-1]

    yield make_one
    for one in made:
        if one._thread.is_alive():
            await one.stop()


def started(pids: Path) -> list[int]:
    return [int(line) for line in pids.read_text().split()] if pids.exists() else []


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_program_that_ends_is_started_again_and_its_last_words_logged(
    make: Make, pids: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make("echo first; echo cannot bind; exit 3").start()

    await eventually_async(lambda: len(started(pids)) >= 3)

    assert 'helper.ended last_words="code 3 | first | cannot bind"' in caplog.text


async def test_stop_ends_the_program_and_its_children(
    make: Make, pids: Path, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    one = make(f"sleep 600 & echo $! > {child}; wait")
    one.start()
    await eventually_async(lambda: child.exists() and child.read_text().strip())

    await one.stop()

    assert not Path(f"/proc/{started(pids)[0]}").exists(), "neither running nor a zombie"
    eventually(lambda: not runs(int(child.read_text())))
    assert len(started(pids)) == 1


async def test_program_that_ignores_sigterm_is_killed(
    make: Make, pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companion, "GRACE", 0.2)
    one = make("trap '' TERM; while :; do sleep 0.05; done")
    one.start()
    await eventually_async(lambda: started(pids))

    await one.stop()

    assert not Path(f"/proc/{started(pids)[0]}").exists()


async def test_program_that_closes_its_output_and_lives_on_can_be_stopped(
    make: Make, pids: Path
) -> None:
    one = make("exec >&- 2>&-; exec sleep 600")
    one.start()
    await eventually_async(lambda: started(pids))

    await one.stop()

    assert not Path(f"/proc/{started(pids)[0]}").exists()


async def test_stop_between_two_starts_is_quick(
    make: Make, pids: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(companion, "FIRST_PAUSE", 600.0)
    one = make("exit 0")
    one.start()
    await eventually_async(lambda: "helper.ended" in caplog.text)

    await one.stop()

    assert not one._thread.is_alive()
    assert len(started(pids)) == 1


async def test_missing_program_is_logged_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(companion, "FIRST_PAUSE", 0.01)
    one = Companion("helper", ["/no/such/program"], event_log())
    one.start()

    await eventually_async(lambda: caplog.text.count("helper.ended") >= 2)
    await one.stop()

    assert "FileNotFoundError" in caplog.text


async def test_without_an_interpreter_to_start_it_the_failure_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    one = Companion("helper", ["true"], event_log())
    one.start()

    await eventually_async(lambda: "No such file or directory" in caplog.text)
    await one.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, "execve"])
def test_program_dies_with_the_daemon(tmp_path: Path, how: signal.Signals | str) -> None:
    """Also when the daemon is killed, or replaces itself without having stopped it."""
    pid_file = tmp_path / "pid"
    script = (
        "import sys, os\n"
        "from dstack_shim.host.companion import Companion\n"
        "from dstack_shim.log import event_log\n"
        "Companion('h', ['sh', '-c', 'echo $$ > $0; exec sleep 600', sys.argv[1]], event_log()).start()\n"
        "sys.stdin.readline()\n"
        "os.execvp('sleep', ['sleep', '600'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(pid_file)],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as daemon:
        try:
            eventually(lambda: pid_file.exists() and pid_file.read_text().strip(), within=30)
            pid = int(pid_file.read_text())
            assert runs(pid)
            if isinstance(how, str):
                assert daemon.stdin is not None
                daemon.stdin.write(b"\n")
                daemon.stdin.flush()
            else:
                daemon.send_signal(how)
            eventually(lambda: not runs(pid))
        finally:
            daemon.kill()
