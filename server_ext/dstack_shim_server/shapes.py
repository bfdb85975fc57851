"""
Which server this is, judged by its code and not by its number.

The functions we take over are private to dstack, so a release counts as known only if the source of
each of them is what we have read and tested: `known_shapes.json` holds their digests for every
release from 0.20.1 on (`tools/known_shapes.py` writes it). Another plugin's patch on one of them
changes its digest too, and then we stay away.
"""

import ast
import hashlib
import importlib
import importlib.resources
import json
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any

import attrs

from dstack_shim_server.errors import NotPatchable

CLIENT_MODULE = "dstack._internal.server.services.runner.client"
CLIENT_CLASS = "ShimClient"
# The requests that matter all go through `_request`; then the decision, and what follows from it.
REQUEST = "_request"
SAFE_STATUSES = "_get_restart_safe_task_statuses"
IS_SAFE = "is_safe_to_restart"
SHUTDOWN = "shutdown"
CLIENT_FUNCTIONS = (REQUEST, SAFE_STATUSES, IS_SAFE, SHUTDOWN)

# The instance check has moved twice, and 0.20.13 to 0.20.16 carry two copies of it.
CHECK_MODULES = (
    "dstack._internal.server.background.tasks.process_instances",
    "dstack._internal.server.background.scheduled_tasks.instances",
    "dstack._internal.server.background.pipeline_tasks.instances.check",
)
INSTALL = "_maybe_install_components"
# Which shim and from where: imported by the check's module, so replaced there for the check alone.
WANTED_VERSION = "get_dstack_shim_version"
DOWNLOAD_URL = "get_dstack_shim_download_url"

# Never equal to a digest: the source cannot be read.
UNREADABLE = "unreadable"

ImportModule = Callable[[str], ModuleType]


@attrs.frozen
class Place:
    """One function of the server: where it hangs and what its source amounts to."""

    holder: Any = attrs.field(repr=False)  # the class or module
    attribute: str
    function: Callable[..., Any] = attrs.field(repr=False)
    digest: str


@attrs.frozen
class Shape:
    """The decision code of some releases: digest by full name, and the releases that have it."""

    releases: tuple[str, ...]
    functions: Mapping[str, str]

    def __str__(self) -> str:
        first, last = self.releases[0], self.releases[-1]
        return first if first == last else f"{first} to {last}"


@attrs.frozen
class Server:
    """The server we run in: its patchable functions by full name, and its shape if known."""

    places: Mapping[str, Place]
    shape: Shape | None
    # Called by the code that was recognised, and replaced whatever they are: they only answer.
    answers: Mapping[str, Place] = attrs.Factory(dict)


def look_at_server(import_module: ImportModule = importlib.import_module) -> Server:
    """
    Find the functions we would patch and compare them with the known releases.

    Raises NotPatchable if the server has no restart decision at all (0.20.0 and before).
    """
    places = _client_places(import_module)
    answers: dict[str, Place] = {}
    for name in CHECK_MODULES:
        found = _check_places(name, import_module)
        places.update(found)
        if found:
            answers.update(_answer_places(name, import_module))
    observed = {name: place.digest for name, place in places.items()}
    shape = next((s for s in known_shapes() if dict(s.functions) == observed), None)
    return Server(places=places, shape=shape, answers=answers)


def known_shapes() -> Sequence[Shape]:
    """Return the table of known releases, oldest first."""
    text = importlib.resources.files(__package__).joinpath("known_shapes.json").read_text("utf-8")
    return tuple(
        Shape(releases=tuple(entry["releases"]), functions=entry["functions"])
        for entry in json.loads(text)["shapes"]
    )


def require_workable(server: Server) -> None:
    """
    Check of an unknown server that patching it would have the effect we promise.

    Raises NotPatchable if its `is_safe_to_restart` does not ask for the restart-safe statuses:
    the gate would then be installed and never consulted.
    """
    code = _code_of(server.places[f"{CLIENT_MODULE}:{CLIENT_CLASS}.{IS_SAFE}"].function)
    if code is None or SAFE_STATUSES not in code.co_names:
        raise NotPatchable(f"its {CLIENT_CLASS}.{IS_SAFE} does not ask {SAFE_STATUSES}")


def _client_places(import_module: ImportModule) -> dict[str, Place]:
    try:
        client = getattr(import_module(CLIENT_MODULE), CLIENT_CLASS, None)
    except ImportError as exception:
        raise NotPatchable(f"{CLIENT_MODULE} cannot be imported ({exception})") from exception
    found: dict[str, Place] = {}
    for attribute in CLIENT_FUNCTIONS:
        function = getattr(client, attribute, None)
        if not callable(function):
            raise NotPatchable(
                f"it has no restart decision ({CLIENT_CLASS}.{attribute} is missing)"
            )
        name = f"{CLIENT_MODULE}:{CLIENT_CLASS}.{attribute}"
        found[name] = Place(client, attribute, function, digest_of(function))
    return found


def _check_places(name: str, import_module: ImportModule) -> dict[str, Place]:
    try:
        module = import_module(name)
    except ImportError:
        return {}
    function = getattr(module, INSTALL, None)
    if not callable(function):
        return {}
    return {f"{name}:{INSTALL}": Place(module, INSTALL, function, digest_of(function))}


def _answer_places(name: str, import_module: ImportModule) -> dict[str, Place]:
    module = import_module(name)
    found = ((name, getattr(module, name, None)) for name in (WANTED_VERSION, DOWNLOAD_URL))
    return {
        f"{name}:{attribute}": Place(module, attribute, function, "")
        for attribute, function in found
        if callable(function)
    }


# Digests ---------------------------------------------------------------------------------------


def digest_of(function: Callable[..., Any]) -> str:
    """Return the digest of a loaded function's source, or UNREADABLE."""
    code = _code_of(function)
    if code is None:
        return UNREADABLE
    # By the code's own file and line: `inspect` follows `__wrapped__` and would show us the
    # original below somebody else's patch.
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return UNREADABLE
    nodes = [node for node in _functions(tree.body) if _is_source_of(node, code)]
    return digest_of_node(nodes[0]) if len(nodes) == 1 else UNREADABLE


def digest_of_node(node: ast.AST) -> str:
    """Digest a function by its meaning: comments, layout, docstrings and Python's version aside."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _functions(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a module and of its classes: those inside functions are not patched."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _is_source_of(node: ast.FunctionDef | ast.AsyncFunctionDef, code: CodeType) -> bool:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return node.name == code.co_name and first == code.co_firstlineno


# `ast.dump` and `ast.unparse` differ between Python versions; the trees themselves, for the syntax
# of 3.10, do not, once fields that are empty (new ones are) or only hints are left out.
_HINTS = frozenset({"ctx", "kind", "type_comment", "type_params"})


def _canonical(value: object) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [
        f"{name}={_canonical(_relevant(value, name, field))}"
        for name, field in ast.iter_fields(value)
        if name not in _HINTS and field != [] and (field is not None or name == "value")
    ]
    return f"{type(value).__name__}({','.join(fields)})"


def _relevant(node: ast.AST, name: str, field: object) -> object:
    """Leave out a docstring, and the empty strings 3.12.1 sees in the format of an f-string."""
    match field:
        case [ast.Expr(value=ast.Constant(value=str())), *rest] if name == "body":
            return rest
        case [*parts] if isinstance(node, ast.JoinedStr):
            return [part for part in parts if getattr(part, "value", None) != ""]
    return field
