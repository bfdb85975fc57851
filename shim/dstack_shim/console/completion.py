"""``dstack-shim completion``: what makes a shell complete commands, options and tasks.

An id is put into a shell's hands only if it consists of letters, digits and ``._-``: to some of
them a completion is text to be expanded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from shlex import quote

from dstack_shim.commands import COMMANDS, SHELLS, Command
from dstack_shim.errors import UsageError
from dstack_shim.settings import Invocation

_TASKS = "dstack-shim ps --quiet 2>/dev/null | grep -E '^[A-Za-z0-9._-]+$'"


def run(invocation: Invocation) -> int:
    """Print the script of one shell."""
    shell = invocation.arguments[0]
    if shell not in SCRIPTS:
        raise UsageError(
            f"completion: {shell[:40]!r} is no shell; expected one of {', '.join(SHELLS)}"
        )
    sys.stdout.write(SCRIPTS[shell]())
    return 0


def bash() -> str:
    """For bash."""
    cases = "".join(
        f"        {command.name}) words='{' '.join(_flags(command))}' ;;\n"
        for command in COMMANDS.values()
    )
    return f"""\
# bash completion of dstack-shim
_dstack_shim() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} command='' word words=''
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case $word in {"|".join(COMMANDS)}) command=$word; break ;; esac
    done
    case $command in
        '') words='{" ".join(COMMANDS)}' ;;
{cases}    esac
    case $command:$current in
        {_pattern("-*")}) ;;
        {_pattern("*")}) words=$({_TASKS}) ;;
        completion:*) words='{" ".join(SHELLS)}' ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -F _dstack_shim dstack-shim
"""


def zsh() -> str:
    """For zsh."""
    described = "\n".join(
        f"        {quote(f'{command.name}:{command.summary}')}" for command in COMMANDS.values()
    )
    cases = "".join(
        f"        {command.name}) compadd -- {' '.join(_flags(command))} ;;\n"
        for command in COMMANDS.values()
    )
    return f"""\
#compdef dstack-shim
_dstack_shim() {{
    local command word
    local -a commands
    commands=(
{described}
    )
    for word in ${{words[2,CURRENT-1]}}; do
        case $word in {"|".join(COMMANDS)}) command=$word; break ;; esac
    done
    if [[ -z $command ]]; then
        _describe command commands
    elif [[ $PREFIX == -* ]]; then
        case $command in
{cases}        esac
    elif [[ $command == ({"|".join(_with_task())}) ]]; then
        compadd -- ${{(f)"$({_TASKS})"}}
    elif [[ $command == completion ]]; then
        compadd -- {" ".join(SHELLS)}
    fi
}}
if [[ $funcstack[1] == _dstack?shim ]]; then _dstack_shim "$@"; else compdef _dstack_shim dstack-shim; fi
"""


def fish() -> str:
    """For fish."""
    seen = f"__fish_seen_subcommand_from {' '.join(COMMANDS)}"
    lines = ["# fish completion of dstack-shim", "complete -c dstack-shim -f"]
    for command in COMMANDS.values():
        summary = _fish_quote(command.summary)
        lines.append(f"complete -c dstack-shim -n 'not {seen}' -a {command.name} -d {summary}")
        inside = f"complete -c dstack-shim -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            names = " ".join(f"-{'l' if len(name) > 1 else 's'} {name}" for name in option.names)
            needs = " -x" if option.value else ""
            lines.append(f"{inside} {names}{needs} -d {_fish_quote(option.help)}")
        if command.name in _with_task():
            lines.append(f"{inside} -a {_fish_quote(f'({_TASKS})')}")
    lines.append(
        "complete -c dstack-shim -n '__fish_seen_subcommand_from completion' "
        f"-a '{' '.join(SHELLS)}'"
    )
    return "\n".join(lines) + "\n"


SCRIPTS: Mapping[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _fish_quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _flags(command: Command) -> list[str]:
    names = [name for option in command.options for name in option.names if len(name) > 1]
    return [f"--{name}" for name in (*names, "shim-home", "shim-http-port", "help")]


def _with_task() -> list[str]:
    return [command.name for command in COMMANDS.values() if "ID" in command.argument]


def _pattern(current: str) -> str:
    return "|".join(f"{name}:{current}" for name in _with_task())
