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

from dstack_shim.commands import COMMANDS, OPTIONS, Command
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
        "shim-log-level", "DSTACK_SHIM_LOG_LEVEL", "info", "fatal to trace, or 1-6"
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


@attrs.frozen
class Invocation:
    """A command line, read: what is wanted, and the words that were no flags."""

    settings: Settings
    version: bool = False
    help: bool = False
    options: Mapping[str, str] = attrs.field(factory=dict)
    """Of commands: the value of each that was given, "" for a switch."""
    words: tuple[str, ...] = ()

    @property
    def command(self) -> Command | None:
        """The command, None for the daemon."""
        return COMMANDS.get(self.words[0]) if self.words else None

    @property
    def arguments(self) -> tuple[str, ...]:
        """What follows the command."""
        return self.words[1:]

    @property
    def json(self) -> bool:
        """Whether to print for programs."""
        return "json" in self.options


_FLAGS: Mapping[str, attrs.Attribute[Any]] = {
    flag: field for field in attrs.fields(Settings) for flag in field.metadata["flags"]
}
_SWITCHES: Mapping[str, str] = {"version": "version", "v": "version", "help": "help", "h": "help"}


def read_invocation(argv: list[str], environ: Mapping[str, str]) -> Invocation:
    """Settings from flags, then variables, then defaults.

    Flags are ``-flag`` or ``--flag``, their value after a space or ``=``; booleans take a value
    only after ``=``; nothing may be abbreviated. ``--version`` and ``--help`` win over a broken
    environment: they must answer on any host.

    Raises ``UsageError`` naming the flag or variable and what was expected.
    """
    given = _read_flags(argv)
    if given.switches:
        return Invocation(
            Settings(),
            version="version" in given.switches,
            help="help" in given.switches,
            words=tuple(given.words),
        )
    _check_first_word(argv)
    invocation = Invocation(
        _settings(given.values, environ), options=given.options, words=tuple(given.words)
    )
    _check_command(invocation)
    return invocation


def names_command(argv: list[str]) -> bool:
    """Whether this is the command line of a command, however wrong the rest of it is."""
    words = iter(argv)
    for word in words:
        found = _read_flag(word)
        if found is None:
            return word in COMMANDS
        name, value = found
        if value is None and _takes_value(name):
            next(words, None)
    return False


@attrs.define
class _Given:
    """What a command line holds, each kind by itself."""

    values: dict[str, object] = attrs.field(factory=dict)
    options: dict[str, str] = attrs.field(factory=dict)
    switches: set[str] = attrs.field(factory=set)
    words: list[str] = attrs.field(factory=list)


def _read_flags(argv: list[str]) -> _Given:
    given = _Given()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            given.words += rest
            break
        found = _read_flag(word)
        if found is None:
            given.words.append(word)
            continue
        name, value = found
        if name in _SWITCHES:
            given.switches.add(_SWITCHES[name])
            continue
        if name not in _FLAGS and name not in OPTIONS:
            raise UsageError(f"unknown flag {word.partition('=')[0]}; see --help")
        if value is None and _takes_value(name):
            if not rest:
                raise UsageError(f"--{name}: expected a value")
            value = rest.pop(0)
        if name in OPTIONS:
            given.options[OPTIONS[name].name] = _of_option(name, value)
            continue
        field = _FLAGS[name]
        text = "true" if value is None else value
        given.values[field.name] = _converted(field, f"--{name}", text)
    return given


def _read_flag(word: str) -> tuple[str, str | None] | None:
    """Name and value of a flag, None for a word that is none."""
    found = re.fullmatch(r"--?([A-Za-z][A-Za-z0-9-]*)(?:=(.*))?", word, re.DOTALL)
    return (found[1], found[2]) if found else None


def _takes_value(name: str) -> bool:
    if name in OPTIONS:
        return OPTIONS[name].value != ""
    return name in _FLAGS and _kind(_FLAGS[name]) != "bool"


def _of_option(name: str, value: str | None) -> str:
    if value is not None and not _takes_value(name):
        raise UsageError(f"--{name} takes no value")
    return value or ""


def _settings(given: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
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
    return settings


def _check_first_word(argv: list[str]) -> None:
    """Later words change nothing, as with dstack's own shim; but a command misspelt, or one of a
    later release, must not start a daemon.
    """
    if argv and _read_flag(argv[0]) is None and argv[0] not in {"--", *COMMANDS}:
        raise UsageError(f"{argv[0]!r} is no command; expected one of {', '.join(COMMANDS)}")


def _check_command(invocation: Invocation) -> None:
    command = invocation.command
    known = {option.name for option in command.options} if command else set()
    for name in invocation.options:
        if name not in known:
            where = f"of {command.name}" if command else "of the daemon"
            raise UsageError(f"--{name} is no flag {where}; see --help")
    if command is None:
        return
    count = len(invocation.arguments)
    if count < command.fewest_arguments:
        raise UsageError(f"{command.name}: expected {command.argument}; see --help")
    if count > command.most_arguments:
        extra = invocation.arguments[command.most_arguments]
        raise UsageError(f"{command.name}: {extra!r} is one word too many; see --help")


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
