"""Servers for unit tests: fresh stand-ins of dstack's modules, and checks of one shim in them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from dstack_shim_server import shapes

SOURCES = Path(__file__).with_name("stand_in")
# The gate alone; tests of the record say so by RECORDING.
ALLOW = {"DSTACK_SHIM_RESTART_UNKNOWN": "allow", "DSTACK_SHIM_RESTART_RECORD": "off"}


class Server:
    """dstack as far as the plugin touches it; ``modules`` is what can be imported of it."""

    def __init__(self, *, running_is_safe: bool = False) -> None:
        self.client = fresh("client")
        self.check = fresh("check")
        if running_is_safe:
            status = self.client.TaskStatus
            self.client.ShimClient.stock = (status.TERMINATED, status.RUNNING)
        self.modules: dict[str, ModuleType] = {
            shapes.CLIENT_MODULE: self.client,
            shapes.CHECK_MODULES[-1]: self.check,
            "dstack.version": version_module("9.9.9"),
            "prometheus_client": fresh("prometheus_client"),
        }

    def import_module(self, name: str) -> ModuleType:
        try:
            return self.modules[name]
        except KeyError:
            raise ModuleNotFoundError(f"No module named {name!r}") from None

    def functions(self) -> list[Any]:
        """What hangs where the plugin patches, to see whether it is still dstack's own."""
        client = self.client.ShimClient
        return [
            *(getattr(client, name) for name in shapes.CLIENT_FUNCTIONS),
            self.check._maybe_install_components,
            self.check.get_dstack_shim_version,
            self.check.get_dstack_shim_download_url,
        ]

    def shim(self, answers: Mapping[str, Any]) -> Any:
        return self.client.ShimClient(answers)

    def restarts(self, answers: Mapping[str, Any], name: str = "box") -> bool:
        """Check an instance once, as dstack does; whether that shut its shim down."""
        client = self.shim(answers)
        self.check_instance(client, name)
        return "POST /api/shutdown" in client.requests

    def check_instance(self, client: Any, name: str = "box", **more: Any) -> None:
        instance = SimpleNamespace(id=f"id of {name}", name=name, **more)
        self.check.check_instance(instance, client)


def fresh(name: str) -> ModuleType:
    """A new copy of a stand-in module: patches of one test are not seen by the next."""
    module = ModuleType(f"stand_in_{name}")
    exec(compiled(name), vars(module))
    return module


@functools.cache
def compiled(name: str) -> CodeType:
    file = SOURCES / f"{name}.py"
    return compile(file.read_text("utf-8"), str(file), "exec")


def version_module(version: str) -> ModuleType:
    module = ModuleType("dstack.version")
    vars(module)["__version__"] = version
    return module


def healthcheck(version: str, **more: object) -> dict[str, object]:
    return {"service": "dstack-shim", "version": version, **more}


def components(version: str, **more: object) -> dict[str, object]:
    shim = {"name": "dstack-shim", "version": version, "status": "installed", **more}
    return {"components": [{"name": "dstack-runner", "version": "1", "status": "installed"}, shim]}


def tasks(statuses: Sequence[str]) -> dict[str, object]:
    return {"tasks": [{"id": f"task-{n}", "status": s} for n, s in enumerate(statuses)]}


def answers(running: str, installed: str, *statuses: str) -> dict[str, Any]:
    """Answers of one of dstack's own shims: versions only, no features."""
    return {
        "/api/healthcheck": healthcheck(running),
        "/api/components": components(installed),
        "/api/tasks": tasks(statuses),
    }
