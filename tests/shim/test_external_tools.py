"""Programs of the host are started in three modules, without a shell, and never without a limit.

What each tool's failure says to the user is tested where the tool is used; this is about there
being no other way to start one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dstack_shim

PACKAGE = Path(dstack_shim.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAY_START = {
    "host/commands.py",  # every tool that runs to its end: `timeout` has no default there
    "host/companion.py",  # the exporter, which lives as long as the shim
    "host/dcgm_health.py",  # this program again, so that libdcgm cannot take the shim down
}
STARTS = {
    *("subprocess.Popen", "subprocess.run", "subprocess.call"),
    *("subprocess.check_call", "subprocess.check_output"),
    *("asyncio.create_subprocess_exec", "os.posix_spawn", "os.posix_spawnp", "os.fork"),
}
SHELLS = {
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    "asyncio.create_subprocess_shell",
}


def calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    """Each call in it, with the dotted name of what is called."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_program_is_started_elsewhere_nor_by_a_shell(file: Path) -> None:
    made = list(calls(file))
    assert not [name for name, _ in made if name in SHELLS or name.startswith("os.spawn")]
    assert not [name for name, call in made if any(word.arg == "shell" for word in call.keywords)]
    if str(file.relative_to(PACKAGE)) not in MAY_START:
        assert not [name for name, _ in made if name in STARTS]


def test_the_modules_that_start_programs_are_known() -> None:
    start = {
        str(file.relative_to(PACKAGE))
        for file in FILES
        if any(name in STARTS for name, _ in calls(file))
    }
    assert start == MAY_START


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_program_is_imported_past_these_names(file: Path) -> None:
    """`from subprocess import run` would hide a call from the two tests above."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.module not in {"subprocess", "os", "pty"}
