"""The daemon's settings: what each flag and variable is called, means and defaults to.

Names, spellings and defaults are those of dstack's own shim, which servers and service units
rely on; see the command line section of ``docs/protocol.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from dstack_shim.errors import UsageError
from dstack_shim.log import parse_level

_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})
_PROXY = "http_proxy,https_proxy,no_proxy,HTTP_PROXY,HTTPS_PROXY,NO_PROXY"


def _flag(names: str, variable: str, default: object, help: str) -> Any:
    metadata = {"flags": tuple(names.split()), "variable": variable, "help": help}
    return attrs.field(default=default, metadata=metadata)


@attrs.frozen
class Settings:
    """One attribute a flag. Ports are tcp, intervals milliseconds."""

    shim_home: str = _flag(
        "shim-home", "DSTACK_SHIM_HOME", "~/.dstack", "directory of records and logs"
    )
    shim_binary_path: str = _flag(
        "shim-binary-path", "DSTACK_SHIM_BINARY_PATH", "", "where the shim is installed"
    )
    shim_http_port: int = _flag(
        "shim-http-port", "DSTACK_SHIM_HTTP_PORT", 10998, "port of the API, on 127.0.0.1"
    )
    shim_log_level: str = _flag(
        "shim-log-level", "DSTACK_SHIM_LOG_LEVEL", "info", "fatal … trace, or 1-6"
    )
    runner_download_url: str = _flag(
        "runner-download-url", "DSTACK_RUNNER_DOWNLOAD_URL", "", "fetched when it is missing"
    )
    runner_binary_path: str = _flag(
        "runner-binary-path",
        "DSTACK_RUNNER_BINARY_PATH",
        "/usr/local/bin/dstack-runner",
        "where the runner is installed",
    )
    runner_http_port: int = _flag(
        "runner-http-port", "DSTACK_RUNNER_HTTP_PORT", 10999, "port of the runner's API"
    )
    runner_ssh_port: int = _flag(
        "runner-ssh-port", "DSTACK_RUNNER_SSH_PORT", 10022, "port of the job's sshd"
    )
    runner_log_level: str = _flag(
        "runner-log-level", "DSTACK_RUNNER_LOG_LEVEL", "info", "passed on to the runner"
    )
    runner_ssh_log_level: str = _flag(
        "runner-ssh-log-level", "DSTACK_RUNNER_SSH_LOG_LEVEL", "", "passed on to the runner"
    )
    dcgm_exporter_http_port: int = _flag(
        "dcgm-exporter-http-port", "DSTACK_DCGM_EXPORTER_HTTP_PORT", 10997, "port of its metrics"
    )
    dcgm_exporter_interval: int = _flag(
        "dcgm-exporter-interval", "DSTACK_DCGM_EXPORTER_INTERVAL", 5000, "milliseconds"
    )
    dcgm_address: str = _flag(
        "dcgm-address", "DSTACK_DCGM_ADDRESS", "", "of a running nv-hostengine; else embedded"
    )
    pass_env: str = _flag(
        "pass-env", "DSTACK_DOCKER_PASS_ENV", _PROXY, "variables handed to containers"
    )
    privileged: bool = _flag(
        "privileged", "DSTACK_DOCKER_PRIVILEGED", False, "give containers extended privileges"
    )
    pjrt_device: str = _flag("pjrt-device", "PJRT_DEVICE", "", "set in containers (Cloud TPU)")
    service: bool = _flag(
        "service", "DSTACK_SERVICE_MODE", False, "write host_info.json at the start"
    )
    answer_jobs: bool = _flag(
        "answer-jobs", "DSTACK_SHIM_ANSWER_JOBS", False, "let containers use the API, too"
    )

    def home(self) -> Path:
        """The home, ``~`` expanded."""
        return Path(self.shim_home).expanduser()

    def check(self) -> None:
        """Check what the types cannot say.

        Raises ``UsageError`` naming flag and expectation.
        """
        parse_level("--shim-log-level", self.shim_log_level)
        parse_level("--runner-log-level", self.runner_log_level)
        for name in ("shim_http_port", "runner_http_port", "runner_ssh_port"):
            port = getattr(self, name)
            if not 0 < port < 65536:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag}: {port} is not a port; expected 1-65535")


DOCTOR = "doctor"
"""The command that looks instead of serving."""


@attrs.frozen
class Invocation:
    """A command line, read: what is wanted, and the words that were no flags."""

    settings: Settings
    version: bool = False
    help: bool = False
    json: bool = False
    """Print for programs; of commands alone."""
    words: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command, "" for the daemon: dstack's own shim ignores words it does not know."""
        return DOCTOR if self.words[:1] == (DOCTOR,) else ""


_FLAGS: Mapping[str, attrs.Attribute[Any]] = {
    flag: field for field in attrs.fields(Settings) for flag in field.metadata["flags"]
}
_SWITCHES: Mapping[str, str] = {
    "version": "version",
    "v": "version",
    "help": "help",
    "h": "help",
    "json": "json",
}


def read_invocation(argv: list[str], environ: Mapping[str, str]) -> Invocation:
    """Settings from flags, then variables, then defaults.

    Flags are ``-flag`` or ``--flag``, their value after a space or ``=``; booleans take a value
    only after ``=``; nothing may be abbreviated. ``--version`` and ``--help`` win over a broken
    environment: they must answer on any host.

    Raises ``UsageError`` naming the flag or variable and what was expected.
    """
    given, switches, words = _read_flags(argv)
    if switches & {"version", "help"}:
        return Invocation(
            Settings(), version="version" in switches, help="help" in switches, words=words
        )
    values: dict[str, object] = {}
    for field in attrs.fields(Settings):
        variable = field.metadata["variable"]
        if field.name in given:
            values[field.name] = given[field.name]
        elif variable in environ:
            value = _from_variable(field, variable, environ[variable])
            if value is not None:
                values[field.name] = value
    settings = Settings(**values)  # type: ignore[arg-type]  # each value was read for its field
    settings.check()
    invocation = Invocation(settings, json="json" in switches, words=words)
    if invocation.json and not invocation.command:
        raise UsageError(f"--json is a flag of {DOCTOR}; see --help")
    return invocation


def _read_flags(argv: list[str]) -> tuple[dict[str, object], set[str], tuple[str, ...]]:
    given: dict[str, object] = {}
    switches: set[str] = set()
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        found = re.fullmatch(r"--?([A-Za-z][A-Za-z0-9-]*)(?:=(.*))?", word, re.DOTALL)
        if word == "--" or found is None:
            words += rest if word == "--" else [word]
            if word == "--":
                break
            continue
        name, value = found.group(1), found.group(2)
        if name in _SWITCHES:
            switches.add(_SWITCHES[name])
            continue
        field = _FLAGS.get(name)
        if field is None:
            raise UsageError(f"unknown flag {word.partition('=')[0]}; see --help")
        if value is None and _kind(field) == "bool":
            value = "true"
        elif value is None:
            if not rest:
                raise UsageError(f"--{name}: expected a value")
            value = rest.pop(0)
        given[field.name] = _converted(field, f"--{name}", value)
    return given, switches, tuple(words)


def _from_variable(field: attrs.Attribute[Any], variable: str, text: str) -> object:
    """The value of a set variable; None where an empty one counts as not set."""
    if text == "" and _kind(field) == "int":
        return None
    if text == "" and _kind(field) == "bool":
        return False
    return _converted(field, variable, text)


def _converted(field: attrs.Attribute[Any], source: str, text: str) -> object:
    if _kind(field) == "bool":
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise UsageError(f"{source}: {text!r} is not a boolean; expected true or false")
    if _kind(field) == "int":
        if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            return int(text)
        raise UsageError(f"{source}: {text!r} is not a whole number")
    return text


def _kind(field: attrs.Attribute[Any]) -> str:
    # Postponed annotations are text at run time, whatever attrs' own type hint says.
    return str(field.type)


def usage() -> str:
    """The help text: every flag with its variable and default."""
    lines = [
        "usage: dstack-shim [flags]",
        f"       dstack-shim {DOCTOR} [--json] [flags]",
        "",
        "Runs dstack jobs on this host as Docker containers. Flags may be -flag or --flag; each",
        "has an environment variable, which it overrides.",
        "",
        f"{DOCTOR} changes nothing: it tells what a start on the same home would do. It exits with",
        "0 if every task would be kept, 1 if there is something to look at, 2 if it cannot tell.",
        "",
    ]
    for field in attrs.fields(Settings):
        meta = field.metadata
        name = f"--{meta['flags'][0]}"
        default = "" if field.default in ("", False) else f" (default {field.default})"
        lines.append(f"  {name:<28}{meta['help']}{default}")
        lines.append(f"  {'':<28}${meta['variable']}")
    lines.append(f"  {'--version, -v':<28}print the version")
    return "\n".join(lines)
