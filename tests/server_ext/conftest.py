"""The extension remembers what it reported for as long as the process lives; a test does not."""

from __future__ import annotations

import pytest

from dstack_shim_server import guard


@pytest.fixture(autouse=True)
def nothing_reported_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_reported", set())
