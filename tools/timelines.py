"""docs/timelines.svg: a month of a job before and after, and what one replacement looks like.

    python -m tools.timelines [--check]

Drawn by hand, in a few shapes, so that it needs no library and reads the same in light and dark.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

from tools.generated import write_or_check

PICTURE = Path(__file__).parents[1] / "docs" / "timelines.svg"
WIDTH, ROW, LEFT = 860, 34, 150
INK, JOB, OLD, NEW, BAD, PAPER = "#1f2933", "#3f7cac", "#b0b7bf", "#2f8f5b", "#c0392b", "#ffffff"

# label, and what fills its line: (from, to, colour, text), in parts of the whole width
Line = tuple[str, tuple[tuple[float, float, str, str], ...]]
BEFORE: tuple[Line, ...] = (
    ("job", ((0.03, 0.95, JOB, "one job, one month"),)),
    ("dstack-shim", ((0.0, 0.95, OLD, "0.20: may not be restarted while the job runs"),)),
    ("fixes released", tuple((at, at + 0.012, BAD, "") for at in (0.18, 0.41, 0.63, 0.86))),
)
AFTER: tuple[Line, ...] = (
    ("job", ((0.03, 0.95, JOB, "the same job: same container, same start time, true exit code"),)),
    (
        "this shim",
        (
            (0.0, 0.185, NEW, "1"),
            (0.19, 0.415, NEW, "2"),
            (0.42, 0.635, NEW, "3"),
            (0.64, 0.865, NEW, "4"),
            (0.87, 1.0, NEW, "5"),
        ),
    ),
    ("fixes released", tuple((at, at + 0.012, BAD, "") for at in (0.18, 0.41, 0.63, 0.86))),
)


def main(arguments: list[str]) -> int:
    """Write the picture, or tell whether it is up to date."""
    return write_or_check(PICTURE, draw(), arguments, "tools.timelines")


def draw() -> str:
    """The whole picture."""
    height = 2 * (3 * ROW + 40) + 16
    body = [*_chart("Before", BEFORE, 0), *_chart("After", AFTER, 3 * ROW + 44)]
    return "\n".join(
        (
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
                ' font-family="system-ui, sans-serif" font-size="13" role="img"'
                ' aria-label="Before: one old shim for as long as the job runs. After: the shim is'
                ' replaced at each release while the job runs on.">'
            ),
            f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
            *body,
            "</svg>\n",
        )
    )


def _chart(title: str, lines: tuple[Line, ...], top: int) -> list[str]:
    parts = [_text(14, top + 24, title, INK, weight="bold")]
    for number, (label, bars) in enumerate(lines):
        y = top + 36 + number * ROW
        parts.append(_text(14, y + 18, label, INK))
        for start, end, colour, text in bars:
            x = LEFT + start * (WIDTH - LEFT - 14)
            width = (end - start) * (WIDTH - LEFT - 14)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="26" rx="3"'
                f' fill="{colour}"/>'
            )
            if text:
                parts.append(_text(x + 8, y + 18, text, INK if colour == OLD else PAPER))
    return parts


def _text(x: float, y: float, text: str, colour: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{colour}" font-weight="{weight}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
