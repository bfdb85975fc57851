"""The rules that are turned off follow the source: their lines and their tests are there.

Whether the tests miss the rules is asked by ``./dev prove mutants``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, Mutant, change, copy_of_the_source
from tests.mutants.mutants import MUTANTS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_source(tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_its_tests_exist(source: Path, mutant: Mutant) -> None:
    file = source / "dstack_shim" / mutant.file
    before = file.read_text("utf-8")
    change(source, mutant)
    after = file.read_text("utf-8")
    file.write_text(before, encoding="utf-8")
    assert after != before
    compile(after, mutant.file, "exec")
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text("utf-8")


def test_names_are_given_once_and_each_has_a_test() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
    assert all(mutant.tests for mutant in MUTANTS)
