"""The help texts and the man page, written from the tables of flags and commands."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import attrs

from dstack_shim import build
from dstack_shim.commands import COMMANDS, UNKNOWN_TASK, WRONG_USE, Command, Option
from dstack_shim.settings import Settings

_WIDTH = 80
_INDENT = 28
_ABOUT = (
    "Runs dstack jobs on this host as Docker containers that outlive it. Without a command it is "
    "the daemon, as dstack starts it; the commands are for people, beside a running shim, without "
    "one, and without an engine."
)
_FLAGS = (
    "Flags may be -flag or --flag, their value after a space or =. Each has an environment "
    "variable, which it overrides. Commands take --shim-home and --shim-http-port, too: give "
    "them what the daemon has."
)
_SCREEN = (
    "COLUMNS sets the width of tables, NO_COLOR takes colours away, and a locale without UTF-8 "
    "gets ASCII. Names and output of tasks are never sent to a terminal raw."
)
_EXITS = {
    0: "answered; for the daemon: told to stop",
    1: "not to be had, or the daemon could not start: standard error says why",
    WRONG_USE: "a command was asked wrongly (the daemon exits with 1 then)",
    3: "status: no shim answers",
    UNKNOWN_TASK: "no task, or more than one, goes by that id",
}


def usage() -> str:
    """The help of the whole file."""
    lines = ["usage: dstack-shim [flags]", "       dstack-shim COMMAND [options] [flags]", ""]
    lines += [*_paragraph(_ABOUT), "", "commands (dstack-shim COMMAND --help tells more):"]
    for command in COMMANDS.values():
        lines += _entry(f"{command.name} {command.argument}".strip(), command.summary)
    lines += ["", *_paragraph(_FLAGS), "", "flags:"]
    for name, variable, words in _flags():
        lines += [*_entry(f"--{name}", words), " " * _INDENT + f"${variable}"]
    lines += _entry("--version, -v", "print the version")
    lines += _entry("--help, -h", "print this, or the help of a command")
    lines += ["", "exit codes:"]
    for code, words in _EXITS.items():
        lines += _entry(str(code), words)
    return "\n".join([*lines, "", *_paragraph(_SCREEN)])


def command_help(command: Command) -> str:
    """The help of one command."""
    lines = [f"usage: {synopsis(command)}", ""]
    lines += _paragraph(f"{command.summary[0].upper()}{command.summary[1:]}.")
    for text in command.text:
        lines += ["", *_paragraph(text)]
    lines += ["", "options:"]
    for option in command.options:
        lines += _entry(spelling(option), option.help)
    lines += _entry("--shim-home DIRECTORY", "the home of the shim, if not ~/.dstack")
    lines += _entry("--shim-http-port PORT", "the port of its API, if not 10998")
    lines += ["", "exit codes:"]
    for code, words in exits(command).items():
        lines += _entry(str(code), words)
    return "\n".join(lines)


def synopsis(command: Command) -> str:
    """How it is called."""
    options = " ".join(f"[{spelling(option, short=True)}]" for option in command.options)
    return " ".join(
        part for part in ("dstack-shim", command.name, options, command.argument) if part
    )


def spelling(option: Option, *, short: bool = False) -> str:
    """An option's names, or one of them, with what stands for its value."""
    names = [f"--{name}" if len(name) > 1 else f"-{name}" for name in option.names]
    value = f" {option.value}" if option.value else ""
    return (names[-1] if short else ", ".join(names)) + value


def exits(command: Command) -> dict[int, str]:
    """Every exit code it has."""
    common = {0: "answered", WRONG_USE: "asked wrongly"}
    return dict(sorted({**common, **command.exits}.items()))


def man_page() -> str:
    """The man page, in roff."""
    lines = [
        '.\\" Written by tools/man_page.py from the tables in the sources; not edited by hand.',
        f'.TH DSTACK-SHIM 1 "" "dstack-shim {build.IMPLEMENTATION_VERSION}" "User Commands"',
        ".SH NAME",
        "dstack\\-shim \\- run dstack jobs on this host, and tell about them",
        ".SH SYNOPSIS",
        ".B dstack\\-shim",
        "[flags]",
    ]
    for command in COMMANDS.values():
        lines += [".br", f".B {_roff(synopsis(command))}"]
    lines += [".SH DESCRIPTION", _roff(_ABOUT), ".PP", _roff(_SCREEN), ".SH COMMANDS"]
    for command in COMMANDS.values():
        lines += _man_command(command)
    lines += [".SH FLAGS", _roff(_FLAGS)]
    for name, variable, words in _flags():
        lines += [".TP", f".B \\-\\-{_roff(name)}", f"{_roff(words)} (${variable})"]
    lines += [".SH EXIT STATUS"]
    for code, words in _EXITS.items():
        lines += [".TP", f".B {code}", _roff(words)]
    lines += [".SH FILES", ".TP", ".I ~/.dstack/runners/*/task.json", "the records of the tasks"]
    lines += [".TP", ".I ~/.dstack/shim.log", "what the shim did"]
    return "\n".join(lines) + "\n"


def _man_command(command: Command) -> Iterator[str]:
    yield f".SS {_roff(synopsis(command))}"
    yield _roff(f"{command.summary[0].upper()}{command.summary[1:]}.")
    for text in command.text:
        yield ".PP"
        yield _roff(text)
    for option in command.options:
        yield ".TP"
        yield f".B {_roff(spelling(option))}"
        yield _roff(option.help)
    if command.exits:
        yield ".PP"
        yield (
            "Exit status: "
            + _roff("; ".join(f"{code} {words}" for code, words in exits(command).items()))
            + "."
        )


def _flags() -> Iterator[tuple[str, str, str]]:
    """Name, variable and words of each flag."""
    for field in attrs.fields(Settings):
        meta = field.metadata
        default = "" if field.default in ("", False) else f" (default {field.default})"
        yield meta["flags"][0], meta["variable"], f"{meta['help']}{default}"


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False)


def _entry(name: str, words: str) -> list[str]:
    head = f"  {name:<{_INDENT - 2}}"
    room = _WIDTH - _INDENT
    first, *rest = textwrap.wrap(words, room, break_on_hyphens=False, break_long_words=False)
    if len(head) > _INDENT:
        return [f"  {name}", *(" " * _INDENT + line for line in (first, *rest))]
    return [head + first, *(" " * _INDENT + line for line in rest)]


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
