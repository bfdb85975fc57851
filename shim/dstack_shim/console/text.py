"""Foreign text made fit for a terminal.

A task chooses its output, and parts of its messages and names. Shown raw it could move the
cursor, change the title, answer for the user, or turn the order of a line around. Here it becomes
text that only looks like what it is: what steers, hides or reorders is shown as an escape.
"""

from __future__ import annotations

import re
import unicodedata
from enum import Enum

from rich.cells import cell_len, set_cell_size

# Control, format (directions, joiners), surrogates, private, unassigned, line breaks of Unicode.
_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_RIGHT_TO_LEFT = frozenset({"R", "AL", "AN"})
_MARKS = frozenset({"Mn", "Me"})
_MOST_MARKS = 2  # on one letter; a hundred of them cover the lines above
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def shown(text: str, *, utf8: bool = True, in_a_row: bool = True) -> str:
    """The text as it may be printed in one line.

    Without ``utf8`` it is ASCII. ``in_a_row`` tells that other text follows in the same line:
    then letters that run from right to left are escaped, too, or they would carry it along.
    """
    if text.isascii() and text.isprintable():
        return text
    marks, pieces = 0, []
    for letter in text:
        marks = marks + 1 if unicodedata.category(letter) in _MARKS else 0
        fit = _is_fit(letter, utf8, in_a_row) and marks <= _MOST_MARKS
        pieces.append(letter if fit else _escape(letter))
    return "".join(pieces)


def shown_output(text: str, *, utf8: bool = True) -> str:
    """A line of a program's output: tabs stay, colours are taken out, the rest as above."""
    if text.isascii() and text.isprintable():
        return text
    parts = _COLOURS.sub("", text).split("\t")
    return "\t".join(shown(part, utf8=utf8, in_a_row=False) for part in parts)


class Keep(Enum):
    """Which part of a text tells most, where not all of it fits."""

    HEAD = "head"
    TAIL = "tail"
    BOTH = "both"


def cut(text: str, width: int, *, utf8: bool = True, keep: Keep = Keep.HEAD) -> str:
    """The text in at most ``width`` cells, with a mark where something is missing."""
    if len(text) * 2 <= width or cell_len(text) <= width:
        return text
    mark = "…" if utf8 else "~"
    room = width - 1
    if room <= 0:
        return mark[:width]
    tail = {Keep.HEAD: 0, Keep.TAIL: room, Keep.BOTH: room // 2}[keep]
    return _head(text, room - tail) + mark + _tail(text, tail)


def _head(text: str, room: int) -> str:
    return set_cell_size(text[:room], room).rstrip()


def _tail(text: str, room: int) -> str:
    kept = text[len(text) - room :]
    while cell_len(kept) > room:
        kept = kept[1:]
    return kept


def one_line(text: str) -> str:
    """Several lines as one, of reasonable length."""
    return " | ".join(line.strip() for line in text[:4000].splitlines() if line.strip())


def _is_fit(letter: str, utf8: bool, in_a_row: bool) -> bool:
    if letter.isascii():
        return letter.isprintable()
    if not utf8 or unicodedata.category(letter) in _UNSHOWN:
        return False
    return not (in_a_row and unicodedata.bidirectional(letter) in _RIGHT_TO_LEFT)


def _escape(letter: str) -> str:
    number = ord(letter)
    if number < 0x100:
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(letter, f"\\x{number:02x}")
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
