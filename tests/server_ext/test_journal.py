from __future__ import annotations

import threading

import pytest

from dstack_shim_server.journal import LONGEST, Journal, printable

BOX = ("id-1", "box")


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="dstack.plugins.shim_restart")


def test_a_decision_is_logged_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    for sentence in ("safe: a", "safe: a", "not safe: b", "safe: a"):
        journal.note(BOX, sentence)
    assert [record.getMessage() for record in caplog.records] == [
        "shim_restart: instance box: safe: a",
        "shim_restart: instance box: not safe: b",
        "shim_restart: instance box: safe: a",
    ]


def test_instances_are_told_apart_by_id_not_by_name(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    journal.note(("id-1", "box"), "safe: a")
    journal.note(("id-2", "box"), "safe: a")
    assert len(caplog.records) == 2


def test_the_instance_longest_unheard_of_is_forgotten_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal = Journal(remembered=2)
    for name in ("a", "b", "a", "c", "a", "b"):  # c pushes b out, not a
        journal.note((name, name), "safe: x")
    assert [line.split()[2] for line in caplog.messages] == ["a:", "b:", "c:", "b:"]


def test_a_caller_that_is_no_instance_check_has_a_name_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Journal().note(None, "safe: a")
    assert caplog.messages == ["shim_restart: instance (unknown): safe: a"]


def test_one_change_seen_by_many_threads_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    start = threading.Barrier(16)

    def note() -> None:
        start.wait()
        journal.note(BOX, "safe: a")

    threads = [threading.Thread(target=note) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("0.21.3\nERROR forged line", "0.21.3\\x0aERROR forged line"),
        ("\x1b[31mred\x00", "\\x1b[31mred\\x00"),
        ("a\u2028b", "a\\x2028b"),
        ("näive 漢字", "näive 漢字"),
    ],
)
def test_a_shims_words_stay_on_one_line(words: str, line: str) -> None:
    assert printable(words) == line


def test_endless_words_are_cut() -> None:
    assert len(printable("x" * 100_000)) == LONGEST + 1
