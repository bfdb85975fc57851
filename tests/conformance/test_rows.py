"""The suite against itself: the page and the cases fit each other, and nothing of ours leaks in."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conformance.conftest import COLLECTED
from tests.conformance.rows import (
    PAGE,
    ROWS,
    SECTIONS,
    cited_by,
    is_beyond,
    read_rows,
)
from tests.conformance.sample import SAMPLE

HERE = Path(__file__).parent
# Besides the standard library: an HTTP client, an engine client, the runner of tests, and the
# place the suite runs in. Nothing of the shim, and nothing of the contracts.
ALLOWED = {
    "docker",
    "httpx",
    "pytest",
    "tests.conformance",
    "tests.eventually",
    "tests.lab",
}

ABOUT_THE_SUITE = {"test_faults.py", "test_rows.py", "test_watch.py"}


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Every case that was collected with this one; the whole suite must have been."""
    folders = {path.name for path in HERE.glob("test_*.py")}
    collected = request.config.stash[COLLECTED]
    if folders - {item.path.name for item in collected if item.path.parent == HERE}:
        pytest.skip("only a part of the suite was collected")
    return [item for item in collected if cited_by(item)]


def test_every_row_is_cited(cases: list[pytest.Item]) -> None:
    cited = {row.id for item in cases for row in cited_by(item)}
    assert set(ROWS) - cited == set()


def test_every_section_has_a_dozen_cases_and_the_whole_150(cases: list[pytest.Item]) -> None:
    counts = Counter(cited_by(item)[0].section for item in cases)
    assert set(counts) == set(SECTIONS)
    assert min(counts.values()) >= 12
    assert counts.total() >= 150


def test_the_sample_names_cases_of_every_section(cases: list[pytest.Item]) -> None:
    named = {(file, name) for file, names in SAMPLE.items() for name in names}
    chosen = [item for item in cases if _place(item) in named]
    assert {_place(item) for item in chosen} == named
    counts = Counter(cited_by(item)[0].section for item in chosen)
    assert min(counts[letter] for letter in SECTIONS) >= 5


def _place(item: pytest.Item) -> tuple[str, str]:
    return item.path.name, str(getattr(item, "originalname", item.name))


def test_every_case_cites_a_row(request: pytest.FixtureRequest) -> None:
    uncited = [
        item.nodeid
        for item in request.config.stash[COLLECTED]
        if item.path.parent == HERE
        and item.path.name not in ABOUT_THE_SUITE
        and not cited_by(item)
    ]
    assert uncited == []


def test_core_row_is_not_checked_by_beyond_cases_only(cases: list[pytest.Item]) -> None:
    stock = {row.id for item in cases if not is_beyond(cited_by(item)) for row in cited_by(item)}
    core = {row.id for row in ROWS.values() if not row.beyond}
    assert core - stock == set()


def test_page_has_each_id_once_and_counts_without_gaps() -> None:
    rows = read_rows(PAGE.read_text(encoding="utf-8"))
    for letter in SECTIONS:
        # In whatever order: a new row stands where it belongs and keeps its number for ever.
        numbers = sorted(int(id_[1:]) for id_ in rows if id_[0] == letter)
        assert numbers == list(range(1, len(numbers) + 1)), letter
    with pytest.raises(ValueError, match="A1 is on the page twice"):
        read_rows("| A1 | core | x |\n| A1 | core | y |\n")


@pytest.mark.parametrize("file", sorted(HERE.glob("*.py")), ids=lambda file: file.name)
def test_file_imports_nothing_of_the_shim(file: Path) -> None:
    for name in _imports(file):
        top = name.split(".")[0]
        is_allowed = top in sys.stdlib_module_names or any(
            name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED
        )
        assert is_allowed, f"{file.name} imports {name}"


def _imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from tests.lab import images` names the package; what it takes lies below it.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names
