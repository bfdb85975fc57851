"""Where answers are printed: how wide it is, whether it has colours and more than ASCII."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

import attrs
from dstack_shim_contracts.api import ImagePullProgress
from rich.cells import cell_len, chop_cells
from rich.color import ColorSystem
from rich.style import Style

from dstack_shim.console.text import Keep, cut, shown

LONGEST = 400
"""Cells of one column where nothing is cut to fit: nobody needs more of a message in a table."""

_LONGEST_FACT = 20_000  # characters of one fact
_NARROWEST = 40
_SHORTEST_BAR = 8


@attrs.frozen
class Cell:
    """One cell of a table; its text may be foreign. ``progress`` is drawn where there is room."""

    text: str = ""
    style: str = ""
    progress: ImagePullProgress | None = None


@attrs.frozen
class Column:
    """One column: ``least`` is what it may shrink to, 0: it never does."""

    title: str
    least: int = 0
    keep: Keep = Keep.HEAD


@attrs.frozen
class Screen:
    """One place to print to. ``width`` in cells; None: nothing is cut.

    Of rich it uses what measures and what colours. Its tables and consoles would take a third
    of the time a command has.
    """

    file: TextIO
    width: int | None
    utf8: bool
    colour: bool
    is_terminal: bool

    @classmethod
    def of(cls, file: TextIO, environ: Mapping[str, str]) -> Screen:
        """What this file is, as far as it and the environment tell."""
        is_terminal = file.isatty()
        colour = is_terminal and not environ.get("NO_COLOR")
        return cls(
            file=file,
            width=_width(file, environ, is_terminal),
            utf8=speaks_utf8(environ),
            colour=colour and environ.get("TERM", "dumb") != "dumb",
            is_terminal=is_terminal,
        )

    def shown(self, text: str) -> str:
        """Foreign text, fit for a line of this screen."""
        return shown(text, utf8=self.utf8)

    def line(self, text: str) -> None:
        """Print a line of our own words and of text that is fit already."""
        self.file.write(f"{text}\n")

    def parts(self, parts: Sequence[Cell]) -> None:
        """Print one line of several parts, cut where the screen ends."""
        room = LONGEST * 10 if self.width is None else self.width
        line = ""
        for part in parts:
            words = cut(self._text(part), room, utf8=self.utf8)
            line += self._styled(words, part.style)
            room -= cell_len(words)
        self.line(line.rstrip())

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table that fits, with less between its columns where it is tight."""
        texts = [[self._text(cell) for cell in row] for row in rows]
        widths, gap = _widths(columns, texts, self.width)
        titles = (
            _padded(column.title, width) for column, width in zip(columns, widths, strict=True)
        )
        self.line(self._styled((" " * gap).join(titles).rstrip(), "bold"))
        for row, words in zip(rows, texts, strict=True):
            drawn = (
                self._drawn(cell, text, width, column)
                for cell, text, width, column in zip(row, words, widths, columns, strict=True)
            )
            self.line((" " * gap).join(drawn).rstrip())

    def facts(self, facts: Sequence[tuple[str, Cell]]) -> None:
        """Print names and what they are, a line each; long ones go on below."""
        names = max((len(name) for name, _ in facts), default=0) + 2
        room = None if self.width is None else max(self.width - names, _NARROWEST // 2)
        for name, cell in facts:
            first, *rest = _folded(self._text(cell), room)
            self.line(self._styled(f"{name:<{names}}", "bold") + self._styled(first, cell.style))
            for more in rest:
                self.line(" " * names + self._styled(more, cell.style))

    def _text(self, cell: Cell) -> str:
        text = percent(cell.progress) if cell.progress else cell.text[:_LONGEST_FACT]
        return self.shown(text)

    def _drawn(self, cell: Cell, text: str, width: int, column: Column) -> str:
        if cell.progress and self.is_terminal and width >= _SHORTEST_BAR + len(" 100%"):
            return self._styled(bar(cell.progress, width, utf8=self.utf8), cell.style)
        fit = cut(text, width, utf8=self.utf8, keep=column.keep)
        return self._styled(fit, cell.style) + " " * (width - cell_len(fit))

    def _styled(self, text: str, style: str) -> str:
        if not style or not self.colour:
            return text
        return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


def screen() -> Screen:
    """Standard output."""
    return Screen.of(sys.stdout, os.environ)


def note(text: str) -> None:
    """Tell on standard error what is to be known about an answer."""
    words = shown(text, utf8=speaks_utf8(os.environ))
    print(f"dstack-shim: {words}", file=sys.stderr)  # noqa: T201 - the answer goes to stdout


def as_json(document: object, *, indent: int | None = 2) -> str:
    """A document for programs, in ASCII that steers no terminal either."""
    return json.dumps(document, indent=indent).replace("\x7f", "\\u007f")


def percent(progress: ImagePullProgress) -> str:
    """How far a pull is: downloading is the first half, extracting the second."""
    share = f"{done(progress):.0%}" if progress.total_bytes else "begun"
    about = "" if progress.is_total_bytes_final else "at least "
    return f"{share} of {about}{size(progress.total_bytes)}"


def done(progress: ImagePullProgress) -> float:
    """The share that is done, from 0 to 1."""
    total = 2 * progress.total_bytes
    return min((progress.downloaded_bytes + progress.extracted_bytes) / total, 1) if total else 0


def bar(progress: ImagePullProgress, width: int, *, utf8: bool) -> str:
    """A bar with the share that is done, in so many cells."""
    words = f" {done(progress):>4.0%}"
    room = width - len(words)
    full = int(done(progress) * room)
    whole, empty = ("━", "┄") if utf8 else ("#", ".")
    return whole * full + empty * (room - full) + words


def size(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def speaks_utf8(environ: Mapping[str, str]) -> bool:
    """Whether the user's locale is one of UTF-8.

    The interpreter itself runs in UTF-8 and, where it finds the C locale, sets ``LC_CTYPE`` to
    ``C.UTF-8`` (PEP 538): that word beside no other is its own, not the user's.
    """
    names = [environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    if not names[0] and names[1] == "C.UTF-8" and names[2] in {"", "C", "POSIX"}:
        return False
    chosen = next((name for name in names if name), "")
    return chosen.partition(".")[2].lower().replace("-", "").startswith("utf8")


def _width(file: TextIO, environ: Mapping[str, str], is_terminal: bool) -> int | None:
    columns = environ.get("COLUMNS", "")
    if columns.isdecimal() and 0 < len(columns) < 6 and int(columns):
        return max(int(columns), _NARROWEST)
    if not is_terminal:
        return None
    try:
        return max(os.get_terminal_size(file.fileno()).columns or 80, _NARROWEST)
    except OSError:
        return 80


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int | None
) -> tuple[list[int], int]:
    """What each column gets, and what is left between two.

    All they want, or the widest give way first, down to their least.
    """
    widths = [
        max([len(column.title), *(min(cell_len(row[place]), LONGEST) for row in rows)])
        for place, column in enumerate(columns)
    ]
    gaps = len(columns) - 1
    if room is None or sum(widths) + 2 * gaps <= room:
        return widths, 2
    for _ in range(sum(widths) + gaps - room):
        able = [place for place, column in enumerate(columns) if 0 < column.least < widths[place]]
        if not able:
            break
        widths[max(able, key=widths.__getitem__)] -= 1
    return widths, 1


def _padded(text: str, width: int) -> str:
    return text[:width].ljust(width)


def _folded(text: str, room: int | None) -> list[str]:
    return (chop_cells(text, room) if room else [text]) or [""]
