"""The record of a task: read from whatever is on disk, written for every shim to read."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from dstack_shim_contracts import golden
from dstack_shim_contracts.api import MAX_BODY_BYTES, TaskConfig, VolumeInfo, VolumeMount
from dstack_shim_contracts.codec import encode, validate_submit
from dstack_shim_contracts.errors import (
    DamagedRecord,
    RecordTooLarge,
    UnreadableRecord,
)
from dstack_shim_contracts.record import (
    MAX_RECORD_BYTES,
    Intent,
    Step,
    TaskRecord,
    read_record,
    write_record,
)
from dstack_shim_contracts.shapes import fold
from dstack_shim_contracts.submit import MAX_ITEMS
from hypothesis import given

from tests.contracts import stock_reader
from tests.contracts.sample_records import CONFIG, RECORD, document, read
from tests.contracts.strategies import JSON_VALUES, SAMPLE, models


def changed(config: TaskConfig, **changes: Any) -> TaskConfig:
    return attrs.evolve(config, **changes)


# --- round trips


def test_what_is_written_is_read_back_equal() -> None:
    assert read_record(write_record(RECORD)) == RECORD


@SAMPLE
@given(models(TaskRecord))
def test_every_record_is_read_back_equal_but_for_credentials(record: TaskRecord) -> None:
    expected = attrs.evolve(
        record,
        config=record.config.without_credentials(),
        terminated=record.terminated or bool(record.termination_reason),
    )
    assert read_record(write_record(record)) == expected


@SAMPLE
@given(models(TaskRecord))
def test_writing_what_was_read_changes_no_byte(record: TaskRecord) -> None:
    raw = write_record(record)
    assert write_record(read_record(raw)) == raw


@SAMPLE
@given(models(TaskRecord))
def test_a_strict_reader_of_version_1_reads_every_record_of_ours(record: TaskRecord) -> None:
    seen = stock_reader.read(write_record(record))
    assert seen["version"] == 1
    assert seen["id"] == record.id
    assert seen["config"] == json.loads(encode(record.config.without_credentials()))
    assert seen["termination_reason"] == record.termination_reason
    assert seen["termination_message"] == record.termination_message
    assert seen["cleaned_up"] is record.cleaned_up


@SAMPLE
@given(models(TaskRecord))
def test_a_rewrite_by_another_shim_loses_only_what_is_ours(record: TaskRecord) -> None:
    after = read_record(stock_reader.rewrite(write_record(record)))
    assert after == TaskRecord(
        id=record.id,
        config=record.config.without_credentials(),
        termination_reason=record.termination_reason,
        termination_message=record.termination_message,
        cleaned_up=record.cleaned_up,
    )


def test_the_file_is_one_object_and_a_newline() -> None:
    raw = write_record(RECORD)
    assert raw.endswith(b"}\n")
    assert raw.count(b"\n") == 1
    assert list(json.loads(raw))[:6] == list(document())


def test_absent_facts_are_absent_from_the_file() -> None:
    keys = set(json.loads(write_record(TaskRecord("t1", CONFIG))))
    assert keys == {*document(), "terminated", "min_reader"}


def test_none_of_our_keys_is_one_of_version_1_in_another_letter_case() -> None:
    ours = set(json.loads(write_record(RECORD))) - set(document())
    assert not {fold(key) for key in ours} & {fold(key) for key in document()}


# --- what other shims wrote


@pytest.mark.parametrize("example", golden.good("task-record"), ids=str)
def test_every_good_example_survives_both_kinds_of_shim(example: golden.Example) -> None:
    record = read_record(example.raw)
    assert read_record(write_record(record)) == record
    assert stock_reader.read(write_record(record))["id"] == record.id


def test_lists_may_be_null() -> None:
    lists = ("volumes", "volume_mounts", "instance_mounts", "gpu_devices", "host_ssh_keys")
    record = read(document(config=dict.fromkeys(lists)))
    assert record.config == TaskConfig()


@pytest.mark.parametrize("config", [{}, None, {"id": "t1"}])
def test_a_nearly_empty_config_is_believed(config: object) -> None:
    assert read(document(config=config)).id == "t1"


def test_released_without_a_reason_is_not_terminated() -> None:
    record = read(document(cleaned_up=True))
    assert record.cleaned_up
    assert not record.terminated


@pytest.mark.parametrize("terminated", [None, False])
def test_a_recorded_reason_is_terminated_whatever_else_stands_there(terminated: object) -> None:
    changes = {"termination_reason": "terminated_by_user", "terminated": terminated}
    assert read(document(**changes)).terminated


def test_terminated_without_a_reason_is_a_fact_of_its_own() -> None:
    assert read(document(terminated=True)).terminated
    assert not read(document()).terminated


def test_a_new_record_with_a_reason_is_terminated() -> None:
    assert TaskRecord("t1", CONFIG, termination_reason="executor_error").terminated
    assert not TaskRecord("t1", CONFIG).terminated


def test_our_keys_have_a_meaning_when_absent() -> None:
    record = read(document())
    assert record == TaskRecord("t1", TaskConfig(id="t1", name="train", image_name="alpine"))
    assert record.min_reader == 1
    assert (record.intent, record.boot_id, record.gpus) == (None, None, None)
    assert (record.stop_by, record.ended_at, record.written_by) == (None, None, None)


def test_our_keys_mean_the_same_null_as_absent() -> None:
    ours = ("terminated", "intent", "boot_id", "gpus", "stop_by", "ended_at", "min_reader")
    assert read(document(**dict.fromkeys((*ours, "written_by")))) == read(document())


def test_held_no_gpus_is_not_the_same_as_unknown() -> None:
    assert read(document(gpus=[])).gpus == ()


@pytest.mark.parametrize("change", [str.upper, str.title, str.swapcase], ids=lambda c: c.__name__)
def test_known_keys_match_in_any_letter_case(change: Any) -> None:
    config = {change(key): value for key, value in json.loads(encode(CONFIG)).items()}
    config[change("volumes")] = [{change("name"): "data", change("init_fs"): True}]
    changed = {change(key): value for key, value in document(config=config).items()}
    record = read(changed)
    assert record.config.image_name == "alpine"
    assert record.config.volumes == (VolumeInfo(name="data", init_fs=True),)
    assert record.extra == {}
    assert record.config_extra == {}


def test_keys_match_by_the_folding_of_go_and_no_further() -> None:
    raw = json.dumps(document()).replace('"version"', '"ver\u017fion"')
    raw = raw.replace('"image_name"', '"host_\u017f\u017fh_\u212aeys":["a"],"image_name"')
    assert read_record(raw.encode()).config.host_ssh_keys == ("a",)
    sharp_s = read(document(config={"host_\u00dfh_keys": ["a"]}))
    assert sharp_s.config.host_ssh_keys == ()
    assert sharp_s.config_extra == {"host_\u00dfh_keys": ["a"]}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ('"id":"a","ID":"b"', "b"),
        ('"ID":"b","id":"a"', "a"),
        ('"id":"a","ID":"b","id":"c"', "c"),
        ('"ID":"a","id":"b","ID":"c"', "c"),
        ('"id":1,"Id":"b"', "b"),
    ],
)
def test_of_one_key_in_several_letter_cases_the_last_wins(keys: str, expected: str) -> None:
    assert read_record(f'{{"version":1,{keys},"config":{{}}}}'.encode()).id == expected


def test_of_two_configs_the_unknown_keys_of_the_last_are_kept() -> None:
    raw = b'{"version":1,"id":"a","config":{"x":1},"CONFIG":{"name":"n","y":2}}'
    record = read_record(raw)
    assert record.config.name == "n"
    assert record.config_extra == {"y": 2}


# --- unknown keys


@SAMPLE
@given(JSON_VALUES, JSON_VALUES)
def test_unknown_keys_survive_a_rewrite_with_their_values(outer: object, inner: object) -> None:
    config = {"name": "n", "Later": inner}
    once = write_record(read(document(config=config, LATER=outer)))
    twice = json.loads(write_record(read_record(once)))
    assert twice["LATER"] == outer
    assert twice["config"]["Later"] == inner


def test_an_unknown_key_never_overrides_a_known_one() -> None:
    hostile = {"ID": "x", "Version": 2, "terminated": True, "cleaned_UP": True, "later": 1}
    record = TaskRecord("t1", CONFIG, extra=hostile, config_extra={"GPU": 8})
    again = read_record(write_record(record))
    assert again == TaskRecord("t1", CONFIG, extra={"later": 1})


def test_names_of_fields_that_are_no_keys_are_unknown_keys_like_any_other() -> None:
    record = read(document(extra={"a": 1}, config_extra=2))
    assert record.extra == {"extra": {"a": 1}, "config_extra": 2}


def test_half_a_surrogate_pair_in_an_unknown_key_can_be_written_again() -> None:
    raw = json.dumps(document()).replace(
        '"version"', r'"a\ud800":["\udc00",{"\udc00":1}],"version"'
    )
    record = read_record(raw.encode())
    assert record.extra == {"a\ufffd": ["\ufffd", {"\ufffd": 1}]}
    assert read_record(write_record(record)) == record


def test_an_unknown_number_out_of_range_is_damage_because_it_cannot_be_kept() -> None:
    raw = json.dumps(document()).replace('"version"', '"later":[{"a":1e999}],"version"')
    with pytest.raises(DamagedRecord, match="later: expected a number that fits 64 bits"):
        read_record(raw.encode())


# --- credentials


SECRETS = {"registry_username": "ada-lovelace", "registry_password": "hunter2"}


def test_credentials_are_never_written() -> None:
    record = TaskRecord(
        "t1",
        changed(CONFIG, **SECRETS),
        extra={"Registry_Password": "hunter2", "later": [{"REGISTRY_USERNAME": "ada-lovelace"}]},
        config_extra={"registry_PASSWORD": "hunter2"},
    )
    raw = write_record(record)
    assert b"hunter2" not in raw
    assert b"ada-lovelace" not in raw
    assert json.loads(raw)["config"]["registry_password"] == ""


def test_credentials_on_disk_are_dropped_when_read() -> None:
    record = read(document(config=SECRETS, later={"registry_password": "hunter2"}, **SECRETS))
    assert record.config == TaskConfig()
    assert record.extra == {"later": {}}


def test_a_record_does_not_show_credentials() -> None:
    assert "hunter2" not in repr(TaskRecord("t1", changed(CONFIG, **SECRETS)))


# --- versions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "record of version 2 needs a reader of version 2 or newer"),
        ({"version": 7}, "record of version 7 needs a reader of version 7 or newer"),
        ({"min_reader": 2}, "record of version 1 needs a reader of version 2 or newer"),
        ({"version": 3, "min_reader": 2}, "record of version 3 needs a reader of version 2"),
        ({"version": -1}, "record of version -1 "),
        ({"version": 2, "config": ["other", "types"]}, "record of version 2"),
        ({"VERSION": 2}, "record of version 2"),
        ({"Min_Reader": 2}, "record of version 1 needs a reader of version 2"),
    ],
)
def test_a_record_for_a_newer_reader_is_left_to_it(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UnreadableRecord, match=message):
        read(document(**changes))


def test_a_newer_version_that_says_this_reader_is_enough_is_read() -> None:
    assert read(document(version=2, min_reader=1, later=1)).extra == {"later": 1}


@pytest.mark.parametrize("version", [None, 0])
def test_a_record_without_a_version_is_damaged(version: object) -> None:
    with pytest.raises(DamagedRecord, match="version: expected 1"):
        read(document(version=version))


# --- size


def test_the_largest_task_a_server_can_submit_and_end_has_a_record() -> None:
    config = attrs.evolve(CONFIG, container_ssh_keys=("\0" * (MAX_BODY_BYTES // 6 - 200),))
    assert len(encode(config)) < MAX_BODY_BYTES
    record = TaskRecord("t1", config, "terminated_by_server", "\0" * (MAX_BODY_BYTES // 6))
    assert read_record(write_record(record)) == record


def test_a_record_that_would_not_be_read_back_is_not_written() -> None:
    record = attrs.evolve(RECORD, termination_message="x" * MAX_RECORD_BYTES)
    with pytest.raises(RecordTooLarge, match=f"over the limit of {MAX_RECORD_BYTES}"):
        write_record(record)


def test_a_body_whose_defaults_grow_still_has_a_record() -> None:
    most = {
        "volumes": (VolumeInfo(name="v"),) * MAX_ITEMS,
        "volume_mounts": (VolumeMount("v", "/v"),) * MAX_ITEMS,
    }
    config = changed(CONFIG, **most)
    validate_submit(config)
    assert len(write_record(TaskRecord("t1", config))) < MAX_RECORD_BYTES // 4


# --- the model


@pytest.mark.parametrize("step", [*Step, *(step.value for step in Step)])
def test_a_step_is_given_as_member_or_word(step: Step | str) -> None:
    assert Intent(step, 0.0).step is Step(step)
    assert f"{Intent(step, 0.0).step}" == Step(step).value


def test_an_unknown_step_is_refused_when_made() -> None:
    with pytest.raises(ValueError, match="dreaming"):
        Intent("dreaming", 0.0)


def test_records_can_be_compared_and_hashed() -> None:
    assert hash(RECORD) == hash(attrs.evolve(RECORD, extra={}))
    assert attrs.evolve(RECORD, extra={}) != RECORD
