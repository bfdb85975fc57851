from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version

from dstack_shim_server import shapes
from dstack_shim_server.errors import NotPatchable
from dstack_shim_server.shapes import Shape, digest_of, digest_of_node, look_at_server
from tests.server_ext.servers import SOURCES, Server, fresh


def digest(source: str) -> str:
    return digest_of_node(ast.parse(textwrap.dedent(source)).body[0])


PLAIN = """
    def f(a, *, b=1):
        if a:
            return [a, b]
        return None
"""

SAME = {
    "a comment": """
        def f(a, *, b=1):  # comment
            # another
            if a:
                return [a, b]
            return None
    """,
    "layout": """
        def f(
            a,
            *,
            b = 1,
        ):

            if (a): return [
                a, b,
            ]
            return None
    """,
    "a docstring": '''
        def f(a, *, b=1):
            """Says something."""
            if a:
                return [a, b]
            return None
    ''',
}

OTHER = {
    "another default": PLAIN.replace("b=1", "b=2"),
    "a missing default": PLAIN.replace("b=1", "b"),
    "another order": PLAIN.replace("[a, b]", "[b, a]"),
    "a negation": PLAIN.replace("if a", "if not a"),
    "a decorator": "    @g\n" + PLAIN.lstrip("\n"),
    "an annotation": PLAIN.replace("f(a,", "f(a: int,"),
    "another name": PLAIN.replace("def f", "def g"),
    "a missing line": PLAIN.replace("        return None\n", ""),
    "an async def": PLAIN.replace("def f", "async def f"),
    "a value of another type": PLAIN.replace("b=1", "b=True"),
    "a string after the first statement": PLAIN.replace("return None", "'x'"),
    "an empty string among values": PLAIN.replace("return None", "return {1: '', 2: a}"),
    "no empty string among values": PLAIN.replace("return None", "return {1: a, 2: a}"),
}


@pytest.mark.parametrize("change", SAME)
def test_what_says_the_same_has_the_same_digest(change: str) -> None:
    assert digest(SAME[change]) == digest(PLAIN)


@pytest.mark.parametrize("change", OTHER)
def test_what_says_something_else_has_another_digest(change: str) -> None:
    assert digest(OTHER[change]) != digest(PLAIN)


def test_all_those_other_digests_differ_from_each_other() -> None:
    assert len({digest(source) for source in OTHER.values()}) == len(OTHER)


def test_a_digest_is_the_same_on_every_python() -> None:
    source = """
        @decorate(1, key="a")
        async def everything(a, /, b: "int" = -1, *rest: str, c: bool = True, **more) -> None:
            "Documented."
            with open(a) as x, y:
                ...
            try:
                total = [i async for i in b if i] + [*rest] or {**more, "k": f"{a!r:>{b}} x"}
            except (OSError, ValueError) as error:
                raise KeyError(b"x") from error
            else:
                del total[1:2, ...]
            finally:
                await a.b(*rest, **more)
            while (n := 10.5) and not 1 < n <= 3j:
                lambda q, *, w=None: (yield q)
            match a:
                case {"k": [1, *_]} | None:
                    pass
                case Point(x=0) as p if p:
                    return
            assert a is not b, "why"
    """
    # Computed on 3.11; this very test runs on 3.10, 3.12 and 3.13 too.
    assert digest(source) == "6bee7c24fbc90c30236114d52705c316450c2cb4faab17992f4ac768497aed20"


def test_a_loaded_function_has_the_digest_of_its_source() -> None:
    module = fresh("client")
    tree = ast.parse((SOURCES / "client.py").read_text("utf-8"))
    (cls,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ShimClient"]
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            assert digest_of(getattr(module.ShimClient, node.name)) == digest_of_node(node)


def original() -> None:
    """Be wrapped."""


@functools.wraps(original)
def wrapper() -> int:
    return 1


def test_a_decorated_functions_digest_is_the_wrappers_not_the_originals() -> None:
    assert shapes.UNREADABLE != digest_of(wrapper) != digest_of(original)


def test_a_function_made_inside_another_is_unreadable() -> None:
    def inner() -> None:
        """Be nobody's method."""

    assert digest_of(inner) == shapes.UNREADABLE


def test_a_function_without_source_is_unreadable() -> None:
    namespace: dict[str, Any] = {}
    exec("def f(): pass", namespace)
    assert digest_of(namespace["f"]) == shapes.UNREADABLE


def test_a_function_whose_file_is_no_longer_python_is_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "replaced.py"
    file.write_text("def f(:\n")
    namespace: dict[str, Any] = {}
    exec(compile("def f(): pass", str(file), "exec"), namespace)
    assert digest_of(namespace["f"]) == shapes.UNREADABLE


@pytest.mark.parametrize("what", [len, functools.partial(print), str.join])
def test_what_is_not_a_python_function_is_unreadable(what: Callable[..., Any]) -> None:
    assert digest_of(what) == shapes.UNREADABLE


def test_two_functions_of_one_name_on_one_line_are_unreadable() -> None:
    pick = [lambda: 1, lambda: 2]
    assert digest_of(pick[0]) == shapes.UNREADABLE


# The table ---------------------------------------------------------------------------------------


def test_every_release_is_in_the_table_once() -> None:
    releases = [release for shape in shapes.known_shapes() for release in shape.releases]
    assert len(releases) == len(set(releases))
    assert [Version(r) for r in releases] == sorted(Version(r) for r in releases)


@pytest.mark.parametrize(
    "release", ["0.20.1", "0.20.29", "0.21.2", "0.21.3", "0.21.5", "0.22.0", "0.22.5"]
)
def test_the_releases_asked_for_are_in_the_table(release: str) -> None:
    assert any(release in shape.releases for shape in shapes.known_shapes())


def test_releases_without_a_decision_are_not_in_the_table() -> None:
    assert not any("0.20.0" in shape.releases for shape in shapes.known_shapes())


def test_every_shape_is_complete_and_no_two_are_equal() -> None:
    table = shapes.known_shapes()
    for shape in table:
        names = {name.rpartition(".")[2] for name in shape.functions}
        assert names >= set(shapes.CLIENT_FUNCTIONS)
        assert any(name.endswith(f":{shapes.INSTALL}") for name in shape.functions)
        assert shapes.UNREADABLE not in shape.functions.values()
    assert len({frozenset(shape.functions.items()) for shape in table}) == len(table)


def test_a_shape_is_called_by_its_first_and_last_release() -> None:
    assert str(Shape(("1", "2", "3"), {})) == "1 to 3"
    assert str(Shape(("1",), {})) == "1"


# Looking at a server -----------------------------------------------------------------------------


def knows(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    places = look_at_server(server.import_module).places
    shape = Shape(("9.9.9",), {name: place.digest for name, place in places.items()})
    monkeypatch.setattr(shapes, "known_shapes", lambda: (shape,))


def test_a_server_is_known_by_the_source_of_what_is_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knows(monkeypatch, Server())
    shape = look_at_server(Server().import_module).shape
    assert shape is not None
    assert str(shape) == "9.9.9"


def test_a_server_that_looks_like_none_is_unknown() -> None:
    assert look_at_server(Server().import_module).shape is None


def test_a_server_some_other_plugin_patched_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    knows(monkeypatch, server)
    original = server.client.ShimClient._request

    @functools.wraps(original)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    server.client.ShimClient._request = theirs
    assert look_at_server(server.import_module).shape is None


def test_a_second_copy_of_the_instance_check_makes_another_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    knows(monkeypatch, server)
    server.modules[shapes.CHECK_MODULES[1]] = fresh("check")
    looked_at = look_at_server(server.import_module)
    assert looked_at.shape is None
    assert len(looked_at.places) == 6


@pytest.mark.parametrize("missing", shapes.CLIENT_FUNCTIONS)
def test_a_server_without_a_restart_decision_is_not_patchable(missing: str) -> None:
    server = Server()
    delattr(server.client.ShimClient, missing)
    with pytest.raises(NotPatchable, match=f"no restart decision.*{missing} is missing"):
        look_at_server(server.import_module)


def test_a_server_without_the_client_class_is_not_patchable() -> None:
    server = Server()
    server.modules[shapes.CLIENT_MODULE] = ModuleType("empty")
    with pytest.raises(NotPatchable, match="no restart decision"):
        look_at_server(server.import_module)


def test_a_server_that_cannot_be_imported_is_not_patchable() -> None:
    server = Server()
    del server.modules[shapes.CLIENT_MODULE]
    with pytest.raises(NotPatchable, match="cannot be imported"):
        look_at_server(server.import_module)


def test_a_check_module_without_the_install_function_is_no_place() -> None:
    server = Server()
    del server.check._maybe_install_components
    assert len(look_at_server(server.import_module).places) == 4


def test_an_unknown_server_that_would_not_ask_the_gate_is_not_workable() -> None:
    server = Server()
    server.client.ShimClient.is_safe_to_restart = lambda self: True
    with pytest.raises(NotPatchable, match="does not ask"):
        shapes.require_workable(look_at_server(server.import_module))


def test_an_unknown_server_whose_decision_is_no_function_is_not_workable() -> None:
    server = Server()
    server.client.ShimClient.is_safe_to_restart = functools.partial(bool)
    with pytest.raises(NotPatchable, match="does not ask"):
        shapes.require_workable(look_at_server(server.import_module))
