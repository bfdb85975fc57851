from __future__ import annotations

from typing import Any

import pytest

from dstack_shim_server import guard
from dstack_shim_server.guard import shielded


def fail(error: type[Exception]) -> Any:
    raise error("ours")


def test_what_works_is_answered() -> None:
    assert shielded("working", lambda: 1, lambda: 2) == 1


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError, OSError])
def test_what_fails_is_answered_otherwise(error: type[Exception]) -> None:
    assert shielded("failing", lambda: fail(error), lambda: 2) == 2


def test_an_interrupt_is_not_ours_to_stop() -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shielded("being interrupted", interrupt, lambda: 2)


def test_each_kind_of_failure_is_reported_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error in (ValueError, ValueError, KeyError):
        shielded("failing", lambda error=error: fail(error), lambda: None)  # type: ignore[misc]
    shielded("something else", lambda: fail(ValueError), lambda: None)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert all(record.exc_info for record in caplog.records)


def test_the_memory_of_what_was_reported_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(300):
        shielded(f"failing at {number}", lambda: fail(ValueError), lambda: None)
    assert len(caplog.records) == guard._REPORTED_LIMIT


def test_a_logger_that_fails_as_well_does_not_let_it_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard.logger, "error", lambda *_a, **_k: fail(OSError))
    assert shielded("failing", lambda: fail(ValueError), lambda: 2) == 2
