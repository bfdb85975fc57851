"""Answers of the engine that a real one gives rarely, and bodies it must never get wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.engine.engine_json import (
    Unreadable,
    container_from_list,
    create_body,
    details_from_inspect,
    last_log_lines,
    unix_time,
)
from dstack_shim.engine.protocol import ContainerSpec, ContainerState

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
LABELS = {"ai.dstack.shim.is-task": "true", "ai.dstack.shim.task-id": "t1"}


@given(st.dictionaries(st.sampled_from(["Names", "State", "Created", "Ports", "Mounts"]), JSON))
def test_a_list_entry_with_an_id_and_a_task_is_always_a_container(entry: dict[str, Any]) -> None:
    container = container_from_list({**entry, "Id": "abc", "Labels": LABELS})
    assert (container.id, container.task_id) == ("abc", "t1")


@given(JSON)
def test_any_other_list_entry_is_refused_in_one_way(entry: object) -> None:
    with pytest.raises(Unreadable):
        container_from_list(entry)


@given(
    st.dictionaries(
        st.sampled_from(["Config", "HostConfig", "NetworkSettings", "Mounts", "Created"]), JSON
    )
)
def test_an_inspect_with_id_and_exit_code_is_always_read(answer: dict[str, Any]) -> None:
    state = {"Status": "exited", "ExitCode": 3}
    details = details_from_inspect({**answer, "Id": "abc", "State": state})
    assert (details.container.id, details.exit_code) == ("abc", 3)


@given(JSON)
def test_any_other_inspect_is_refused_in_one_way(answer: object) -> None:
    with pytest.raises(Unreadable):
        details_from_inspect(answer)


def test_two_device_requests_say_nothing_about_gpus() -> None:
    requests = [{"DeviceIDs": ["GPU-1"]}, {"DeviceIDs": ["GPU-2"]}]
    answer = {"Id": "abc", "HostConfig": {"DeviceRequests": requests}}
    assert details_from_inspect(answer).gpu_device_ids == ()


@pytest.mark.parametrize("state", list(ContainerState))
def test_every_state_is_alive_or_finished_or_neither(state: ContainerState) -> None:
    neither = {ContainerState.CREATED, ContainerState.UNKNOWN}
    assert [state.alive, state.finished].count(True) == (0 if state in neither else 1)


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        ("1970-01-01T00:00:01Z", 1.0),
        ("1970-01-01T00:00:01.5Z", 1.5),
        ("2024-02-29T12:00:00.123456789Z", 1709208000.123456789),
        ("2024-02-29T13:00:00+01:00", 1709208000.0),
        ("2024-02-29T11:30:00.25-00:30", 1709208000.25),
        ("0001-01-01T00:00:00Z", None),
        ("2024-02-30T00:00:00Z", None),
        ("2024-02-29", None),
        ("", None),
        (None, None),
        (1709208000, None),
        ("9999-99-99T99:99:99Z", None),
    ],
)
def test_the_engines_times_become_unix_seconds(stamp: Any, seconds: float | None) -> None:
    found = unix_time(stamp)
    assert found == (seconds if seconds is None else pytest.approx(seconds, abs=1e-6))


@given(st.text())
def test_no_text_breaks_the_reading_of_a_time(stamp: str) -> None:
    unix_time(stamp)


def frame(kind: int, payload: bytes) -> bytes:
    return bytes([kind, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize(
    ("stream", "lines"),
    [
        (b"", ""),
        (frame(1, b"one\n"), "one"),
        (frame(1, b"one\ntwo\n") + frame(2, b"three\n"), "two\nthree"),
        (frame(1, b"no end"), "no end"),
        (frame(1, b"a\n\n\n"), "a"),
        (frame(1, b"dos\r\n"), "dos"),
        (frame(1, b"half \xe2\x82") + frame(1, b"\xac\n"), "half €"),
        (b"a terminal has no frames\n", "a terminal has no frames"),
        (frame(1, b"cut")[:-1], "cu"),
        (frame(1, b"line\n") + b"\1\0", "line"),
    ],
)
def test_the_last_two_lines(stream: bytes, lines: str) -> None:
    assert last_log_lines(stream, 2) == lines


@given(st.binary(max_size=200), st.integers(1, 5))
def test_no_stream_breaks_the_reading_of_lines(stream: bytes, n: int) -> None:
    assert len(last_log_lines(stream, n).split("\n")) <= n


def test_a_body_asks_for_nothing_the_spec_does_not() -> None:
    body = create_body(ContainerSpec(name="n", image="i"))
    assert body["HostConfig"] == {"NetworkMode": "host"}
    assert body["Env"] == []
    assert body["ExposedPorts"] == {}
