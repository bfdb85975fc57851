"""Foreign text on a terminal: it looks like what it is, and does nothing."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dstack_shim.console.text import Keep, cut, one_line, shown, shown_output

HOSTILE = {
    "an escape sequence": ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    "a cleared screen": ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
    "an eight-bit one": ("\x9b2J", r"\x9b2J"),
    "a return": ("good\rbad", r"good\rbad"),
    "a line break": ("one\ntwo", r"one\ntwo"),
    "one of Unicode": ("one\u2028two", r"one\u2028two"),
    "a backspace": ("ab\x08c", r"ab\x08c"),
    "an override of direction": ("\u202egnp.exe", r"\u202egnp.exe"),
    "an isolate": ("\u2067a\u2069", r"\u2067a\u2069"),
    "letters from right to left": ("x \u05d0\u05d1 1", r"x \u05d0\u05d1 1"),
    "a joiner nobody sees": ("a\u200bb", r"a\u200bb"),
    "half of a pair": ("\ud800", r"\ud800"),
    "a private letter": ("\U000f0000", r"\U000f0000"),
    "a tower of marks": ("a" + "\u0301" * 4, "a\u0301\u0301" + r"\u0301\u0301"),
}


@pytest.mark.parametrize(("text", "looks"), HOSTILE.values(), ids=HOSTILE)
def test_what_steers_hides_or_reorders_is_an_escape(text: str, looks: str) -> None:
    assert shown(text) == looks


@pytest.mark.parametrize("text", ["plain", "é日本 Ω", "🙂", "back\\slash", ""])
def test_what_is_only_text_stays(text: str) -> None:
    assert shown(text) == text


def test_without_utf8_it_is_ascii() -> None:
    assert shown("é日🙂", utf8=False) == r"\xe9\u65e5\U0001f642"


@given(st.text())
def test_nothing_gets_through_in_one_line(text: str) -> None:
    for utf8 in (True, False):
        for letter in shown(text, utf8=utf8):
            assert letter.isprintable() or unicodedata.category(letter) == "Zs"
            assert utf8 or letter.isascii()


@given(st.text())
def test_nothing_gets_through_in_output(text: str) -> None:
    for letter in shown_output(text):
        assert letter.isprintable() or letter == "\t" or unicodedata.category(letter) == "Zs"


def test_output_loses_its_colours_and_keeps_its_tabs_and_its_language() -> None:
    assert shown_output("\x1b[1;31mred\x1b[0m\tשלום") == "red\tשלום"
    assert shown_output("\x1b[31m\x1b[2K") == r"\x1b[2K"


@given(st.text(), st.integers(0, 20), st.booleans(), st.sampled_from(Keep))
def test_a_cut_text_fits(text: str, width: int, utf8: bool, keep: Keep) -> None:
    assert cell_len(cut(shown(text), width, utf8=utf8, keep=keep)) <= width


def test_a_cut_says_that_something_is_missing() -> None:
    assert cut("wonderful-duck-1", 10) == "wonderful…"
    assert cut("wonderful-duck-1", 10, utf8=False) == "wonderful~"
    assert cut("dstackai/base:py3.11", 10, keep=Keep.TAIL) == "…se:py3.11"
    assert cut("wonderful-duck-1-0", 10, keep=Keep.BOTH) == "wonde…-1-0"
    assert cut("日本語日本語", 6) == "日本…"
    assert cut("fits", 4) == "fits"


def test_several_lines_become_one() -> None:
    assert one_line("a\n\n  b \nc") == "a | b | c"
