"""Tables and facts on screens of all kinds."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator

import pytest
from dstack_shim_contracts.api import ImagePullProgress
from rich.cells import cell_len

from dstack_shim.console.screen import Cell, Column, Screen, as_json, percent, size, speaks_utf8
from dstack_shim.console.text import Keep

COLUMNS = (Column("ID"), Column("NAME", least=6), Column("IMAGE", least=6, keep=Keep.TAIL))
ROWS = ((Cell("t1"), Cell("a-long-name-of-a-task"), Cell("registry/an-image:1.2")),)
HALF = ImagePullProgress(1000, 0, 1000, True)


def screen(
    width: int | None = None, *, utf8: bool = True, colour: bool = False, is_terminal: bool = False
) -> Screen:
    return Screen(io.StringIO(), width, utf8, colour, is_terminal)


def printed(here: Screen) -> list[str]:
    assert isinstance(here.file, io.StringIO)
    return here.file.getvalue().splitlines()


def test_where_there_is_room_nothing_is_cut() -> None:
    here = screen()
    here.table(COLUMNS, ROWS)
    assert printed(here) == [
        "ID  NAME                   IMAGE",
        "t1  a-long-name-of-a-task  registry/an-image:1.2",
    ]


def test_a_narrow_one_gets_what_tells_most() -> None:
    here = screen(24)
    here.table(COLUMNS, ROWS)
    assert printed(here) == ["ID NAME       IMAGE", "t1 a-long-na… …image:1.2"]


def test_one_without_utf8_gets_ascii() -> None:
    here = screen(24, utf8=False)
    here.table(COLUMNS, [(Cell("é"), *ROWS[0][1:])])
    assert printed(here)[1].isascii()
    assert printed(here)[1].startswith(r"\xe9 a-long-n~ ~")


def test_wide_letters_count_twice() -> None:
    here = screen(24)
    here.table(COLUMNS, [(Cell("日"), Cell("日本語日本語日本語"), Cell("x"))])
    assert all(cell_len(line) <= 24 for line in printed(here))


def test_what_a_task_chose_cannot_leave_its_cell() -> None:
    here = screen(40)
    here.table(COLUMNS, [(Cell("t1"), Cell("\x1b[2J\n\u202eevil"), Cell("a" * 100_000))])
    assert len(printed(here)) == 2
    assert all(line.isprintable() and cell_len(line) <= 40 for line in printed(here))


def test_colours_only_where_they_are_wanted() -> None:
    for colour, line in ((True, "\x1b[32mt1\x1b[0m"), (False, "t1")):
        here = screen(colour=colour)
        here.table([Column("ID")], [(Cell("t1", "green"),)])
        assert printed(here)[1] == line


@pytest.mark.parametrize(
    ("utf8", "bar"), [(True, "━━━━━━━┄┄┄┄┄┄┄┄  50%"), (False, "#######........  50%")]
)
def test_a_pull_is_a_bar_on_a_terminal(utf8: bool, bar: str) -> None:
    here = screen(20, is_terminal=True, utf8=utf8)
    here.table([Column("OUTCOME" + " " * 13)], [(Cell(progress=HALF),)])
    assert printed(here)[1] == bar


def test_a_pull_is_words_elsewhere() -> None:
    here = screen()
    here.table([Column("OUTCOME")], [(Cell(progress=HALF),)])
    assert printed(here)[1] == "50% of 1.0 kB"


def test_a_pull_whose_size_is_not_known_says_so() -> None:
    assert percent(ImagePullProgress(0, 0, 0, False)) == "begun of at least 0 B"
    assert percent(ImagePullProgress(10, 5, 10, False)) == "75% of at least 10 B"


def test_long_facts_go_on_below() -> None:
    here = screen(40)
    here.facts([("name", Cell("x" * 40)), ("of", Cell("y"))])
    assert printed(here) == ["name  " + "x" * 34, "      " + "x" * 6, "of    y"]


def test_parts_end_where_the_screen_does() -> None:
    here = screen(12)
    here.parts([Cell("one "), Cell("two ", "red"), Cell("three")])
    assert printed(here) == ["one two thr…"]


@pytest.mark.parametrize(
    ("environ", "does"),
    [
        ({"LANG": "C.UTF-8"}, True),
        ({"LANG": "de_DE.utf8"}, True),
        ({"LANG": "C"}, False),
        ({}, False),
        ({"LANG": "de_DE.ISO-8859-1"}, False),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, False),
        ({"LC_ALL": "en_US.UTF-8", "LANG": "C"}, True),
        # What the interpreter sets where it finds the C locale.
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),
        ({"LC_CTYPE": "C.UTF-8"}, False),
        ({"LC_CTYPE": "en_US.UTF-8"}, True),
    ],
)
def test_the_locale_tells_whether_there_is_utf8(environ: dict[str, str], does: bool) -> None:
    assert speaks_utf8(environ) is does


@pytest.fixture
def terminal() -> Iterator[io.TextIOWrapper]:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file:
        yield file
    os.close(master)


@pytest.mark.parametrize(
    ("environ", "colour"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_a_terminal_says_what_it_can(
    terminal: io.TextIOWrapper, environ: dict[str, str], colour: bool
) -> None:
    here = Screen.of(terminal, environ)
    assert (here.is_terminal, here.colour, here.width) == (True, colour, 80)
    assert Screen.of(terminal, {**environ, "COLUMNS": "132"}).width == 132


@pytest.mark.parametrize("columns", ["", "0", "wide", "-3", "9" * 20])
def test_columns_that_are_none_count_for_nothing(columns: str) -> None:
    assert Screen.of(io.StringIO(), {"COLUMNS": columns, "TERM": "xterm"}).width is None


def test_documents_are_ascii_and_steer_nothing() -> None:
    text = as_json({"a": "\x1b\x7f\x9bé"}, indent=None)
    assert text == r'{"a": "\u001b\u007f\u009b\u00e9"}'


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (4.2e9, "4.2 GB"), (5e15, "5000.0 TB")],
)
def test_sizes_are_in_words(count: float, words: str) -> None:
    assert size(count) == words
