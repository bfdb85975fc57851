"""Layers point one way: who may import whom, read from the sources themselves.

A room is a top module or package of a distribution. A room that is not in the order yet fails
here: give it its place, below everybody who needs it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python  # sources are read, not run

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "dstack_shim_contracts": ROOT / "contracts/dstack_shim_contracts",
    "dstack_shim": ROOT / "shim/dstack_shim",
    "dstack_shim_server": ROOT / "server_ext/dstack_shim_server",
}
OTHERS_SEEN = {  # the packages of ours that each may import
    "dstack_shim_contracts": set[str](),
    "dstack_shim": {"dstack_shim_contracts"},
    "dstack_shim_server": {"dstack_shim_contracts"},
}
# From the ground up: a room imports only rooms before it.
ORDER = (
    *("errors", "build", "clock", "cancelling", "log", "timing", "records", "staged"),
    *("commands", "settings", "home", "host", "store", "resources", "engine", "tasks", "boots"),
    *("installed", "download", "components", "recipe", "instance", "wiring"),
    *(
        "obstacles",
        "shim_files",
        "takeover",
        "upgrade_rules",
        "upgrade_state",
        "preflight",
        "upgrade",
        "departure",
    ),
    *("metrics", "doctor", "check", "api", "daemon", "console", "cli", "__main__"),
)
# What only some rooms may know of the world outside.
ONLY_IN = {
    "docker": {"dstack_shim.engine"},
    "requests": {"dstack_shim.engine", "dstack_shim.download", "dstack_shim.host.dcgm_exporter"},
    "urllib3": {"dstack_shim.engine", "dstack_shim.download"},
    "starlette": {"dstack_shim.api"},
    "uvicorn": {"dstack_shim.api"},
    "httpx": {"dstack_shim_contracts.client", "dstack_shim.console"},
    "rich": {"dstack_shim.console", "dstack_shim_server.fleet"},
    "subprocess": {"dstack_shim.host"},
}
# What the console, which is for people and only looks, must not know of the shim.
NOT_FOR_THE_CONSOLE = {"api", "daemon", "components", "wiring"}
# Of the engine, the core knows the words, never the connection.
CORE_SEES_OF_ENGINE = {"dstack_shim.engine.protocol", "dstack_shim.engine.container"}
PURE = ("outcomes", "recovery", "task")
IO = {"asyncio", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile", "threading"}


def modules() -> list[tuple[str, Path]]:
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found.append((".".join([package, *parts]).removesuffix(".__init__"), path))
    return found


MODULES = modules()
NAMES = {name for name, _ in MODULES}


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (
                name if (name := f"{node.module}.{alias.name}") in NAMES else str(node.module)
                for alias in node.names
            )


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


ALL = pytest.mark.parametrize(("name", "path"), [pytest.param(*m, id=m[0]) for m in MODULES])


@ALL
def test_packages_see_only_the_contracts(name: str, path: Path) -> None:
    package = name.split(".", maxsplit=1)[0]
    seen = {module.split(".")[0] for module in imports(path)} & set(PACKAGES)
    assert seen - {package} <= OTHERS_SEEN[package]


@pytest.mark.parametrize(
    ("name", "path"),
    [pytest.param(*m, id=m[0]) for m in MODULES if m[0].startswith("dstack_shim.")],
)
def test_rooms_of_the_shim_look_down_only(name: str, path: Path) -> None:
    own = ORDER.index(room(name))
    for module in imports(path):
        if module.startswith("dstack_shim."):
            assert ORDER.index(room(module)) <= own, f"{name} imports {module}"


@ALL
def test_the_outside_is_known_in_one_room(name: str, path: Path) -> None:
    for module in imports(path):
        rooms = ONLY_IN.get(module.split(".")[0], {name})
        assert any(name == place or name.startswith(f"{place}.") for place in rooms), (
            f"{name} imports {module}"
        )


def test_the_core_knows_of_the_engine_its_words_only() -> None:
    for name, path in MODULES:
        if name.startswith("dstack_shim.tasks."):
            seen = {module for module in imports(path) if module.startswith("dstack_shim.engine")}
            assert seen <= CORE_SEES_OF_ENGINE, name


def test_the_console_knows_no_daemon_and_alone_asks_a_shim() -> None:
    for name, path in MODULES:
        if name.startswith("dstack_shim."):
            seen = set(imports(path))
            if room(name) == "console":
                rooms = {room(module) for module in seen if module.startswith("dstack_shim.")}
                assert not rooms & NOT_FOR_THE_CONSOLE, name
            else:
                assert "dstack_shim_contracts.client" not in seen, name


def test_the_daemon_loads_nothing_of_the_console() -> None:
    """Not even by way of somebody else: what is for people costs it neither time nor memory."""
    look = "import sys, dstack_shim.cli, dstack_shim.daemon; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = done.stdout.split()
    assert "dstack_shim.daemon" in loaded
    strangers = {"rich", "httpx", "httpcore", "dstack_shim.console"}
    assert not strangers & {*loaded, *(module.split(".")[0] for module in loaded)}


@pytest.mark.parametrize("name", PURE)
def test_rules_do_no_io(name: str) -> None:
    path = PACKAGES["dstack_shim"] / "tasks" / f"{name}.py"
    assert {module.split(".")[0] for module in imports(path)} & IO == set()
