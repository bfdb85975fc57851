"""Damaged records: each is told from a sound one, says where it broke, and never crashes."""

from __future__ import annotations

import contextlib
import json

import pytest
from dstack_shim_contracts import golden
from dstack_shim_contracts.errors import DamagedRecord, RecordError
from dstack_shim_contracts.record import read_record, write_record
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.sample_records import RECORD, document, read
from tests.contracts.strategies import JSON_VALUES, SAMPLE


@pytest.mark.parametrize("example", golden.bad("task-record"), ids=str)
def test_every_bad_example_is_damaged_and_says_where(example: golden.Example) -> None:
    with pytest.raises(DamagedRecord) as caught:
        read_record(example.raw)
    assert caught.value.why.removeprefix("record ").startswith(f"{example.field}: expected ")


def test_a_record_cut_at_any_byte_is_damaged() -> None:
    raw = write_record(RECORD)
    for length in range(len(raw) - 2):
        with pytest.raises(DamagedRecord):
            read_record(raw[:length])
    assert read_record(raw[:-1]) == RECORD  # only the newline is missing


@pytest.mark.parametrize("more", [b"\0", b"x", b"{}", b"\0" * 4096, b"}\n", b"\xff"])
def test_bytes_after_the_record_are_damage(more: bytes) -> None:
    with pytest.raises(DamagedRecord):
        read_record(write_record(RECORD) + more)


@pytest.mark.parametrize("space", [b"", b" ", b"\n\n", b"\t\r\n"])
def test_white_space_around_the_record_is_none(space: bytes) -> None:
    assert read_record(space + write_record(RECORD) + space) == RECORD


@pytest.mark.parametrize("byte", [b"\0", b"\xff", b'"', b"}"])
def test_one_wrong_byte_anywhere_is_damage_or_another_record_but_never_a_crash(
    byte: bytes,
) -> None:
    raw = write_record(RECORD)
    for at in range(0, len(raw), 3):
        with contextlib.suppress(RecordError):
            read_record(raw[:at] + byte + raw[at + 1 :])


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 512, b"[]", b"null", b"1", b'"a"', b"{", b"\xef\xbb\xbf{}"]
)
def test_what_is_no_object_is_damaged(raw: bytes) -> None:
    with pytest.raises(DamagedRecord, match=r"^record body: expected "):
        read_record(raw)


@pytest.mark.parametrize(
    "raw", [b" " * 10_000_000, b"[" * 10_000_000, b'{"id":"' + b"a" * 10_000_000]
)
def test_ten_megabytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(DamagedRecord, match="10000"):
        read_record(raw)


@pytest.mark.parametrize("depth", [64, 1_000, 100_000])
def test_deep_nesting_is_damage(depth: int) -> None:
    raw = json.dumps(document()).replace(
        '"version"', f'"later":{"[" * depth}{"]" * depth},"version"'
    )
    with pytest.raises(DamagedRecord, match="nested at most"):
        read_record(raw.encode())


@pytest.mark.parametrize("key", [key for key in document() if key != "config"])
@pytest.mark.parametrize("value", [[], {}, 1.5])
def test_a_known_key_of_another_type_is_damage(key: str, value: object) -> None:
    with pytest.raises(DamagedRecord, match=f"^{key}: expected "):
        read(document(**{key: value}))


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ([], "config"),
        ("x", "config"),
        ({"gpu": "1"}, "config.gpu"),
        ({"volumes": {}}, "config.volumes"),
        ({"volumes": [{"init_fs": 1}]}, r"config.volumes\[0\].init_fs"),
        ({"container_ssh_keys": ["a", 2]}, r"config.container_ssh_keys\[1\]"),
    ],
)
def test_a_config_of_other_types_is_damage_naming_the_path(config: object, where: str) -> None:
    with pytest.raises(DamagedRecord, match=f"^{where}: expected "):
        read(document(config=config))


@pytest.mark.parametrize("task_id", [None, ""])
def test_a_record_of_no_task_is_damaged(task_id: object) -> None:
    with pytest.raises(DamagedRecord, match=r"^id: expected a non-empty string$"):
        read(document(id=task_id))


@SAMPLE
@given(st.binary(max_size=300))
def test_no_bytes_make_reading_fail_in_another_way(raw: bytes) -> None:
    with pytest.raises(RecordError):
        read_record(raw)


@SAMPLE
@given(st.sampled_from([*document(), "intent", "gpus", "stop_by", "min_reader"]), JSON_VALUES)
def test_no_value_makes_reading_fail_in_another_way(key: str, value: object) -> None:
    with contextlib.suppress(RecordError):
        read(document(**{key: value}))
