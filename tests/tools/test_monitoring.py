"""The example alerts and dashboard ask for metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dstack_shim.metrics import render
from tests.shim.test_metrics import SNAPSHOT

DOCS = Path(__file__).parents[2] / "docs"
TOLD = set(re.findall(r"^# TYPE (\S+)", render(SNAPSHOT), re.MULTILINE))
ONCE_THERE = {"dstack_shim_last_upgrade"}  # absent before the first
SUFFIXES = re.compile(r"_(sum|count|\{sum,count\})$")


def asked_for(text: str) -> set[str]:
    names = re.findall(r"dstack_shim_[a-z_]+(?:\{sum,count\})?", text)
    return {SUFFIXES.sub("", name) for name in names}


@pytest.mark.parametrize(
    "name", ["monitoring.md", "monitoring/alerts.yml", "monitoring/dashboard.json"]
)
def test_what_is_asked_for_is_told(name: str) -> None:
    assert asked_for((DOCS / name).read_text("utf-8")) - ONCE_THERE <= TOLD


def test_the_page_names_every_metric() -> None:
    assert asked_for((DOCS / "monitoring.md").read_text("utf-8")) == TOLD | ONCE_THERE


def test_the_dashboard_is_json_with_panels_that_do_not_overlap() -> None:
    panels = json.loads((DOCS / "monitoring/dashboard.json").read_text("utf-8"))["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in panels})
