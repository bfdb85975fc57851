"""Help, man page and completion: all of them of the same tables."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from dstack_shim import cli
from dstack_shim.commands import COMMANDS, OPTIONS
from dstack_shim.console.completion import SCRIPTS
from dstack_shim.console.manual import command_help, man_page, usage
from dstack_shim.settings import Settings, read_invocation
from tools.man_page import PAGE

Output = pytest.CaptureFixture[str]
Complete = Callable[..., set[str]]


def test_the_help_of_the_file_names_everything(capsys: Output) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.rstrip("\n") == usage()
    for field in attrs.fields(Settings):
        assert f"--{field.metadata['flags'][0]}" in text
        assert f"${field.metadata['variable']}" in text
    for name, command in COMMANDS.items():
        assert f"  {name}" in text
        assert command.summary in text


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_tells_about_itself(name: str, capsys: Output) -> None:
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.rstrip("\n") == command_help(COMMANDS[name])
    for option in COMMANDS[name].options:
        assert option.help in text
    for code in COMMANDS[name].exits:
        assert f"\n  {code} " in text


@pytest.mark.parametrize("text", [usage(), *map(command_help, COMMANDS.values())])
def test_help_is_ascii_and_fits_80_columns(text: str) -> None:
    assert text.isascii()
    proxies = "http_proxy,https_proxy"  # one word that is longer
    assert max(len(line) for line in text.splitlines() if proxies not in line) <= 80


def test_no_two_options_share_a_name_or_take_one_of_the_daemon() -> None:
    given = {option.name: option for option in OPTIONS.values()}
    names = [name for option in given.values() for name in option.names]
    flags = {flag for field in attrs.fields(Settings) for flag in field.metadata["flags"]}
    assert len(names) == len(set(names))
    assert not {*names} & {*flags, "version", "v", "help", "h"}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_takes_what_its_help_says(name: str) -> None:
    command = COMMANDS[name]
    words = [name, *(["word"] if command.argument else [])]
    for option in command.options:
        words += [f"--{option.name}", *(["1"] if option.value else [])]
    invocation = read_invocation(words, {})
    assert invocation.command is command
    assert set(invocation.options) == {option.name for option in command.options}


def test_the_man_page_is_the_one_of_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == man_page(), "run python -m tools.man_page"


@pytest.mark.skipif(shutil.which("man") is None, reason="this machine has no man")
def test_man_has_nothing_to_complain_about() -> None:
    done = subprocess.run(
        ["man", "--warnings=w", "-l", PAGE],
        env={"MANWIDTH": "80", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANROFFSEQ": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stderr == ""
    assert "dstack-shim logs [-f] [-n NUMBER]" in done.stdout


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_completion_script_is_one_its_shell_reads(
    shell: str, tmp_path: Path, capsys: Output
) -> None:
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(text)
        subprocess.run([shell, "-n", script], check=True, timeout=30)


def test_words_with_an_apostrophe_stay_words() -> None:
    words = "print the output of a task's container"
    assert [f"logs:{words}"] in [shlex.split(line) for line in _list_of_commands()]
    assert words.replace("'", r"\'") in SCRIPTS["fish"]()


def _list_of_commands() -> list[str]:
    lines = SCRIPTS["zsh"]().splitlines()
    begin = lines.index("    commands=(")
    return lines[begin + 1 : lines.index("    )", begin)]


@pytest.mark.parametrize("word", ["tcsh", "", "\x1b[2J"])
def test_another_shell_is_refused(word: str, capsys: Output) -> None:
    assert cli.main(["completion", "--", word]) == 2
    assert "expected one of bash, zsh, fish" in capsys.readouterr().err


ASK_BASH = """
. "$1"; shift
COMP_WORDS=(dstack-shim "$@"); COMP_CWORD=$#; _dstack_shim
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def complete(tmp_path: Path) -> Complete:
    """Asks bash what it would complete, with a dstack-shim that lists these tasks."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    program = bin_ / "dstack-shim"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' t1 t2 '$(touch {tmp_path}/pwned)' 'a b' '*'\n")
    program.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(SCRIPTS["bash"]())

    def ask(*words: str) -> set[str]:
        done = subprocess.run(
            ["bash", "-c", ASK_BASH, "bash", script, *words],
            env={"PATH": f"{bin_}:/usr/bin:/bin"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert done.stderr == ""
        assert not (tmp_path / "pwned").exists()
        return {*done.stdout.split()}

    return ask


def test_bash_completes_commands_options_and_tasks(complete: Complete) -> None:
    assert complete("") == set(COMMANDS)
    assert complete("s") == {"show", "status"}
    assert complete("logs", "--f") == {"--follow"}
    assert complete("--shim-home", "/a", "logs", "--r") == {"--raw"}
    assert complete("completion", "") == {"bash", "zsh", "fish"}


def test_bash_is_never_given_a_task_that_is_a_command(complete: Complete) -> None:
    assert complete("show", "") == {"t1", "t2"}
    assert complete("logs", "t2") == {"t2"}


def test_without_rich_a_command_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    for name in [name for name in sys.modules if name.startswith("dstack_shim.console.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich.cells", None)
    assert cli.main(["ps"]) == 1
    assert "ps needs rich.cells: install dstack-shim[console]" in capsys.readouterr().err
    assert cli.main(["completion", "bash"]) == 0
