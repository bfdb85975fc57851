"""
Whatever fails in our code, dstack's code sees none of it.

Each function of ours is made to raise, one at a time: while the plugin loads, and while a loaded
plugin is asked, with a record and without. Left out are only the wall itself, the one line in which
the record's thread goes through it, and the functions that stand in for dstack's, which call nothing
of ours except through the wall.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import pkgutil
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dstack_shim_contracts import gate

import dstack_shim_server
from dstack_shim_server import activation, guard
from dstack_shim_server.record import worker
from dstack_shim_server.record.recorder import Recorder
from tests.eventually import eventually
from tests.server_ext import databases, records
from tests.server_ext.servers import ALLOW, Server, answers

# Not in the server: the command line, and the entry point that the last tests are about. Alembic
# runs its folder itself.
ELSEWHERE = ("dstack_shim_server.fleet", "dstack_shim_server.plugin")
MIGRATIONS = "dstack_shim_server.record.migrations"


def modules_of_ours() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(dstack_shim_server.__path__, "dstack_shim_server."):
        if not found.name.startswith((*ELSEWHERE, MIGRATIONS)):
            yield importlib.import_module(found.name)


OURS = tuple(modules_of_ours())
SAFE = answers("0.22.4", "0.22.5", "running")
UNSAFE = answers("0.22.5", "0.21.2", "running")
IDLE = answers("0.22.5", "0.21.2", "terminated")


def functions_of(module: ModuleType) -> Iterator[tuple[Any, str]]:
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield module, name
        if inspect.isclass(value):
            for attribute, member in vars(value).items():
                written = inspect.isfunction(member) and not attribute.startswith("__")
                if written or attribute in {"__init__", "__str__"}:
                    yield value, attribute


WALLS = {(guard, "shielded"), (worker.Worker, "_run"), (worker, "_handed_in_last")}
FUNCTIONS = [
    pytest.param(holder, name, id=f"{holder.__name__.rpartition('.')[2]}.{name}")
    for module in OURS
    for holder, name in functions_of(module)
    if (holder, name) not in WALLS
]
FUNCTIONS += [
    pytest.param(gate, "decide", id="contracts.decide"),
    pytest.param(gate, "may_restart", id="contracts.may_restart"),
]


def test_all_our_functions_are_tried() -> None:
    assert len(FUNCTIONS) > 200
    names = {"decide", "judge", "answered", "note", "load", "_report", "claim", "rule", "examine"}
    assert names <= {parameter.values[1] for parameter in FUNCTIONS}


@functools.cache
def loaded(mode: str, *, running_is_safe: bool = True) -> Server:
    """A server with the plugin; loading takes longer than all checks of a test together."""
    server = Server(running_is_safe=running_is_safe)
    activation.load({**ALLOW, "DSTACK_SHIM_RESTART_MODE": mode}, server.import_module)
    return server


def break_it(patch: pytest.MonkeyPatch, holder: Any, name: str) -> None:
    """Make a function raise wherever one of our modules knows it by name."""
    original = getattr(holder, name)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("ours")

    patch.setattr(holder, name, broken)
    for module in OURS:
        for known_as, value in list(vars(module).items()):
            if value is original:
                patch.setattr(module, known_as, broken)


@pytest.mark.parametrize(("holder", "name"), FUNCTIONS)
def test_a_fault_while_asked_is_never_seen_and_never_unsafe(
    holder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforcing, observing = loaded("enforce"), loaded("observe")
    observing_old = loaded("observe", running_is_safe=False)
    stock = loaded("off")
    break_it(monkeypatch, holder, name)
    # Stricter than dstack, never laxer: a restart that is safe may be put off, the other is not made.
    enforcing.restarts(SAFE)
    assert not enforcing.restarts(UNSAFE)
    assert enforcing.restarts(IDLE)
    # Observing, a fault changes nothing at all.
    assert observing.restarts(SAFE)
    assert observing.restarts(UNSAFE)
    assert not observing_old.restarts(SAFE)
    # And nothing is asked twice because the first time failed.
    client, plain = enforcing.shim(IDLE), stock.shim(IDLE)
    enforcing.check_instance(client)
    stock.check_instance(plain)
    assert client.requests == plain.requests


# With a record -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with our tables: making them takes longer than a test."""
    folder = tmp_path_factory.mktemp("template")
    records.recorder(databases.make_sqlite(folder)).stop()
    return folder / "sqlite.db"


@pytest.fixture
def recording(template: Path, tmp_path: Path) -> dict[str, str]:
    file = shutil.copy(template, tmp_path / "sqlite.db")
    return {
        "DSTACK_DATABASE_URL": f"sqlite+aiosqlite:///{file}",
        "DSTACK_SHIM_RESTART_UNKNOWN": "allow",
        "DSTACK_SHIM_RESTART_CANARIES": "0",
    }


@pytest.mark.one_python
@pytest.mark.parametrize(("holder", "name"), FUNCTIONS)
def test_a_fault_with_a_record_is_never_seen_and_never_unsafe(
    holder: Any,
    name: str,
    recording: dict[str, str],
    records_end_with_the_test: list[Recorder],
) -> None:
    server = Server()
    activation.load(recording, server.import_module)
    (keeper,) = records_end_with_the_test
    eventually(lambda: not keeper.trouble)
    names = (f"box {number}" for number in itertools.count())
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch, holder, name)
        server.restarts(SAFE, next(names))
        assert not server.restarts(UNSAFE, next(names))
        assert server.restarts(IDLE, next(names))
        for documents in (SAFE, UNSAFE, IDLE):
            client = server.shim({**documents, "/api/shutdown": (200, {})})
            server.check_instance(client, next(names))
            assert client.requests[:5] == [
                *("GET /api/healthcheck", "GET /api/tasks", "GET /api/components"),
                *client.requests[3:5],
            ]


@pytest.mark.parametrize(("holder", "name"), FUNCTIONS)
def test_a_fault_while_loading_leaves_dstack_as_it_was_or_whole(
    holder: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    dstack_plugins: ModuleType,
) -> None:
    server = Server()
    before = server.functions()
    plugin = importlib.import_module("dstack_shim_server.plugin")
    real_load = activation.load
    monkeypatch.setattr(
        activation, "load", lambda environment: real_load(environment, server.import_module)
    )
    monkeypatch.setenv("DSTACK_SHIM_RESTART_UNKNOWN", "allow")
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch, holder, name)
        made = plugin.ShimRestartPlugin()
    changed = [a is not b for a, b in zip(before, server.functions(), strict=True)]
    assert all(changed) if made.active else not any(changed)


@pytest.mark.parametrize("path", list(SAFE))
@pytest.mark.parametrize("failure", [OSError("theirs"), 500])
def test_dstacks_own_exceptions_pass_unchanged(path: str, failure: Any) -> None:
    documents = {**SAFE, path: failure}
    raised = []
    for environment in ({"DSTACK_SHIM_RESTART_MODE": "off"}, ALLOW):
        server = Server()
        activation.load(environment, server.import_module)
        client = server.shim(documents)
        with pytest.raises(OSError) as caught:  # noqa: PT011  compared with the other below
            server.check_instance(client)
        raised.append((type(caught.value), str(caught.value), client.requests))
    assert raised[0] == raised[1]


# The entry point ---------------------------------------------------------------------------------


@pytest.fixture
def dstack_plugins(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As much of dstack's public plugin module as the entry point imports."""
    package, module = ModuleType("dstack"), ModuleType("dstack.plugins")
    vars(module)["Plugin"] = type("Plugin", (), {})
    monkeypatch.setitem(sys.modules, "dstack", package)
    monkeypatch.setitem(sys.modules, "dstack.plugins", module)
    monkeypatch.delitem(sys.modules, "dstack_shim_server.plugin", raising=False)
    return module


def test_the_entry_point_says_inactive_where_there_is_no_server(
    dstack_plugins: ModuleType,
) -> None:
    plugin = importlib.import_module("dstack_shim_server.plugin").ShimRestartPlugin()
    assert not plugin.active
    assert "cannot be imported" in plugin.summary


def test_the_entry_point_is_a_plugin_without_policies(dstack_plugins: ModuleType) -> None:
    plugin_class = importlib.import_module("dstack_shim_server.plugin").ShimRestartPlugin
    assert issubclass(plugin_class, dstack_plugins.Plugin)
    assert "get_apply_policies" not in vars(plugin_class)


def test_a_dependency_that_cannot_be_imported_does_not_stop_the_server(
    dstack_plugins: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin_class = importlib.import_module("dstack_shim_server.plugin").ShimRestartPlugin
    monkeypatch.setitem(sys.modules, "dstack_shim_server.activation", None)
    plugin = plugin_class()
    assert not plugin.active
    assert plugin.summary.startswith("inactive: ModuleNotFoundError")
    assert "dstack is as it was" in caplog.text


def test_the_entry_point_imports_nothing_else_of_ours_or_dstacks(
    dstack_plugins: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("dstack_shim")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("dstack_shim_server.plugin")
    loaded = {name for name in sys.modules if name.startswith("dstack")}
    assert loaded == {
        "dstack",
        "dstack.plugins",
        "dstack_shim_server",
        "dstack_shim_server.plugin",
    }
