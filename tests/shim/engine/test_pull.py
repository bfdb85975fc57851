"""Progress and verdict of a pull, over streams written as engines write them, and worse."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from dstack_shim_contracts.api import ImagePullProgress
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.engine.pull import PullProgress, PullStream
from dstack_shim.errors import PullFailed

DONE = {"status": "Status: Downloaded newer image for host/a:1"}


def layer(name: str, status: str, **detail: Any) -> dict[str, Any]:
    return {"status": status, "id": name, "progressDetail": detail}


def progress_of(*messages: dict[str, Any]) -> ImagePullProgress | None:
    progress = PullProgress()
    for message in messages:
        progress.take(message)
    return progress.now


def sums(*messages: dict[str, Any]) -> tuple[int, int, int, bool]:
    now = progress_of(*messages)
    assert now is not None
    return (
        now.downloaded_bytes,
        now.extracted_bytes,
        now.total_bytes,
        now.is_total_bytes_final,
    )


def fed(*messages: object, sink: Any = None) -> PullStream:
    stream = PullStream(sink)
    for message in messages:
        stream.feed(json.dumps(message).encode() + b"\r\n")
    return stream


def test_there_is_no_progress_before_a_layer_is_seen() -> None:
    assert progress_of() is None
    assert progress_of({"status": "Pulling from library/a", "id": "latest"}) is None
    assert progress_of({"status": "Digest: sha256:00"}, DONE) is None


def test_a_layer_without_a_total_leaves_the_total_open() -> None:
    assert sums(layer("a", "Pulling fs layer")) == (0, 0, 0, False)
    assert sums(layer("a", "Downloading", current=5)) == (5, 0, 0, False)
    assert sums(layer("a", "Download complete")) == (0, 0, 0, False)


def test_a_layer_that_is_here_has_nothing_left_to_count() -> None:
    assert sums(layer("a", "Already exists")) == (0, 0, 0, True)
    assert sums(layer("a", "Pull complete")) == (0, 0, 0, True)


def test_layers_add_up() -> None:
    assert sums(
        layer("a", "Downloading", current=3, total=10),
        layer("b", "Downloading", current=4, total=20),
        layer("c", "Already exists"),
    ) == (7, 0, 30, True)


def test_a_finished_download_counts_whole() -> None:
    assert sums(
        layer("a", "Downloading", current=3, total=10), layer("a", "Download complete")
    ) == (10, 0, 10, True)


def test_extraction_in_bytes_counts() -> None:
    assert sums(
        layer("a", "Downloading", current=10, total=10),
        layer("a", "Extracting", current=4, total=10),
    ) == (10, 4, 10, True)


@pytest.mark.parametrize("units", ["s", "seconds", 7, ["bytes"], {}])
def test_extraction_in_seconds_counts_nothing(units: Any) -> None:
    assert sums(
        layer("a", "Downloading", current=10, total=10),
        layer("a", "Extracting", current=99, units=units),
    ) == (10, 0, 10, True)


@pytest.mark.parametrize("units", ["bytes", "B", "", None])
def test_bytes_may_be_named(units: Any) -> None:
    assert sums(layer("a", "Downloading", current=1, total=2, units=units)) == (1, 0, 2, True)


def test_a_finished_layer_counts_whole_both_ways() -> None:
    assert sums(layer("a", "Downloading", current=1, total=10), layer("a", "Pull complete")) == (
        10,
        10,
        10,
        True,
    )


def test_a_download_tried_again_does_not_fall() -> None:
    assert sums(
        layer("a", "Downloading", current=9, total=10),
        layer("a", "Retrying in 5 seconds"),
        layer("a", "Downloading", current=1, total=8),
    ) == (9, 0, 10, True)


def test_a_layer_that_was_never_announced_counts() -> None:
    assert sums(layer("late", "Extracting", current=1, total=2)) == (2, 1, 2, True)


@pytest.mark.parametrize("value", [None, "7", 7.5, True, -7, [], {}, float("nan")])
@pytest.mark.parametrize("key", ["current", "total"])
def test_numbers_that_are_none_count_nothing(key: str, value: Any) -> None:
    downloaded, _, total, _ = sums(layer("a", "Downloading", **{key: value}))
    assert (downloaded, total) == (0, 0)


def test_absurd_numbers_stay_within_64_bits() -> None:
    messages = [layer(name, "Downloading", current=10**30, total=10**30) for name in "abc"]
    assert sums(*messages)[:3] == (2**63 - 1, 0, 2**63 - 1)


def test_a_stream_of_ever_new_layers_takes_bounded_memory() -> None:
    progress = PullProgress()
    for number in range(20_000):
        progress.take(layer(str(number), "Downloading", current=1, total=1))
    assert progress.now is not None
    assert progress.now.total_bytes == 10_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
STATUSES = st.sampled_from(
    [
        "Pulling fs layer",
        "Waiting",
        "Downloading",
        "Verifying Checksum",
        "Download complete",
        "Extracting",
        "Pull complete",
        "Already exists",
        "Retrying in 5 seconds",
    ]
)
DETAILS = st.fixed_dictionaries(
    {}, optional={"current": JSON, "total": JSON, "units": JSON | st.sampled_from(["s", "bytes"])}
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["a", "b", "c"]) | JSON,
        "status": STATUSES | JSON,
        "progressDetail": DETAILS | JSON,
    },
)


@given(st.lists(MESSAGES, max_size=30))
def test_sums_never_fall_whatever_comes(messages: list[dict[str, Any]]) -> None:
    progress, before = PullProgress(), (0, 0, 0)
    for message in messages:
        progress.take(message)
        if (now := progress.now) is not None:
            after = (now.downloaded_bytes, now.extracted_bytes, now.total_bytes)
            assert all(old <= new for old, new in zip(before, after, strict=True))
            before = after


@given(
    st.lists(
        st.fixed_dictionaries(
            {"id": st.sampled_from("abc"), "status": STATUSES},
            optional={
                "progressDetail": st.fixed_dictionaries(
                    {"current": st.integers(0, 100), "total": st.integers(1, 100)}
                )
            },
        )
    ),
    st.data(),
)
def test_how_the_stream_is_cut_does_not_matter(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    whole = b"".join(json.dumps(message).encode() + b"\r\n" for message in [*messages, DONE])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces, sink = PullStream(io.BytesIO()), io.BytesIO()
    pieces = PullStream(sink)
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        pieces.feed(whole[start:end])
    pieces.finish()
    assert pieces.progress == progress_of(*messages)
    assert sink.getvalue() == whole


def test_the_last_word_is_success() -> None:
    fed(layer("a", "Pull complete"), DONE).finish()
    fed({"status": "Status: Image is up to date for a:1"}).finish()


def test_the_last_word_needs_no_line_end() -> None:
    stream = PullStream(None)
    stream.feed(json.dumps(DONE).encode())
    stream.finish()


def test_all_bytes_without_the_last_word_are_no_success() -> None:
    stream = fed(layer("a", "Downloading", current=9, total=9), layer("a", "Pull complete"))
    with pytest.raises(PullFailed, match="without the engine saying"):
        stream.finish()


def test_a_layer_cannot_say_the_last_word() -> None:
    with pytest.raises(PullFailed):
        fed({**DONE, "id": "a"}).finish()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"errorDetail": {"message": "no space left on device"}, "error": "x"}, "no space left"),
        ({"errorDetail": {"code": 5}, "error": "toomanyrequests: slow down"}, "toomanyrequests"),
        ({"error": "unexpected EOF"}, "unexpected EOF"),
        ({"errorDetail": {"message": 7}}, "without words"),
        ({"errorDetail": "odd"}, "without words"),
    ],
)
def test_an_error_in_the_stream_fails_the_pull_with_its_text(
    message: dict[str, Any], words: str
) -> None:
    with pytest.raises(PullFailed, match=words):
        fed(layer("a", "Downloading", current=1, total=2), message, DONE).finish()


def test_the_first_error_is_the_cause() -> None:
    with pytest.raises(PullFailed, match="first"):
        fed({"error": "first"}, {"error": "second"}).finish()


@pytest.mark.parametrize(
    "junk",
    [b"", b"\0\xff\n", b"[]\n", b"7\n", b"{\n", b"[" * 100_000 + b"\n", b"x" * 3_000_000 + b"\n"],
)
def test_junk_between_the_lines_is_passed_over(junk: bytes) -> None:
    stream = PullStream(None)
    stream.feed(junk)
    stream.feed(json.dumps(layer("a", "Downloading", current=1, total=2)).encode() + b"\n")
    stream.feed(json.dumps(DONE).encode() + b"\n")
    stream.finish()
    assert stream.progress == ImagePullProgress(1, 0, 2, is_total_bytes_final=True)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed")])
def test_a_log_that_cannot_be_written_never_fails_a_pull(error: Exception) -> None:
    class Full:
        writes = 0

        def write(self, data: bytes) -> None:
            self.writes += 1
            raise error

    full = Full()
    stream = fed(layer("a", "Downloading", current=1, total=2), DONE, sink=full)
    stream.finish()
    assert full.writes == 1
