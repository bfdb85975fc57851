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


# The roll-out and the shim -----------------------------------------------------------------------

SHA = "ab" * 32


def given(**choices: str) -> Settings:
    return read_settings({f"DSTACK_SHIM_RESTART_{name}": text for name, text in choices.items()})


def test_by_default_one_canary_and_no_other_limit() -> None:
    policy = given().policy
    assert (policy.canaries, policy.max_under_way, policy.paused, policy.hours) == (
        1,
        0,
        False,
        None,
    )
    assert not given().choice
    assert given().record


def test_the_policy_is_read() -> None:
    found = given(
        CANARIES="2",
        MAX_UNDER_WAY="3",
        PAUSE="yes",
        HOURS="mon-fri 22:00-06:00",
        HOURS_ZONE="Europe/Berlin",
        HOLD_INSTANCES="a, B-1",
        HOLD_FLEETS="main/gpu,cpu",
        FAILURES="4",
        RETURN_WITHIN="60",
        RETENTION_DAYS="7",
    )
    policy = found.policy
    assert (policy.canaries, policy.max_under_way, policy.paused) == (2, 3, True)
    assert str(policy.hours) == "mon-fri 22:00-06:00 Europe/Berlin"
    assert policy.hold_instances == {"a", "B-1"}
    assert policy.hold_fleets == {"main/gpu", "cpu"}
    assert (found.failures, found.return_within, found.retention_days) == (4, 60.0, 7)


def test_the_shim_is_read_with_its_letters_as_they_are() -> None:
    found = given(
        VERSION="0.22.5.post1",
        DOWNLOAD_URL="https://X.example/Path/{version}/{arch}",
        SHA256=SHA.upper(),
        FLEETS='{"Main/GPU": {"version": "0.22.6"}}',
        ALLOW_DOWNGRADE="1",
    ).choice
    assert found.everywhere.url == "https://X.example/Path/{version}/{arch}"
    assert found.everywhere.digest_for("amd64") == SHA
    assert found.offer("Main", "GPU").version == "0.22.6"
    assert found.allow_downgrade


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("CANARIES", "-1", "a number from 0"),
        ("CANARIES", "1.5", "a number from 0"),
        ("CANARIES", "٣", "a number from 0"),
        ("MAX_UNDER_WAY", "many", "a number from 0 (no limit)"),
        ("FAILURES", "0", "a number from 1"),
        ("RETURN_WITHIN", "9", "a number of seconds from 10"),
        ("RETENTION_DAYS", "99999999999999999999", "a number of days"),
        ("PAUSE", "later", "true or false"),
        ("RECORD", "sqlite", "true or false"),
        ("HOURS", "9 to 5", "spans like"),
        ("HOURS_ZONE", "Mars", "the name of a time zone"),
        ("HOLD_INSTANCES", "a,,b", "names separated by commas"),
        ("HOLD_FLEETS", "a b", "names separated by commas"),
        ("VERSION", "newest", "a version like"),
        ("DOWNLOAD_URL", "/tmp/shim", "an http or https URL"),
        ("SHA256", "abc", "64 hexadecimal digits"),
        ("FLEETS", "gpu=0.22.5", "a JSON object"),
        ("FLEETS", "[" * 100_000, "a JSON object"),
        ("ALLOW_DOWNGRADE", "perhaps", "true or false"),
    ],
)
def test_each_wrong_value_is_named_with_what_was_expected(
    name: str, text: str, expected: str
) -> None:
    with pytest.raises(InvalidSettings) as raised:
        given(**{name: text})
    assert f"DSTACK_SHIM_RESTART_{name} must be {expected}" in str(raised.value)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"RECORD": "off", "CANARIES": "1"}, "CANARIES needs the record, which is off"),
        ({"RECORD": "off", "VERSION": "0.22.5"}, "VERSION needs the record, which is off"),
        ({"SHA256": SHA}, "SHA256 needs DSTACK_SHIM_RESTART_DOWNLOAD_URL"),
        ({"HOURS_ZONE": "UTC"}, "HOURS_ZONE needs DSTACK_SHIM_RESTART_HOURS"),
    ],
)
def test_what_does_not_go_together_is_told(choices: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        given(**choices)


def test_the_record_can_be_left_out() -> None:
    assert not given(RECORD="off").record
