"""The log read back: whatever the shim wrote, and whatever else is in the file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.console.log_lines import Event, Growth, last_lines, parse
from dstack_shim.log import _LineFormatter, _value

HEAD = "2026-01-02T03:04:05.678Z WARNING start.failed"


@given(st.dictionaries(st.sampled_from(["task", "reason", "error"]), st.text()))
def test_what_is_written_is_read(fields: dict[str, str]) -> None:
    words = [f"{name}={_value(text)}" for name, text in fields.items()]
    event = parse(" ".join([HEAD, *words]))
    assert (event.time, event.level) == ("2026-01-02T03:04:05.678Z", "warning")
    assert event.name == "start.failed"
    assert event.fields == fields


def test_a_fault_with_its_trace_is_one_event() -> None:
    error = ValueError('a "quoted" word')
    trace = (type(error), error, None)
    record = logging.LogRecord("x", logging.ERROR, "", 0, "step.broken task=t1", None, trace)
    event = parse(_LineFormatter().format(record))
    assert event.task == "t1"
    assert 'a "quoted" word' in event.fields["trace"]


@pytest.mark.parametrize(
    "line",
    [
        'time=2026-01-02T03:04:05.678 level=info msg="dstack\'s own"',
        "",
        f"{HEAD} task=t1 and more",
        f'{HEAD} task="t1',
        "\x1b[2J",
    ],
)
def test_what_is_not_of_our_form_is_kept_as_it_is(line: str) -> None:
    assert parse(line) == Event(line)


@given(st.text())
def test_no_line_breaks_it(line: str) -> None:
    assert parse(line).line == line
    assert parse(f"{HEAD} {line}").line.startswith(HEAD)


def test_lines_come_the_last_first_across_chunks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [f"{number} " + "x" * (number * 37 % 5000) for number in range(500)]
    log.write_text("\n".join(lines) + "\n")
    found, is_cut = last_lines(log, None)
    assert list(found) == lines[::-1]
    assert not is_cut


@pytest.mark.parametrize(("limit", "whole"), [(10, ["third"]), (14, ["third", "second"])])
def test_of_a_long_log_only_the_end_is_looked_at(
    tmp_path: Path, limit: int, whole: list[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("first\nsecond\nthird\n")
    found, is_cut = last_lines(log, limit)
    assert list(found) == whole
    assert is_cut


def test_an_empty_log_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    assert list(last_lines(tmp_path / "log", None)[0]) == []


def test_what_is_added_is_told_once_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    growth = Growth(log)
    with log.open("a") as file:
        assert list(growth.lines()) == []
        file.write("one\ntw")
        file.flush()
        assert list(growth.lines()) == ["one"]
        file.write("o\n")
    assert list(growth.lines()) == ["two"]
    growth.close()


def test_a_log_that_was_moved_away_or_emptied_is_followed_by_name(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    growth = Growth(log)
    log.rename(tmp_path / "log.1")
    assert list(growth.lines()) == []
    log.write_text("after\n")
    assert list(growth.lines()) == []
    assert list(growth.lines()) == ["after"]
    log.write_text("")
    assert list(growth.lines()) == []
    log.write_text("again\n")
    assert list(growth.lines()) == ["again"]
    growth.close()
