from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import host_state

ROOT = Path(__file__).parents[2]

# A child that leaves a daemon behind: a grandchild in a session of its own.
# It holds no pipe of ours (-3 is DEVNULL), as a daemon would not.
LEAVES_A_DAEMON = """
import subprocess, sys
from tools import host_state
host_state.adopt_orphans()
subprocess.run([sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '60'], "
    "start_new_session=True, stdout=-3, stderr=-3)"], check=True)
print(host_state.leftover_processes(within=0.2))
"""


def test_a_state_equals_itself() -> None:
    state = host_state.take()
    assert host_state.differences(state, state) == []


def test_what_came_and_what_went_is_named_with_its_section() -> None:
    before = {"mounts": ["/a tmpfs", "/b tmpfs"], "links": ["lo"]}
    after = {"mounts": ["/b tmpfs"], "links": ["lo", "docker0"]}
    assert host_state.differences(before, after) == ["links: + docker0", "mounts: - /a tmpfs"]


def test_a_key_planted_for_the_user_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / ".ssh" / "authorized_keys"
    keys.parent.mkdir()
    keys.write_text("old\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    before = host_state.take()
    keys.write_text("new\n")
    changes = host_state.differences(before, host_state.take())
    assert [line[:6] for line in changes] == ["ssh: +", "ssh: -"]
    keys.write_text("old\n")
    keys.chmod(0o640)
    assert host_state.differences(before, host_state.take())


def test_rules_count_and_empty_tables_do_not() -> None:
    saved = """# a comment with a time
*filter
:INPUT ACCEPT [9:99]
:FORWARD DROP [0:0]
:DOCKER - [0:0]
-A FORWARD -j DOCKER
COMMIT
"""
    assert list(host_state._rules(saved.splitlines())) == [
        "filter chain FORWARD DROP",
        "filter chain DOCKER -",
        "filter -A FORWARD -j DOCKER",
    ]


def test_a_daemon_left_by_a_descendant_is_found() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", LEAVES_A_DAEMON],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    leftovers = asked.stdout.strip()
    subprocess.run(["kill", leftovers.split("'")[1].split()[0]], check=True, timeout=10)
    assert "sleep 60" in leftovers
