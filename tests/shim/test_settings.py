"""The command line, as servers and service units rely on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstack_shim.commands import DOCTOR, LOGS
from dstack_shim.console import manual
from dstack_shim.errors import UsageError
from dstack_shim.settings import Settings, names_command, read_invocation


def read(*argv: str, **environ: str) -> Settings:
    return read_invocation([*argv], environ).settings


def test_defaults_are_those_of_dstacks_own_shim() -> None:
    assert read() == Settings(
        shim_home="~/.dstack",
        shim_binary_path="",
        shim_http_port=10998,
        shim_log_level="info",
        runner_download_url="",
        runner_binary_path="/usr/local/bin/dstack-runner",
        runner_http_port=10999,
        runner_ssh_port=10022,
        runner_log_level="info",
        runner_ssh_log_level="",
        dcgm_exporter_http_port=10997,
        dcgm_exporter_interval=5000,
        dcgm_address="",
        pass_env="http_proxy,https_proxy,no_proxy,HTTP_PROXY,HTTPS_PROXY,NO_PROXY",
        privileged=False,
        pjrt_device="",
        service=False,
    )


@pytest.mark.parametrize(
    "argv",
    [
        ("--shim-http-port", "1234"),
        ("--shim-http-port=1234",),
        ("-shim-http-port", "1234"),
        ("-shim-http-port=1234",),
    ],
)
def test_a_flag_has_one_dash_or_two_and_its_value_after_a_space_or_an_equals_sign(
    argv: tuple[str, ...],
) -> None:
    assert read(*argv).shim_http_port == 1234


def test_a_boolean_never_takes_the_next_word() -> None:
    invocation = read_invocation(["--service", "false", "--privileged=false"], {})
    assert invocation.settings.service
    assert not invocation.settings.privileged
    assert invocation.words == ("false",)


def test_the_command_line_beats_the_environment() -> None:
    settings = read("--shim-home=/a", DSTACK_SHIM_HOME="/b", DSTACK_RUNNER_HTTP_PORT="7")
    assert (settings.shim_home, settings.runner_http_port) == ("/a", 7)


@pytest.mark.parametrize("text", ["1", "t", "T", "TRUE", "true", "True"])
def test_a_boolean_variable_is_true(text: str) -> None:
    assert read(DSTACK_SERVICE_MODE=text).service


@pytest.mark.parametrize("text", ["0", "f", "F", "FALSE", "false", "False", ""])
def test_a_boolean_variable_is_false(text: str) -> None:
    assert not read(DSTACK_SERVICE_MODE=text).service


def test_an_empty_number_counts_as_unset_and_an_empty_text_as_empty() -> None:
    settings = read(DSTACK_SHIM_HTTP_PORT="", DSTACK_DOCKER_PASS_ENV="")
    assert (settings.shim_http_port, settings.pass_env) == (10998, "")


@pytest.mark.parametrize(
    "level", ["fatal", "ERROR", "warn", "Warning", "info", "debug", "trace", *"123456"]
)
def test_a_log_level_is_a_name_in_any_case_or_a_digit(level: str) -> None:
    settings = read(DSTACK_SHIM_LOG_LEVEL=level, DSTACK_RUNNER_LOG_LEVEL=level)
    assert settings.runner_log_level == level


@pytest.mark.parametrize(
    ("argv", "environ", "names"),
    [
        (["--nope"], {}, "--nope"),
        (["--shim-hom", "x"], {}, "--shim-hom"),
        (["--shim-home"], {}, "--shim-home"),
        (["--shim-http-port", "x"], {}, "--shim-http-port"),
        (["--shim-http-port", "1.0"], {}, "--shim-http-port"),
        (["--shim-http-port", "0"], {}, "--shim-http-port"),
        (["--runner-ssh-port", "65536"], {}, "--runner-ssh-port"),
        (["--service=maybe"], {}, "--service"),
        (["--shim-log-level", "0"], {}, "--shim-log-level"),
        (["--shim-log-level", "12"], {}, "--shim-log-level"),
        (["--runner-log-level", "loud"], {}, "--runner-log-level"),
        ([], {"DSTACK_SHIM_HTTP_PORT": "ten"}, "DSTACK_SHIM_HTTP_PORT"),
        ([], {"DSTACK_DOCKER_PRIVILEGED": "yes"}, "DSTACK_DOCKER_PRIVILEGED"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], environ: dict[str, str], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        read_invocation(argv, environ)


@pytest.mark.parametrize("flag", ["--version", "-version", "-v", "--v"])
def test_version_is_answered_whatever_the_environment_holds(flag: str) -> None:
    assert read_invocation([flag], {"DSTACK_SHIM_HTTP_PORT": "ten"}).version


def test_words_that_are_no_flags_are_kept_and_change_nothing() -> None:
    invocation = read_invocation(["--shim-home", "/a", "on", "--", "--service"], {})
    assert invocation.words == ("on", "--service")
    assert invocation.command is None
    assert invocation.settings == Settings(shim_home="/a")


def test_the_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert Settings().home() == Path("/home/someone/.dstack")


def test_the_help_names_every_flag_and_variable() -> None:
    text = manual.usage()
    for flag in ("--shim-home", "--dcgm-address", "--version"):
        assert flag in text
    for variable in ("$DSTACK_SHIM_HOME", "$PJRT_DEVICE", "$DSTACK_SERVICE_MODE"):
        assert variable in text


def test_the_first_word_names_a_command_only_if_it_is_one() -> None:
    assert read_invocation(["doctor"], {}).command is DOCTOR
    assert read_invocation(["--service", "doctor", "--json"], {}).json
    assert read_invocation(["--service", "on", "doctor"], {}).command is None


@pytest.mark.parametrize("words", [["pss"], ["upgrade", "--json"], ["", "ps"]])
def test_a_command_nobody_knows_starts_no_daemon(words: list[str]) -> None:
    with pytest.raises(UsageError, match="is no command; expected one of ps"):
        read_invocation(words, {})


def test_what_a_command_is_given_is_read_wherever_it_stands() -> None:
    invocation = read_invocation(["--shim-home", "/a", "logs", "-n", "5", "t1", "--follow"], {})
    assert invocation.command is LOGS
    assert invocation.arguments == ("t1",)
    assert invocation.options == {"lines": "5", "follow": ""}
    assert invocation.settings.shim_home == "/a"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--json"], "--json is no flag of the daemon"),
        (["ps", "--raw"], "--raw is no flag of ps"),
        (["ps", "--json=yes"], "--json takes no value"),
        (["logs", "-n"], "--n: expected a value"),
        (["logs"], "logs: expected ID"),
        (["show", "a", "b"], "show: 'b' is one word too many"),
        (["ps", "t1"], "ps: 't1' is one word too many"),
    ],
)
def test_what_is_wrong_with_a_command_is_named(words: list[str], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        read_invocation(words, {})


@pytest.mark.parametrize(
    ("words", "does"),
    [
        (["ps", "--no-such-flag"], True),
        (["--shim-home", "ps"], False),
        (["--shim-home", "/a", "-f", "logs"], True),
        (["--service", "false", "ps"], False),
        ([], False),
    ],
)
def test_a_wrong_command_line_still_tells_whose_it_is(words: list[str], does: bool) -> None:
    assert names_command(words) is does


@pytest.mark.parametrize("words", [["doctor", "--version"], ["--json", "--help", "doctor"]])
def test_version_and_help_come_before_any_command(words: list[str]) -> None:
    invocation = read_invocation(words, {})
    assert invocation.version or invocation.help
