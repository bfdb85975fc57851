"""The sandbox itself, from outside: codes and signals pass, nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.eventually import eventually
from tests.lab import sandbox

PROGRAM = Path(__file__).parent / "sandbox"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(sandbox.inside(), reason="is about entering a sandbox from outside"),
]


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *command],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, **environ},
    )


def start(script: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [PROGRAM, "sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def host_state() -> Sequence[object]:
    return (
        Path("/proc/self/mountinfo").read_text(),
        sorted(os.listdir("/run")),  # noqa: PTH208 - names alone
        sorted(os.listdir("/dev")),  # noqa: PTH208
        sorted(os.listdir("/mnt")),  # noqa: PTH208
        sorted(path.name for path in Path.home().iterdir()),
        Path("/proc/net/dev").read_text().count(":"),
    )


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_is_the_commands(code: int) -> None:
    assert run("sh", "-c", f"exit {code}").returncode == code


def test_a_command_killed_by_a_signal_tells_which() -> None:
    assert run("sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_a_command_that_is_not_there_is_said() -> None:
    done = run("no-such-command")
    assert done.returncode == 125
    assert "no-such-command" in done.stderr


def test_without_a_command_it_says_how_to_use_it() -> None:
    assert run().returncode == 125


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_command(number: signal.Signals) -> None:
    # A shell cannot trap what is ignored when it starts, as SIGHUP is in a run that goes on
    # without its terminal.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        process = start(
            f"trap 'exit 9' {number.value}; echo ready; while true; do sleep 0.05; done"
        )
    finally:
        signal.signal(number, before)
    process.send_signal(number)
    assert process.wait(10) == 9
    assert process.stdout is not None
    process.stdout.close()


def test_nothing_outlives_the_command() -> None:
    mark = f"{os.getpid()}.25"
    done = run("sh", "-c", f"setsid sleep 1000{mark} & setsid sleep 2000{mark} & exit 3")
    assert done.returncode == 3
    assert mark not in _all_commands()


def test_nothing_outlives_the_launcher_when_it_is_killed() -> None:
    mark = f"3000{os.getpid()}.25"
    process = start(f"sleep {mark} & echo ready; wait")
    assert mark in _all_commands()
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    eventually(lambda: mark not in _all_commands())


def test_orphans_are_reaped_at_once() -> None:
    script = "sh -c 'sleep 0.1 & exit 0'; sleep 0.5; grep -c '^State:.*Z' /proc/[0-9]*/status"
    assert "status:1" not in run("sh", "-c", script).stdout


def test_what_is_done_inside_stays_inside() -> None:
    before = host_state()
    script = (
        "set -e; mkdir -p ~/.ssh /mnt/disks/x /run/x; echo k > ~/.ssh/authorized_keys;"
        "touch ~/.x /usr/local/bin/x /etc/x /opt/x /dev/shm/x; mknod /dev/kfd c 1 3;"
        "mount -t tmpfs none /mnt/disks/x; ip link add br9 type bridge; hostname inside;"
        "rm -rf /etc/passwd"
    )
    done = run("sh", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert host_state() == before
    assert Path("/etc/passwd").exists()
    assert not Path("/usr/local/bin/x").exists()


def test_the_home_begins_without_keys_records_and_engine_settings() -> None:
    done = run(
        "sh",
        "-c",
        'ls -d ~/.ssh ~/.dstack ~/.docker 2>/dev/null; echo "${DOCKER_HOST-unset}"',
        DOCKER_HOST="tcp://outside:1",
    )
    assert done.stdout == "unset\n"


def test_loopback_works_and_nothing_else_is_there() -> None:
    script = "grep -c : /proc/net/dev; ping -c 1 -W 1 127.0.0.1 >/dev/null 2>&1; ip route | wc -l"
    assert run("sh", "-c", script).stdout.split() == ["1", "0"]


def test_the_checkout_is_the_hosts(tmp_path: Path) -> None:
    note = tmp_path / "note"
    assert run("sh", "-c", f"echo kept > {note}; pwd").stdout == f"{Path.cwd()}\n"
    assert note.read_text() == "kept\n"


def test_a_sandbox_inside_a_sandbox_is_the_same_one() -> None:
    assert run(str(PROGRAM), "sh", "-c", "exit 4").returncode == 4


def test_its_mark_alone_is_not_believed() -> None:
    done = run("true", **{sandbox.MARK: "forged"})
    assert done.returncode == 0
    script = "import sys; from tests.lab import sandbox; sys.exit(not sandbox.inside())"
    outside = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, sandbox.MARK: "forged"},
        timeout=30,
        check=False,
    )
    assert outside.returncode == 1


def test_somebody_else_than_root_is_refused() -> None:
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(PROGRAM), "true"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode in (125, 126)  # 126: the checkout itself is closed to that user
    assert "root" in done.stderr or "denied" in done.stderr


def _all_commands() -> str:
    words = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words.append(entry.read_bytes().decode("utf-8", "replace"))
        except OSError:
            continue
    return "\n".join(words)
