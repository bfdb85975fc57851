"""The numbered rows of ``docs/protocol.md``, and how a case cites them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"

_ROW = re.compile(
    r"^\| (?P<id>[A-Z]\d+) \| (?P<kind>core|beyond) \| (?P<rule>.+) \|$", re.MULTILINE
)
_SECTION = re.compile(r"^## (?P<letter>[A-Z])\. (?P<title>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One rule of the page; ``beyond`` ones a stock shim may break."""

    id: str
    beyond: bool
    rule: str

    @property
    def section(self) -> str:
        return self.id[0]


def read_rows(page: str) -> dict[str, Row]:
    """Every row of the page by its id, in the page's order; an id used twice is an error."""
    rows: dict[str, Row] = {}
    for found in _ROW.finditer(page):
        row_ = Row(found["id"], found["kind"] == "beyond", found["rule"])
        if row_.id in rows:
            raise ValueError(f"{row_.id} is on the page twice")
        rows[row_.id] = row_
    return rows


def read_sections(page: str) -> dict[str, str]:
    """Letter → title, in the page's order."""
    return {found["letter"]: found["title"] for found in _SECTION.finditer(page)}


_TEXT = PAGE.read_text(encoding="utf-8")
ROWS: Mapping[str, Row] = read_rows(_TEXT)
SECTIONS: Mapping[str, str] = read_sections(_TEXT)


def row(*ids: str) -> pytest.MarkDecorator:
    """Cites the rows a case checks, the most telling one first: the table counts it there."""
    unknown = [id_ for id_ in ids if id_ not in ROWS]
    if unknown or not ids:
        raise ValueError(f"not on the protocol page: {unknown}")
    return pytest.mark.rows(*ids)


def cited_by(item: pytest.Item) -> tuple[Row, ...]:
    """The rows a collected case cites, those of its own parameters first, each once."""
    ids: list[str] = [id_ for mark in item.iter_markers("rows") for id_ in mark.args]
    return tuple(ROWS[id_] for id_ in dict.fromkeys(ids))


def is_beyond(rows: Iterable[Row]) -> bool:
    """A case that needs any ``beyond`` row is one of those."""
    return any(row_.beyond for row_ in rows)
