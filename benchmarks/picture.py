"""docs/benchmarks.svg: two bars for each of the main rows, drawn without any library."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from benchmarks.report import Told, number, told
from benchmarks.rows import SECTIONS
from benchmarks.samples import Samples

WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 860, 270, 180, 14, 12, 46
INK, OURS, PEER, BUDGET, PAPER = "#1f2933", "#2f8f5b", "#b0b7bf", "#c0392b", "#ffffff"


def draw(samples: Samples, peer: str) -> str:
    """The picture; ``peer`` is what the other shim is called, "" without one."""
    rows = [
        one
        for section in SECTIONS
        for one in (told(row, samples) for row in section.rows)
        if one.row.in_picture and one.ours is not None
    ]
    step = 2 * BAR + GAP if peer else BAR + GAP
    height = TOP + step * len(rows) + 8
    body = [line for index, row in enumerate(rows) for line in _row(row, TOP + index * step)]
    return "\n".join(
        (
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
                ' font-family="system-ui, sans-serif" font-size="13" role="img"'
                ' aria-label="Main numbers of the benchmarks as bars; shorter is better.">'
            ),
            f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
            *_legend(peer),
            *body,
            "</svg>\n",
        )
    )


def _legend(peer: str) -> Iterator[str]:
    entries = [(OURS, "this shim"), (PEER, peer)] if peer else [(OURS, "this shim")]
    x = 14
    for colour, words in [*entries, (BUDGET, "budget")]:
        yield _bar(x, 14, 14, colour)
        yield _text(x + 20, 26, words)
        x += 40 + 8 * len(words)
    yield _text(WIDTH - 160, 26, "shorter is better")


def _row(row: Told, y: float) -> Iterator[str]:
    values = [value for value in (row.ours, row.peer) if value is not None]
    longest = max([*values, row.row.budget or 0]) or 1
    scale = (WIDTH - LEFT - RIGHT) / longest
    yield _text(14, y + BAR - 2, row.row.in_picture)
    for index, (value, colour) in enumerate(((row.ours, OURS), (row.peer, PEER))):
        if value is not None:
            width = max(value, 0) * scale
            yield _bar(LEFT, y + index * BAR, max(width, 1), colour)
            yield _text(LEFT + width + 6, y + index * BAR + BAR - 2, number(value, row.row))
    if row.row.budget:
        yield _bar(LEFT + row.row.budget * scale - 1, y - 2, 2, BUDGET, BAR + 4)


def _bar(x: float, y: float, width: float, colour: str, height: float = BAR - 1) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}">{escape(words)}</text>'
