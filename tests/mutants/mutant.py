"""One rule turned off: a line of the shim changed in a copy of its source, and tests run on that.

The copy is put before everything else on Python's path; the tests are the ones of this tree. A
mutant is *caught* if every test that is named for it fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "shim" / "dstack_shim", ROOT / "contracts" / "dstack_shim_contracts")
LIMIT = 600.0
"""Seconds for the tests of one mutant."""
_IN_THE_SANDBOX = ("tests/crash/",)
_FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)


@attrs.frozen
class Mutant:
    """``old`` stands exactly once in ``file`` (below ``shim/dstack_shim``) and becomes ``new``.

    ``rule`` says in words what is off; ``tests`` must fail by it, each of them.
    """

    name: str
    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def copy_of_the_source(folder: Path) -> Path:
    """A copy of the packages that are imported by the tests, to be put on the path."""
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, folder / package.name, ignore=no_caches)
    return folder


def change(source: Path, mutant: Mutant) -> None:
    """Make the change in the copy.

    Raises ``ValueError`` if the line is not there (any more): the list must follow the source.
    """
    file = source / "dstack_shim" / mutant.file
    text = file.read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.file} has its line {text.count(mutant.old)} times"
        )
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def failing(source: Path, tests: Sequence[str]) -> set[str]:
    """Which of the tests fail when run on that source; parametrized ones by their plain names.

    Raises ``RuntimeError`` if they could not be run at all.
    """
    with_engine = [test for test in tests if test.startswith(_IN_THE_SANDBOX)]
    without = [test for test in tests if test not in with_engine]
    failed = _failing(source, without, []) if without else set()
    if with_engine:
        failed |= _failing(source, with_engine, ["tests/lab/sandbox"])
    return failed


def _failing(source: Path, tests: Sequence[str], before: Sequence[str]) -> set[str]:
    environment = {name: word for name, word in os.environ.items() if "DSTACK_SHIM" not in name}
    environment |= {"PYTHONPATH": str(source), "DSTACK_SHIM_FILE": str(_program(source))}
    # Wide, so that the name of a failing test is never cut.
    words = ["-m", "pytest", "-q", "--no-header", "--tb=no", "-rf", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*before, sys.executable, *words, *tests],
        cwd=ROOT,
        env={**environment, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return {name.partition("[")[0] for name in _FAILED.findall(done.stdout)}


def _program(source: Path) -> Path:
    """What starts the shim of that source, where tests start one."""
    program = source / "dstack-shim"
    python = f'PYTHONPATH="{source}" exec "{sys.executable}"'
    program.write_text(f'#!/bin/sh\n{python} -m dstack_shim "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program
