"""Every rule that is turned off is missed by somebody; the same tests are green with it on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.evidence import Evidence
from tests.mutants.mutant import Mutant, change, copy_of_the_source, failing
from tests.mutants.mutants import MUTANTS

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def caught(evidence: Evidence) -> Iterator[dict[str, list[str]]]:
    """Rule turned off → the tests that failed by it."""
    caught: dict[str, list[str]] = {}
    yield caught
    rules = {mutant.name: mutant.rule for mutant in MUTANTS if mutant.name in caught}
    evidence.write(
        "mutants",
        mutants=len(caught),
        mutants_missed=sum(not tests for tests in caught.values()),
        off=rules,
        caught_by=caught,
    )


def test_nothing_fails_while_every_rule_is_on(tmp_path: Path) -> None:
    tests = dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests)
    assert failing(copy_of_the_source(tmp_path / "control"), list(tests)) == set()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_rule_turned_off_makes_its_tests_fail(
    tmp_path: Path, mutant: Mutant, caught: dict[str, list[str]]
) -> None:
    source = copy_of_the_source(tmp_path / "mutant")
    change(source, mutant)
    failed = failing(source, mutant.tests)
    caught[mutant.name] = sorted(failed)
    assert failed == set(mutant.tests)
