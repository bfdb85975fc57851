from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstack_shim.engine.runner_command import RunnerFlags, runner_command
from dstack_shim.errors import ComponentError


def words(version: str = "0.22.5", *keys: str, host: bool = True, **flags: str) -> list[str]:
    """The runner's part of the command, taken apart as a shell does."""
    command = runner_command(
        RunnerFlags(http_port=1, ssh_port=2, **flags),
        version=version,
        on_host_network=host,
        ssh_keys=keys,
    )
    return shlex.split(command[command.index(") && ") + 5 :])


def test_the_runner_is_told_all_it_needs() -> None:
    assert words("0.22.5", "key 1", "key 2", log_level="5", ssh_log_level="warn") == [
        "/usr/local/bin/dstack-runner",
        *("--log-level", "5"),
        "start",
        *("--temp-dir", "/tmp/runner"),
        *("--http-port", "1"),
        *("--ssh-port", "2"),
        *("--http-address", "localhost"),
        *("--ssh-authorized-key", "key 1"),
        *("--ssh-authorized-key", "key 2"),
        *("--ssh-log-level", "warn"),
    ]


def test_the_address_is_for_the_host_network_only() -> None:
    assert "--http-address" not in words(host=False)


@pytest.mark.parametrize("version", ["0.20.10", "0.20.18", "0.20.19rc1", "0.20.19.dev2"])
def test_an_old_runner_is_not_told_what_it_does_not_know(version: str) -> None:
    assert "--ssh-log-level" not in words(version, ssh_log_level="warn")


@pytest.mark.parametrize(
    "version", ["0.20.19", "0.21.0", "0.22.5", "0.20.19.post1", "1.0.0", "latest", "12345"]
)
def test_a_newer_runner_is(version: str) -> None:
    assert words(version, ssh_log_level="warn")[-2:] == ["--ssh-log-level", "warn"]


@pytest.mark.parametrize(
    ("level", "told"),
    [("info", "4"), ("WARNING", "3"), ("trace", "6"), ("5", "5"), ("fatal", "1")],
)
def test_an_old_runner_gets_its_level_as_a_digit(level: str, told: str) -> None:
    assert words("0.20.18", log_level=level)[2] == told
    assert words("0.20.19", log_level=level)[2] == level


@pytest.mark.parametrize("version", ["0.20.9", "0.18.34", "0.20.10rc1", "0.0.0"])
def test_a_runner_too_old_is_refused_by_its_version(version: str) -> None:
    with pytest.raises(ComponentError, match=f"dstack-runner {version} is too old.*0.20.10"):
        words(version)


def test_a_runner_that_is_not_there_is_refused() -> None:
    with pytest.raises(ComponentError, match="not installed"):
        words("")


KEYS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30),
    max_size=3,
)
ODD = ["it's", '"x"', "$(id)", "`id`", "a\nb", "\\", "-x", "", "; exit 9 #", "😀", "$HOME", "!"]


@settings(deadline=None, max_examples=30)  # each example is a shell
@given(KEYS | st.just(ODD))
def test_any_key_arrives_as_it_was_sent(keys: list[str]) -> None:
    command = runner_command(
        RunnerFlags(), version="0.22.5", on_host_network=True, ssh_keys=tuple(keys)
    )
    runner = command[command.index(") && ") + 5 :]
    shown = runner.replace("/usr/local/bin/dstack-runner", "printf '%s\\0'", 1)
    done = subprocess.run(["/bin/sh", "-c", shown], capture_output=True, check=True, timeout=10)
    arrived = done.stdout.decode().split("\0")[:-1]
    flags = arrived[arrived.index("localhost") + 1 :]
    assert flags[1::2] == keys
    assert set(flags[::2]) <= {"--ssh-authorized-key"}


def run_with(tools: Path, *programs: tuple[str, str], **environ: str) -> tuple[int, str]:
    """Run the whole command where PATH has just these programs; the runner prints "runner"."""
    for name, script in programs:
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    command = runner_command(RunnerFlags(), version="0.22.5", on_host_network=True, ssh_keys=())
    command = command.replace("/usr/local/bin/dstack-runner", "runner").replace(
        "/usr/sbin/sshd", f"{tools}/none"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        capture_output=True,
        text=True,
        env={"PATH": str(tools), **environ},
        timeout=10,
        check=False,
    )
    return done.returncode, done.stdout


RUNNER = ("runner", 'echo "runner ${LD_LIBRARY_PATH-unset}"')
SSHD = ("sshd", "exit 1")


def test_nothing_is_installed_where_sshd_is(tmp_path: Path) -> None:
    assert run_with(tmp_path, RUNNER, SSHD, ("apt-get", "echo installing")) == (
        0,
        "runner unset\n",
    )


@pytest.mark.parametrize(
    ("program", "called"),
    [
        ("apt-get", ["noninteractive update", "noninteractive install -y openssh-server"]),
        ("yum", [" install -y openssh-server"]),
        ("apk", [" add --no-cache openssh-server"]),
    ],
)
def test_a_missing_sshd_is_installed_with_what_is_there(
    tmp_path: Path, program: str, called: list[str]
) -> None:
    tool = (program, 'echo "${DEBIAN_FRONTEND-} $*"')
    assert run_with(tmp_path, RUNNER, tool) == (0, "\n".join([*called, "runner unset\n"]))


def test_an_install_that_fails_ends_the_job_with_its_code(tmp_path: Path) -> None:
    assert run_with(tmp_path, RUNNER, ("apt-get", "exit 100")) == (100, "")


def test_without_a_way_to_get_sshd_the_job_ends_with_11(tmp_path: Path) -> None:
    code, out = run_with(tmp_path, RUNNER)
    assert code == 11
    assert "not supported" in out
    assert "runner" not in out


def test_the_images_libraries_are_the_runners_not_the_installers(tmp_path: Path) -> None:
    tool = ("yum", 'echo "${LD_LIBRARY_PATH-unset} ${LD_PRELOAD-unset}"')
    assert run_with(tmp_path, RUNNER, tool, LD_LIBRARY_PATH="/image") == (
        0,
        "unset unset\nrunner /image\n",
    )
