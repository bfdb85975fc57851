"""Counts of several parts add up, and only what is complete is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import evidence as kept
from tests.evidence import Evidence, parse_part
from tools import evidence
from tools.evidence import BEGIN, END, TABLES, Incomplete, add_up, counts_table, read, written


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    return tmp_path


def test_numbers_are_added_tables_key_by_key_and_lists_put_together() -> None:
    one = {"n": 1, "kinds": {"a": 1, "b": 2}, "seeds": [4], "word": "x"}
    other = {"n": 2, "kinds": {"b": 3}, "seeds": [5], "word": "x"}
    assert add_up([one, other]) == {
        "n": 3,
        "kinds": {"a": 1, "b": 5},
        "seeds": [4, 5],
        "word": "x",
    }


def test_the_parts_of_a_run_have_everything_once_and_add_up(folder: Path) -> None:
    items = range(17)
    found: list[int] = []
    for part in range(1, 6):
        run = Evidence(full=True, part=part, parts=5)
        found += run.share(items)
        run.write("points", points=len(run.share(items)))
    assert found == list(items)
    assert read(folder) == {"points": {"points": 17}}


def test_a_part_that_is_missing_is_named(folder: Path) -> None:
    for part in (1, 3):
        Evidence(full=True, part=part, parts=3).write("points", points=1)
    with pytest.raises(Incomplete, match=r"points: .*\[2\] of 3"):
        read(folder)


def test_a_sample_never_takes_the_place_of_full_counts(folder: Path) -> None:
    Evidence(full=True).write("points", points=300)
    Evidence(full=False).write("points", points=3)
    assert read(folder) == {"points": {"points": 300}}
    assert json.loads((folder / "sample" / "points.json").read_text())["points"] == 3


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "a/b", "-1/3", "1/3/5"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--part"):
        parse_part(text)


def test_violations_of_all_kinds_of_tests_are_one_number() -> None:
    counted = {
        "kill_points": {"kill_points": 1234, "census_violations": 1},
        "soak": {"census_violations": 2},
    }
    lines = list(counts_table(counted))
    assert any(line.startswith("| 1,234 | instants of a task's life") for line in lines)
    assert any(line.startswith("| **3** | **census violations") for line in lines)


def test_tables_are_written_between_their_marks_and_nothing_else_changes() -> None:
    page = "".join(f"words\n{BEGIN.format(name)}old\n{END.format(name)}" for name in TABLES)
    counted = {"power_cuts": {"power_cuts": 2, "kinds": {"submit": 2}}}
    new = written(f"{page}last words\n", counted)
    assert "| submit | 2 |" in new
    assert new.endswith("last words\n")
    assert new.count("old\n") == len(TABLES) - 2  # what was not counted stays
    assert written(new, counted) == new
    with pytest.raises(ValueError, match="counts"):
        written("nothing", counted)


def test_the_page_has_a_place_for_every_table() -> None:
    page = evidence.PAGE.read_text("utf-8")
    for name in TABLES:
        assert page.count(BEGIN.format(name)) == page.count(END.format(name)) == 1
