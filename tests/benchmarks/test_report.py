"""What a benchmark makes of its numbers; what it measures needs an engine and has no test."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import picture, report
from benchmarks.candidates import OURS, PEER, ask_version, candidate
from benchmarks.ends import _unix
from benchmarks.rows import SECTIONS, Row
from benchmarks.run import PARTS, QUICK, Counts, _counts, _parse
from benchmarks.samples import Samples, load, median, quantile, read

NUMBERS = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(NUMBERS, st.floats(0.01, 1))
def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], part: float
) -> None:
    found = quantile(values, part)
    assert found in values
    assert sum(value <= found for value in values) >= part * len(values) - 1e-9
    assert sum(value < found for value in values) < part * len(values) + 1e-9


@pytest.mark.parametrize(
    ("values", "p50", "p99"), [([3.0, 1.0, 2.0], 2.0, 3.0), ([7.0], 7.0, 7.0), ([1.0, 9.0], 1, 9)]
)
def test_median_and_p99_of_a_few(values: list[float], p50: float, p99: float) -> None:
    assert (median(values), quantile(values, 0.99)) == (p50, p99)


def test_nothing_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        median([])


def test_samples_survive_being_kept_and_a_source_measured_anew_is_replaced() -> None:
    samples = Samples()
    samples.add("version", OURS, [1.0, 2.0])
    samples.add("version", PEER, [3.0])
    samples.add("size", OURS, [9.0])
    again = read(samples.document())
    newer = Samples()
    newer.add("version", OURS, [4.0])
    again.replace(newer)
    assert again.of("version", OURS) == (4.0,)
    assert again.of("version", PEER) == ()
    assert again.of("size", OURS) == (9.0,)
    assert set(again.sources()) == {"version", "size"}


def test_the_first_run_finds_nothing_kept(tmp_path: Path) -> None:
    assert load(tmp_path / "results.json") == {}


ROW = Row("version", "`--version`", "s", digits=3, budget=0.05)


@pytest.mark.parametrize(
    ("ours", "peer", "ratio"),
    [(2.0, 3.0, 1.5), (2.0, None, None), (None, 3.0, None), (0.0, 3.0, None), (2.0, -1.0, None)],
)
def test_a_ratio_says_how_many_times_ours_the_other_is(
    ours: float | None, peer: float | None, ratio: float | None
) -> None:
    assert report.Told(ROW, ours, peer).ratio == ratio


@pytest.mark.parametrize(
    ("ours", "is_missed"), [(0.05, False), (0.051, True), (None, False), (0.0, False)]
)
def test_a_budget_is_missed_above_it(ours: float | None, is_missed: bool) -> None:
    assert report.Told(ROW, ours, None).is_missed is is_missed


@pytest.mark.parametrize(
    ("value", "row", "words"),
    [
        (0.0314, ROW, "0.031 s"),
        (None, ROW, "–"),
        (1234.5, Row("x", "x", "ms"), "1,234 ms"),
        (-3.2, Row("x", "x", "ms", digits=1), "−3.2 ms"),
        (7, Row("x", "x", ""), "7"),
    ],
)
def test_numbers_come_with_digits_and_unit(value: float | None, row: Row, words: str) -> None:
    assert report.number(value, row) == words


def some_of_everything(*names: str) -> Samples:
    samples = Samples()
    for section in SECTIONS:
        for row in section.rows:
            for index, name in enumerate(names):
                samples.add(row.source, name, [1.0 + index, 2.0 + index])
    return samples


def test_the_page_has_every_row_that_was_measured_and_no_other() -> None:
    samples = Samples()
    samples.add("version", OURS, [0.02, 0.03, 0.09])
    samples.add("version", PEER, [0.06])
    page = report.markdown(samples, {"machine": "2 processors"})
    assert "- machine: 2 processors" in page
    assert "| `--version` | 0.030 s | 0.060 s | 2.0 | ≤ 0.050 s | 3 |" in page
    assert "## It goes and comes back" in page
    assert "## A job ends" not in page


def test_a_missed_budget_is_told() -> None:
    samples = Samples()
    samples.add("version", OURS, [0.2])
    assert "≤ 0.050 s **missed**" in report.markdown(samples, {})
    assert any("OVER BUDGET" in line for line in report.lines(samples))


def test_a_whole_page_is_a_table_of_equal_rows() -> None:
    page = report.markdown(some_of_everything(OURS, PEER), {})
    cells = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert cells == {7}
    assert len(list(report.lines(some_of_everything(OURS)))) == sum(
        len(section.rows) for section in SECTIONS
    )


@pytest.mark.parametrize("peer", ["", "other <&> 0.22.5"])
def test_the_picture_is_well_formed_and_stays_inside_its_frame(peer: str) -> None:
    samples = some_of_everything(OURS, PEER) if peer else some_of_everything(OURS)
    root = ET.fromstring(picture.draw(samples, peer))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    bars = [item.attrib for item in root if item.tag.endswith("rect")][1:]
    shown = sum(row.in_picture != "" for section in SECTIONS for row in section.rows)
    assert len(bars) >= shown * (2 if peer else 1)
    for bar in bars:
        x, y, w, h = (float(bar[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        assert all(math.isfinite(value) for value in (x, y, w, h))
    words = "".join(item.text or "" for item in root.iter())
    assert "this shim" in words
    assert peer in words


def test_every_row_is_of_a_source_of_its_own_statistic() -> None:
    rows = [row for section in SECTIONS for row in section.rows]
    labels = [row.label for row in rows]
    assert len(set(labels)) == len(labels)


def test_the_engines_stamps_are_read_with_any_number_of_digits() -> None:
    assert _unix("2024-01-01T00:00:00Z") == 1704067200.0
    assert _unix("2024-01-01T00:00:00.25Z") == 1704067200.25
    assert abs(_unix("2024-01-01T00:00:00.123456789Z") - 1704067200.123456789) < 1e-6


def test_counts_are_full_quick_or_as_told() -> None:
    assert _counts(_parse([])) == Counts()
    assert _counts(_parse(["--quick"])) == QUICK
    assert _counts(_parse(["--replacements", "7"])).replacements == 7
    assert Counts().replacements >= 200
    assert _parse(["--only", *PARTS]).only == [*PARTS]


def test_a_candidate_says_its_version_and_size(tmp_path: Path) -> None:
    file = tmp_path / "shim"
    file.write_text("#!/bin/sh\necho dstack-shim version 0.1.2\n")
    file.chmod(0o755)
    assert ask_version((str(file),)) == "dstack-shim version 0.1.2"
    found = candidate(PEER, file, ("chrt", "--rr", "10"))
    assert (found.version, found.size) == ("0.1.2", file.stat().st_size)
    assert found.command == ("chrt", "--rr", "10", str(file))
