"""Events: one line each, whatever is in them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dstack_shim.errors import UsageError
from dstack_shim.log import TRACE, event_log, open_log, parse_level


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shim.log"


def test_an_event_is_a_time_a_level_a_name_and_fields(file: Path) -> None:
    open_log(logging.INFO, file).info("task.running", task="t1", ports=(1, 2), took=0.12345)
    time, level, *words = file.read_text().split()
    assert time.endswith("Z")
    assert (level, words) == ("INFO", ["task.running", "task=t1", "ports=1,2", "took=0.123"])


def test_a_value_cannot_forge_a_line(file: Path) -> None:
    open_log(logging.INFO, file).warning("x", message='a\nb "c" \x1b[1m ü', empty="")
    (line,) = file.read_text().splitlines()
    assert line.endswith(r'x message="a\nb \"c\" \u001b[1m \u00fc" empty=""')


def test_a_trace_stays_in_its_line(file: Path) -> None:
    log = open_log(logging.INFO, file)
    log.fault("broken", ValueError("one\ntwo"), task="t1")
    (line,) = file.read_text().splitlines()
    assert "ValueError" in line
    assert "trace=" in line


def test_bound_fields_are_on_every_event(file: Path) -> None:
    open_log(logging.DEBUG, file).bind(task="t1").debug("x", a=1)
    assert file.read_text().endswith("x task=t1 a=1\n")


def test_a_lower_level_is_not_written(file: Path) -> None:
    log = open_log(logging.ERROR, file)
    log.info("x")
    log.error("y")
    assert [line.split()[2] for line in file.read_text().splitlines()] == ["y"]


def test_the_file_is_appended_to(file: Path) -> None:
    file.write_text("before\n")
    open_log(logging.INFO, file).info("x")
    assert file.read_text().startswith("before\n")


def test_opened_again_it_writes_once(file: Path) -> None:
    open_log(logging.INFO, file)
    open_log(logging.INFO, file)
    event_log().info("x")
    assert len(file.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "level"),
    [("fatal", logging.CRITICAL), ("Warn", logging.WARNING), ("5", logging.DEBUG), ("6", TRACE)],
)
def test_levels_have_names_and_digits(text: str, level: int) -> None:
    assert parse_level("--x", text) == level


@pytest.mark.parametrize("text", ["", "0", "7", "55", "verbose", " info"])
def test_another_level_is_refused_naming_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--x"):
        parse_level("--x", text)
