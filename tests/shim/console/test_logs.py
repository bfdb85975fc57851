"""The output of a container, from bytes to lines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.console.logs import Lines, _document
from dstack_shim.engine.output import Frames, Piece

WORDS = [b"one\n", b"\r\n", b"\r", b"\xc3\xa9", b"two", b"\n"]


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


def joined(pieces: list[Piece]) -> list[tuple[int, bytes]]:
    return [
        (stream, b"".join(piece.data for piece in group))
        for stream, group in itertools.groupby(pieces, lambda piece: piece.stream)
    ]


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(min_size=1)), max_size=8), st.data())
def test_frames_cut_anywhere_are_the_same(
    frames: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    whole = b"".join(frame(*item) for item in frames)
    at_once = joined(list(Frames().feed(whole)))
    reader, place, pieces = Frames(), 0, list[Piece]()
    while place < len(whole):
        step = data.draw(st.integers(1, len(whole) - place))
        pieces += reader.feed(whole[place : place + step])
        place += step
    assert joined(pieces) == at_once
    assert b"".join(text for _, text in at_once) == b"".join(text for _, text in frames)


def test_what_has_no_frames_is_taken_as_it_is() -> None:
    assert list(Frames().feed(b"plain text")) == [Piece(1, b"plain text")]
    reader = Frames()
    assert list(reader.feed(frame(2, b"x"))) == [Piece(2, b"x")]
    assert list(reader.feed(b"plain")) == [Piece(1, b"plain")]


def lines(*chunks: bytes, returns_end: bool = True) -> list[str]:
    reader = Lines(returns_end=returns_end)
    return [line for chunk in chunks for line in reader.feed(chunk)] + list(reader.finish())


@given(st.lists(st.sampled_from(WORDS)), st.booleans())
def test_lines_cut_anywhere_are_the_same(words: list[bytes], returns_end: bool) -> None:
    whole = b"".join(words)
    by_byte = [whole[place : place + 1] for place in range(len(whole))]
    assert lines(*by_byte, returns_end=returns_end) == lines(whole, returns_end=returns_end)


@pytest.mark.parametrize(
    ("chunk", "found"),
    [
        (b"one\ntwo", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"10%\r20%\r30%\n", ["10%", "20%", "30%"]),
        (b"\n\n", ["", ""]),
        (b"\xff\n", ["\ufffd"]),
        (b"", []),
    ],
)
def test_what_is_a_line(chunk: bytes, found: list[str]) -> None:
    assert lines(chunk) == found


def test_a_line_without_an_end_comes_in_parts() -> None:
    found = lines(*[b"x" * 10_000] * 10)
    assert "".join(found) == "x" * 100_000
    assert max(map(len, found)) <= 8192


def test_for_programs_a_line_stays_whole_and_has_its_time() -> None:
    stamp = b"2026-01-02T03:04:05.123456789Z"
    (line,) = lines(stamp + b" 10%\r20%\n", returns_end=False)
    assert _document(2, line) == {"time": stamp.decode(), "stream": "stderr", "line": "10%\r20%"}
    assert _document(1, "no time") == {"time": None, "stream": "stdout", "line": "no time"}
