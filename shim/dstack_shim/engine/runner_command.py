"""The command a task's container runs: sshd if it is missing, then the runner.

Flags differ between releases of the runner, and one it does not know kills the job, so the
command is built for the version that is installed.
"""

from __future__ import annotations

import shlex
from typing import Final

import attrs
from dstack_shim_contracts.versions import parse_version
from packaging.version import Version

from dstack_shim.errors import ComponentError

RUNNER_IN_CONTAINER: Final = "/usr/local/bin/dstack-runner"
RUNNER_DIR_IN_CONTAINER: Final = "/tmp/runner"  # noqa: S108 - a path inside the container, fixed by every runner

OLDEST_RUNNER: Final = Version("0.20.10")
"""The first that knows ``--http-address``: older ones would listen on every interface."""
_KNOWS_SSH_LOG_LEVEL: Final = Version("0.20.19")
_KNOWS_LEVEL_NAMES: Final = Version("0.20.19")

_LEVEL_DIGITS: Final = {
    "fatal": "1",
    "error": "2",
    "warn": "3",
    "warning": "3",
    "info": "4",
    "debug": "5",
    "trace": "6",
}

# In a subshell: what it unsets and sources stays there, and `exit` becomes its own result.
# The libraries of the image's own variables may break the package managers.
_INSTALL_SSHD: Final = """\
(
unset LD_LIBRARY_PATH LD_PRELOAD
if command -v sshd >/dev/null 2>&1 || [ -x /usr/sbin/sshd ]; then
  exit 0
fi
if command -v apt-get >/dev/null 2>&1; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update && apt-get install -y openssh-server
elif command -v yum >/dev/null 2>&1; then
  yum install -y openssh-server
elif command -v apk >/dev/null 2>&1; then
  apk add --no-cache openssh-server
else
  [ ! -r /etc/os-release ] || . /etc/os-release
  echo "${PRETTY_NAME:-${NAME:-this image}}: not supported, it has no sshd and no apt-get, yum or apk"
  exit 11
fi
)"""


@attrs.frozen
class RunnerFlags:
    """What the runner is told, from the shim's own flags."""

    http_port: int = 10999
    ssh_port: int = 10022
    log_level: str = "info"
    """Passed through as given: a name or a digit."""
    ssh_log_level: str = ""


def runner_command(
    flags: RunnerFlags, *, version: str, on_host_network: bool, ssh_keys: tuple[str, ...]
) -> str:
    """One command for ``/bin/sh -c``.

    Not ``exec``: the shell stays the first process, as in every release, and reaps what jobs
    leave behind, which the runner would not.

    Raises ``ComponentError`` for a runner too old, or not there.
    """
    words = [RUNNER_IN_CONTAINER, *_runner_arguments(flags, version, on_host_network)]
    for key in ssh_keys:
        words += ["--ssh-authorized-key", key]
    if flags.ssh_log_level and _knows(version, _KNOWS_SSH_LOG_LEVEL):
        words += ["--ssh-log-level", flags.ssh_log_level]
    return f"{_INSTALL_SSHD} && {shlex.join(words)}"


def _runner_arguments(flags: RunnerFlags, version: str, on_host_network: bool) -> list[str]:
    if not version:
        raise ComponentError("dstack-runner is not installed on this host")
    if not _knows(version, OLDEST_RUNNER):
        raise ComponentError(
            f"dstack-runner {version} is too old for this shim; expected {OLDEST_RUNNER} or newer"
        )
    words = ["--log-level", _level(flags.log_level, version), "start"]
    words += ["--temp-dir", RUNNER_DIR_IN_CONTAINER]
    words += ["--http-port", str(flags.http_port), "--ssh-port", str(flags.ssh_port)]
    if on_host_network:
        words += ["--http-address", "localhost"]
    return words


def _level(level: str, version: str) -> str:
    if _knows(version, _KNOWS_LEVEL_NAMES):
        return level
    return _LEVEL_DIGITS.get(level.lower(), level)


def _knows(version: str, since: Version) -> bool:
    """Whether a runner of this version has what came with ``since``.

    ``latest`` and bare build numbers are development builds of the newest code.
    """
    parsed = parse_version(version)
    return parsed is None or parsed >= since
