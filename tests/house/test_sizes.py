"""Short functions, short modules: what nobody can hold in the head at once is cut in two."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.test_layers import MODULES

pytestmark = pytest.mark.one_python  # sources are read, not run

LONGEST_FUNCTION = 50
LONGEST_MODULE = 500
"""Lines, comments and docstrings counted."""

ALL = pytest.mark.parametrize(("name", "path"), [pytest.param(*m, id=m[0]) for m in MODULES])


def lengths(source: str) -> dict[str, int]:
    """Each function, by name and first line → its lines, from its ``def`` to its end."""
    return {
        f"{node.name}:{node.lineno}": (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@ALL
def test_no_function_is_long(name: str, path: Path) -> None:
    found = lengths(path.read_text("utf-8"))
    assert {k: v for k, v in found.items() if v > LONGEST_FUNCTION} == {}, name


@ALL
def test_no_module_is_long(name: str, path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= LONGEST_MODULE, name


def test_the_lines_of_a_function_are_counted() -> None:
    source = "async def a(\n    b,\n):\n    def c(): ...\n\n    return b\n"
    assert lengths(source) == {"a:1": 6, "c:4": 1}
