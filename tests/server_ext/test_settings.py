from __future__ import annotations

import pytest

from dstack_shim_server.errors import InvalidSettings
from dstack_shim_server.settings import Mode, Settings, read_settings

MODE = "DSTACK_SHIM_RESTART_MODE"
UNKNOWN = "DSTACK_SHIM_RESTART_UNKNOWN"
TRUST = "DSTACK_SHIM_RESTART_TRUST_DEV_BUILDS"


def test_an_empty_environment_enforces_and_trusts_nothing() -> None:
    assert read_settings({}) == Settings(Mode.ENFORCE, allow_unknown=False, trust_dev_builds=False)


def test_an_empty_value_counts_as_unset() -> None:
    assert read_settings({MODE: "", UNKNOWN: "  ", TRUST: ""}) == Settings()


def test_variables_of_others_do_not_matter() -> None:
    assert read_settings({"DSTACK_SERVER_DIR": "x", "PATH": "y"}) == Settings()


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("off", Mode.OFF),
        ("observe", Mode.OBSERVE),
        ("enforce", Mode.ENFORCE),
        (" Observe\n", Mode.OBSERVE),
    ],
)
def test_the_mode_is_one_of_three_words_in_any_case(text: str, mode: Mode) -> None:
    assert read_settings({MODE: text}).mode is mode


@pytest.mark.parametrize("text", ["1", "true", "YES", "On"])
def test_dev_builds_are_trusted_if_so_said(text: str) -> None:
    assert read_settings({TRUST: text}).trust_dev_builds


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
def test_dev_builds_are_not_trusted_if_so_said(text: str) -> None:
    assert not read_settings({TRUST: text}).trust_dev_builds


@pytest.mark.parametrize(("text", "allowed"), [("allow", True), ("refuse", False)])
def test_unknown_servers_are_allowed_or_refused(text: str, *, allowed: bool) -> None:
    assert read_settings({UNKNOWN: text}).allow_unknown is allowed


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (MODE, "on", "off, observe or enforce"),
        (MODE, "enforced", "off, observe or enforce"),
        (UNKNOWN, "true", "allow or refuse"),
        (TRUST, "maybe", "true or false"),
        (TRUST, "2", "true or false"),
    ],
)
def test_a_value_not_understood_is_named_with_what_was_expected(
    name: str, text: str, expected: str
) -> None:
    with pytest.raises(InvalidSettings) as raised:
        read_settings({name: text})
    assert str(raised.value).startswith(f"{name} must be {expected}")
    assert f"not {text!r}" in str(raised.value)


def test_a_misspelt_variable_is_not_taken_for_the_default() -> None:
    with pytest.raises(InvalidSettings, match=r"RESTART_MOD is not a variable.*RESTART_MODE"):
        read_settings({"DSTACK_SHIM_RESTART_MOD": "observe"})


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(InvalidSettings) as raised:
        read_settings({MODE: "x", TRUST: "y", UNKNOWN: "z"})
    assert all(name in str(raised.value) for name in (MODE, TRUST, UNKNOWN))


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidSettings) as raised:
        read_settings({MODE: "x" * 5000})
    assert len(str(raised.value)) < 200
