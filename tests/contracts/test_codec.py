"""Reading and writing JSON by the rules of the shim's API."""

from __future__ import annotations

import contextlib
import json
from typing import Any, get_args, get_origin

import attrs
import pytest
from dstack_shim_contracts import api
from dstack_shim_contracts.api import (
    Component,
    Components,
    ComponentStatus,
    FeaturelessComponent,
    HealthcheckResponse,
    InstanceHealth,
    ShutdownRequest,
    TaskConfig,
    TaskList,
    TerminateRequest,
    VolumeInfo,
)
from dstack_shim_contracts.codec import decode, encode
from dstack_shim_contracts.errors import BodyError
from dstack_shim_contracts.features import FeatureDocument
from dstack_shim_contracts.record import Intent
from dstack_shim_contracts.shapes import structure, unstructure
from dstack_shim_contracts.statuses import TaskStatus
from dstack_shim_contracts.wire import MAX_NESTING, parse_json, wire_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.strategies import JSON_VALUES, SAMPLE, UNKNOWN_KEYS, models

MODELS: list[type[Any]] = [
    FeatureDocument,
    Intent,
    *(value for value in vars(api).values() if isinstance(value, type) and attrs.has(value)),
]
MEMBERS = [
    pytest.param(cls, attribute, id=f"{cls.__name__}.{attribute.name}")
    for cls in MODELS
    for attribute in attrs.fields(cls)
]


def error_of(cls: type[Any], raw: bytes | str) -> BodyError:
    with pytest.raises(BodyError) as caught:
        decode(cls, raw)
    return caught.value


# --- round trips


@pytest.mark.parametrize("cls", MODELS)
@SAMPLE
@given(data=st.data())
def test_what_is_written_is_read_back_equal(cls: type[Any], data: st.DataObject) -> None:
    model = data.draw(models(cls))
    assert decode(cls, encode(model)) == model


@pytest.mark.parametrize("cls", MODELS)
@SAMPLE
@given(data=st.data())
def test_unknown_members_change_nothing(cls: type[Any], data: st.DataObject) -> None:
    model, unknown = data.draw(models(cls)), data.draw(UNKNOWN_KEYS)
    document = {**unknown, **unstructure(model)}
    assert decode(cls, json.dumps(document)) == model


@pytest.mark.parametrize("cls", MODELS)
@SAMPLE
@given(data=st.data())
def test_a_member_is_the_same_absent_or_null(cls: type[Any], data: st.DataObject) -> None:
    document = unstructure(data.draw(models(cls)))
    optional = [key for key in document if key not in {"status", "step"}]
    # Verdicts of DCGM have no zero in a server's eyes, but 0 happens to be one of them.
    gone = data.draw(st.sets(st.sampled_from(optional))) if optional else set()
    absent = {key: value for key, value in document.items() if key not in gone}
    null = {key: None if key in gone else value for key, value in document.items()}
    assert structure(cls, absent) == structure(cls, null)


@pytest.mark.parametrize("cls", MODELS)
def test_defaults_are_the_zero_values(cls: type[Any]) -> None:
    zero = {str: "", bool: False, int: 0, float: 0.0}
    for attribute in attrs.fields(cls):
        if attribute.default is attrs.NOTHING:
            continue
        empty = () if get_origin(attribute.type) is tuple else None
        assert attribute.default == zero.get(attribute.type, empty), attribute.name


def test_an_empty_object_is_the_zero_value_of_every_request() -> None:
    assert decode(TaskConfig, "{}") == TaskConfig()
    assert decode(TerminateRequest, "{}") == TerminateRequest()
    assert decode(ShutdownRequest, "{}") == ShutdownRequest()


def test_null_elements_of_a_list_are_zero_values_as_in_go() -> None:
    config = decode(TaskConfig, '{"volumes":[null],"host_ssh_keys":[null]}')
    assert config.volumes == (VolumeInfo(),)
    assert config.host_ssh_keys == ("",)


def test_a_nested_object_that_is_absent_is_its_zero_value() -> None:
    document = decode(FeatureDocument, "{}")
    assert document.implementation.name == ""


# --- wrong types


def _fits(kind: Any, value: object) -> bool:
    """Whether Go would read a JSON value into a field of this kind."""
    if value is None:
        return not (isinstance(kind, type) and issubclass(kind, (TaskStatus, ComponentStatus)))
    options = [option for option in get_args(kind) if option is not type(None)]
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_fits(options[0], item) for item in value)
    if options:
        return _fits(options[0], value)
    if attrs.has(kind):
        return isinstance(value, dict)  # its members are other cases
    if kind is float:
        return type(value) in {int, float}
    return type(value) is kind


@pytest.mark.parametrize(("cls", "attribute"), MEMBERS)
@settings(SAMPLE, max_examples=8)  # each of more than a hundred members
@given(data=st.data())
def test_a_value_of_another_type_is_refused_naming_the_member(
    cls: type[Any], attribute: attrs.Attribute[Any], data: st.DataObject
) -> None:
    document = unstructure(data.draw(models(cls)))
    document[attribute.name] = data.draw(
        JSON_VALUES.filter(lambda value: value is not None and not _fits(attribute.type, value))
    )
    error = error_of(cls, json.dumps(document))
    assert error.field.split(".")[0].split("[")[0] == attribute.name
    assert str(error).startswith(f"{error.field}: expected ")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("1.0", "memory: expected an integer, got a number with a fraction or exponent"),
        ("1e3", "memory: expected an integer, got a number with a fraction or exponent"),
        ("true", "memory: expected an integer, got a boolean"),
        ('"1"', "memory: expected an integer, got a string"),
        ("[1]", "memory: expected an integer, got a list"),
        ("{}", "memory: expected an integer, got an object"),
        ("9223372036854775808", "memory: expected an integer that fits 64 bits"),
        ("-9223372036854775809", "memory: expected an integer that fits 64 bits"),
        ("9" * 600, "memory: expected an integer that fits 64 bits"),
        ("9" * 5000, "memory: expected an integer, got a number with a fraction or exponent"),
    ],
)
def test_an_integer_is_nothing_but_an_integer_of_64_bits(raw: str, message: str) -> None:
    assert str(error_of(TaskConfig, f'{{"memory":{raw}}}')) == message


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 0, -1])
def test_integers_are_exact_up_to_the_bounds(number: int) -> None:
    assert decode(TaskConfig, f'{{"memory":{number}}}').memory == number


@pytest.mark.parametrize(("raw", "value"), [("4", 4.0), ("0.5", 0.5), ("1e2", 100.0), ("-0", 0.0)])
def test_a_float_takes_any_number(raw: str, value: float) -> None:
    cpu = decode(TaskConfig, f'{{"cpu":{raw}}}').cpu
    assert cpu == value
    assert isinstance(cpu, float)


@pytest.mark.parametrize("raw", ["1e999", "-1e999", "9" * 400, "9" * 5000])
def test_a_float_out_of_range_is_refused(raw: str) -> None:
    assert str(error_of(TaskConfig, f'{{"cpu":{raw}}}')) == (
        "cpu: expected a number that fits 64 bits"
    )


def test_a_number_out_of_range_in_an_unknown_member_is_ignored() -> None:
    assert decode(ShutdownRequest, '{"later":1e999,"force":true}').force


def test_a_negative_timeout_is_refused() -> None:
    message = "timeout: expected an integer not below 0"
    assert str(error_of(TerminateRequest, '{"timeout":-1}')) == message


@pytest.mark.parametrize("verdict", [1, 5, 15, 30, -10])
def test_only_the_three_verdicts_of_dcgm_are_read(verdict: int) -> None:
    raw = f'{{"dcgm":{{"overall_health":{verdict},"incidents":[]}}}}'
    assert str(error_of(InstanceHealth, raw)) == "dcgm.overall_health: expected one of 0, 10, 20"


def test_an_unknown_status_is_refused_naming_the_known_ones() -> None:
    error = error_of(TaskList, '{"tasks":[{"id":"a","status":"exited"}]}')
    assert str(error) == (
        "tasks[0].status: expected one of "
        "pending, preparing, pulling, creating, running, terminated"
    )


@pytest.mark.parametrize("status", ["null", "1", "[]", "{}", '"RUNNING"', '""'])
def test_a_status_has_no_zero_value(status: str) -> None:
    raw = f'{{"tasks":[{{"id":"a","status":{status}}}]}}'
    assert error_of(TaskList, raw).field == "tasks[0].status"


def test_the_path_leads_through_lists_and_objects() -> None:
    raw = '{"volumes":[{"name":"a"},{"name":1}]}'
    assert str(error_of(TaskConfig, raw)) == "volumes[1].name: expected a string, got a number"


@pytest.mark.parametrize("raw", ['{"registry_password":["hunter2"]}', '{"registry_password":17}'])
def test_an_error_never_repeats_the_value(raw: str) -> None:
    error = error_of(TaskConfig, raw)
    assert "hunter2" not in f"{error} {error!r}"
    assert "17" not in f"{error} {error!r}"


# --- the text


@pytest.mark.parametrize(
    ("raw", "position"),
    [
        (b"", "line 1 column 1"),
        (b"  ", "line 1 column 3"),
        (b'{"force":true}{}', "line 1 column 15"),
        (b'{"force":true} x', "line 1 column 16"),
        (b'{"force":true}\0', "line 1 column 15"),
        (b'{\n"force":tru}', "line 2 column 9"),
        (b"{'force':true}", "line 1 column 2"),
        (b'{"force":true,}', "line 1 column"),
        (b'{"force":01}', "line 1 column"),
        (b'{"force":+1}', "line 1 column"),
        (b'{"a":"\x01"}', "line 1 column"),
        (b'{"a":"\\x"}', "line 1 column"),
        (b'{"a":"\\ud8"}', "line 1 column"),
        (b"\xef\xbb\xbf{}", "line 1 column 1"),
    ],
)
def test_malformed_json_is_refused_naming_the_position(raw: bytes, position: str) -> None:
    error = error_of(ShutdownRequest, raw)
    assert error.field == "body"
    assert position in error.expected


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"x"', b"1", b"true", b"1.5"])
def test_a_body_is_an_object(raw: bytes) -> None:
    error = error_of(ShutdownRequest, raw)
    assert error.field == "body"
    assert error.expected.startswith("an object, got ")


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_words_that_are_not_json_numbers_are_refused_everywhere(word: str) -> None:
    for raw in (f'{{"cpu":{word}}}', f'{{"later":[{word}]}}'):
        assert str(error_of(TaskConfig, raw)) == f"body: expected JSON, which has no {word}"


@pytest.mark.parametrize(
    "raw", [b'{"a":"\xff"}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\xc0\xaf"}', b'{"a":"\xf0\x9f"}']
)
def test_bytes_that_are_not_utf_8_are_refused_naming_the_byte(raw: bytes) -> None:
    assert str(error_of(ShutdownRequest, raw)) == "body: expected UTF-8, broken at byte 6"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-32-be"])
def test_other_encodings_are_not_guessed(encoding: str) -> None:
    assert error_of(ShutdownRequest, '{"force":true}'.encode(encoding)).field == "body"


def test_halves_of_surrogate_pairs_become_the_replacement_character_as_in_go() -> None:
    raw = r'{"host_ssh_user":"\ud800a\udc00","container_user":"\ud83d\ude80"}'
    config = decode(TaskConfig, raw)
    assert config.host_ssh_user == "\ufffda\ufffd"
    assert config.container_user == "🚀"


def test_halves_of_surrogate_pairs_never_reach_the_wire() -> None:
    broken = b"\xff".decode("utf-8", "surrogateescape")
    raw = encode(TerminateRequest(termination_message=f"exit {broken}"))
    assert json.loads(raw)["termination_message"] == "exit \ufffd"


def test_of_a_member_given_twice_the_last_one_counts() -> None:
    assert not decode(ShutdownRequest, '{"force":true,"force":false}').force
    assert decode(ShutdownRequest, '{"force":"no","force":true}').force


def test_members_of_a_body_match_in_their_own_letter_case_only() -> None:
    assert not decode(ShutdownRequest, '{"Force":true}').force


@pytest.mark.parametrize("opening", ["[", '{"a":', "[{"])
@pytest.mark.parametrize("depth", [MAX_NESTING, 1_000, 100_000, 500_000])
def test_deep_nesting_is_refused_whatever_the_recursion_limit(opening: str, depth: int) -> None:
    error = error_of(ShutdownRequest, '{"later":' + opening * depth)
    assert str(error) == f"body: expected JSON, nested at most {MAX_NESTING} deep"


def test_the_deepest_document_is_read() -> None:
    inner = "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1)
    assert decode(ShutdownRequest, f'{{"later":{inner},"force":true}}').force


def test_brackets_within_strings_and_side_by_side_are_not_nesting() -> None:
    brackets = "[" * 1_000
    side_by_side = ",".join(["[]", "{}"] * 1_000)
    raw = rf'{{"a":"{brackets}\"{brackets}","b":[{side_by_side}],"force":true}}'
    assert decode(ShutdownRequest, raw).force


@SAMPLE
@given(st.binary(max_size=200))
def test_no_bytes_make_reading_fail_in_another_way(raw: bytes) -> None:
    with contextlib.suppress(BodyError):
        decode(TaskConfig, raw)


@SAMPLE
@given(JSON_VALUES)
def test_no_json_makes_reading_fail_in_another_way(document: object) -> None:
    with contextlib.suppress(BodyError):
        decode(TaskConfig, json.dumps({"volumes": document, "cpu": document, "id": document}))


@SAMPLE
@given(st.dictionaries(st.text(max_size=3), st.integers()), st.data())
def test_a_key_given_twice_stands_where_its_last_one_stood(
    members: dict[str, int], data: st.DataObject
) -> None:
    if not members:
        return
    again = data.draw(st.sampled_from(sorted(members)))
    pairs = [*members.items(), (again, 7)]
    raw = "{" + ",".join(f"{json.dumps(key)}:{value}" for key, value in pairs) + "}"
    read = parse_json(raw)
    assert isinstance(read, dict)
    assert list(read.items())[-1] == (again, 7)
    assert read == {**members, again: 7}


# --- writing


def test_words_of_the_wire_print_as_they_are() -> None:
    assert f"{ComponentStatus.NOT_INSTALLED}" == "not-installed"


def test_bodies_are_compact_utf_8() -> None:
    raw = encode(TerminateRequest("terminated_by_user", "é", 0))
    assert raw.decode() == (
        '{"termination_reason":"terminated_by_user","termination_message":"é","timeout":0}'
    )


def test_members_that_are_absent_by_contract_are_left_out() -> None:
    assert encode(HealthcheckResponse("dstack-shim", "1.2")) == (
        b'{"service":"dstack-shim","version":"1.2"}'
    )
    assert encode(api.InstanceInfo()) == b"{}"
    assert encode(api.ComponentInstallRequest("dstack-shim", "u")) == (
        b'{"name":"dstack-shim","url":"u"}'
    )


def test_members_that_are_null_by_contract_are_null() -> None:
    assert encode(InstanceHealth(None)) == b'{"dcgm":null}'
    info = json.loads(encode(api.TaskInfo("a", TaskStatus.PULLING)))
    assert info["ports"] is None
    assert info["image_pull_progress"] is None
    assert info["gpus_ids"] == []


def test_features_of_an_installed_file_stand_only_with_the_shim() -> None:
    installed = ComponentStatus.INSTALLED
    raw = encode(
        Components(
            (
                Component("dstack-shim", "1.2", installed),
                Component("dstack-shim", "1.2", installed, ("persisted-state",)),
                FeaturelessComponent("dstack-shim", "1.2", installed),
                Component("dstack-runner", "1.2", installed, ("persisted-state",)),
            )
        )
    )
    unknown, known, another, runner = json.loads(raw)["components"]
    assert unknown["features"] is None
    assert known["features"] == ["persisted-state"]
    assert "features" not in another
    assert "features" not in runner


def test_a_number_json_does_not_have_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode(TaskConfig(cpu=float("nan")))


def test_no_note_hides_a_member_of_a_body() -> None:
    hidden = [
        f"{cls.__name__}.{attribute.name}"
        for cls in MODELS
        for attribute in attrs.fields(cls)
        if wire_of(attribute.metadata).hidden
    ]
    assert hidden == []


# --- the submit body


def test_credentials_are_not_in_the_repr() -> None:
    shown = repr(TaskConfig(registry_username="ada", registry_password="hunter2"))
    assert "ada" not in shown
    assert "hunter2" not in shown


def test_credentials_can_be_taken_away() -> None:
    config = TaskConfig(id="a", registry_username="ada", registry_password="hunter2")
    assert config.without_credentials() == TaskConfig(id="a")


def test_defaults_fill_only_what_is_empty() -> None:
    filled = TaskConfig().with_defaults()
    assert (filled.container_user, filled.network_mode) == ("root", "host")
    given_ = TaskConfig(container_user="1000", network_mode="bridge")
    assert given_.with_defaults() == given_
