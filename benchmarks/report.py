"""The report in Markdown: every row with its number, the peer's beside it, and their ratio."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import attrs

from benchmarks.candidates import OURS, PEER
from benchmarks.rows import SECTIONS, Row
from benchmarks.samples import Samples


@attrs.frozen
class Told:
    """What a row comes to; None where nothing was measured."""

    row: Row
    ours: float | None
    peer: float | None

    @property
    def ratio(self) -> float | None:
        """How many times ours the peer's is; None without both, or where one is not above 0."""
        if self.ours is None or self.peer is None or min(self.ours, self.peer) <= 0:
            return None
        return self.peer / self.ours

    @property
    def is_missed(self) -> bool:
        """Whether ours is over its budget."""
        return (
            self.ours is not None and self.row.budget is not None and self.ours > self.row.budget
        )


def told(row: Row, samples: Samples) -> Told:
    """The row's numbers."""
    numbers = (samples.of(row.source, name) for name in (OURS, PEER))
    ours, peer = (row.statistic(values) if values else None for values in numbers)
    return Told(row, ours, peer)


def number(value: float | None, row: Row) -> str:
    """The value as the row wants it, with its unit."""
    if value is None:
        return "–"
    return f"{value:,.{row.digits}f} {row.unit}".replace("-", "−").strip()


def markdown(samples: Samples, facts: Mapping[str, str]) -> str:
    """The whole page; ``facts`` name the machine and who was measured."""
    return "\n".join([*_head(facts), *_sections(samples)])


def _head(facts: Mapping[str, str]) -> Iterator[str]:
    yield "# Benchmarks\n"
    yield _wrapped(
        "Written by `./dev bench`; `./dev bench -- --peer FILE` measures another shim beside this "
        "one, in turns, on the same engine and host. Less is better everywhere. A ratio is how many "
        "times ours the other's number is."
    )
    yield "![The main numbers as bars](benchmarks.svg)\n"
    yield from (f"- {name}: {words}" for name, words in facts.items())
    yield ""


def _sections(samples: Samples) -> Iterator[str]:
    for section in SECTIONS:
        rows = [told(row, samples) for row in section.rows]
        rows = [row for row in rows if row.ours is not None or row.peer is not None]
        if not rows:
            continue
        yield f"## {section.title}\n"
        yield _wrapped(section.how)
        yield "| | ours | other | ratio | budget | measured |"
        yield "|---|---:|---:|---:|---:|---:|"
        for row in rows:
            yield _line(row, len(samples.of(row.row.source, OURS)))
        yield ""


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False) + "\n"


def _line(told: Told, count: int) -> str:
    budget = "" if told.row.budget is None else f"≤ {number(told.row.budget, told.row)}"
    if told.is_missed:
        budget += " **missed**"
    ratio = "" if told.ratio is None else f"{told.ratio:,.1f}"
    cells = [told.row.label, number(told.ours, told.row), number(told.peer, told.row)]
    return f"| {' | '.join([*cells, ratio, budget, str(count)])} |"


def lines(samples: Samples) -> Iterator[str]:
    """The same for a terminal."""
    for section in SECTIONS:
        for row in section.rows:
            one = told(row, samples)
            if one.ours is None and one.peer is None:
                continue
            ratio = "" if one.ratio is None else f"  ratio {one.ratio:,.1f}"
            missed = "  OVER BUDGET" if one.is_missed else ""
            yield (
                f"{row.label:45} {number(one.ours, row):>18} {number(one.peer, row):>18}"
                f"{ratio}{missed}"
            )
