from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "tests.plugins.counts")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def counted(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a test file in a pytest process of its own and returns the counts it left."""
    monkeypatch.setenv("DSTACK_SHIM_COUNTS", str(pytester.path / "counts"))
    monkeypatch.setenv("DSTACK_SHIM_RUN", "sample")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source: str, *arguments: str) -> dict[str, Any]:
        pytester.makepyfile(source)
        pytester.runpytest_subprocess(*PLUGIN, *arguments, timeout=60)
        text = (pytester.path / "counts" / "sample.json").read_text(encoding="utf-8")
        counts: dict[str, Any] = json.loads(text)
        return counts

    return run


def test_each_outcome_is_counted_once(counted: Any) -> None:
    counts = counted(
        """
        import pytest

        def test_good(): pass
        def test_bad(): assert False
        def test_elsewhere(): pytest.skip("no such hardware")

        @pytest.fixture
        def broken(): raise ValueError
        def test_not_even_begun(broken): pass

        @pytest.fixture
        def untidy():
            yield
            raise ValueError
        def test_good_but_untidy(untidy): pass
        """
    )
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (1, 3, 1)
    assert counts["finished"]
    assert list(counts["skips"].values()) == ["no such hardware"]


def test_a_module_that_cannot_be_imported_is_a_failure(counted: Any) -> None:
    counts = counted("raise ValueError")
    assert (counts["passed"], counts["failed"]) == (0, 1)


def test_a_module_that_skips_itself_is_one_skip(counted: Any) -> None:
    counts = counted("import pytest; pytest.skip('not here', allow_module_level=True)")
    assert counts["skipped"] == 1
    assert list(counts["skips"].values()) == ["not here"]


def test_an_expected_failure_is_a_skip_with_its_reason(counted: Any) -> None:
    counts = counted(
        """
        import pytest

        @pytest.mark.xfail(reason="the engine cannot")
        def test_hopeless(): assert False
        """
    )
    assert (counts["failed"], counts["skipped"]) == (0, 1)
    assert list(counts["skips"].values()) == ["the engine cannot"]


def test_a_run_that_dies_is_told_from_one_that_ended(counted: Any) -> None:
    counts = counted("import os\ndef test_killed(): os.kill(os.getpid(), 9)")
    assert not counts["finished"]
