"""
A second plugin, for tests only: lets a test ask the server it is loaded into.

It answers on a port of 127.0.0.1 that it writes into the file named by SHIM_RESTART_PROBE_FILE.
Beside dstack it needs only the standard library; it is put on the path, never installed. The same
class serves outside a server too (`python shim_restart_probe.py`), where only the import of dstack's
modules stands for the server.

    POST /check  {port, expected, jobs, instance, copy}   one instance check by dstack's own code
    POST /load   {environment}    make the plugin's class once more, as dstack does
    POST /reload {environment}    take the patches out, then load with this environment
    POST /state  {}               what is patched
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from dstack.plugins import Plugin

CLIENT = "dstack._internal.server.services.runner.client"
CHECKS = (
    "dstack._internal.server.background.tasks.process_instances",
    "dstack._internal.server.background.scheduled_tasks.instances",
    "dstack._internal.server.background.pipeline_tasks.instances.check",
)


class Probe(Plugin):  # type: ignore[misc]  # dstack is untyped where we are checked
    """Starts answering when the server makes it."""

    def __init__(self) -> None:
        super().__init__()
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = Path(os.environ["SHIM_RESTART_PROBE_FILE"])
        fresh = file.with_suffix(".new")
        fresh.write_text(str(server.server_port), encoding="ascii")
        fresh.rename(file)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            answer: dict[str, Any] = {"answer": ANSWERS[self.path](question)}
        except Exception as error:  # noqa: BLE001  the test shall read it, not the server's log
            answer = {"raised": f"{type(error).__name__}: {error}"}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: the server's log is being read."""


def check(question: dict[str, Any]) -> dict[str, Any]:
    """Run dstack's own instance check without its tunnel, against a shim at a local port."""
    module: Any = check_modules()[question["copy"]]
    # What the server expects is its release; a row wants it to be what its shim has installed,
    # because up to 0.22.0 any difference leads to an install instead of a decision.
    stock = module.get_dstack_shim_version
    if question["expected"] is not None:
        module.get_dstack_shim_version = lambda: question["expected"]
    try:
        result = module._check_instance_inner.__wrapped__(
            {module.DSTACK_SHIM_HTTP_PORT: question["port"]},
            instance=stand_in(question["instance"], question["jobs"]),
        )
    except Exception as error:  # noqa: BLE001  dstack's own, up to 0.21.x: an answer like others
        return {"raised": type(error).__name__}
    finally:
        module.get_dstack_shim_version = stock
    return {"reachable": result.reachable, "message": result.message}


def stand_in(name: str, jobs: list[str]) -> SimpleNamespace:
    """What the check reads of an instance; its jobs are those that are not dangling."""
    return SimpleNamespace(
        id=f"id-{name}",
        name=name,
        jobs=[SimpleNamespace(id=job) for job in jobs],
        job_provisioning_data=None,
    )


def load(question: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(question["environment"])
    plugin = importlib.import_module("dstack_shim_server.plugin").ShimRestartPlugin()
    return {"active": plugin.active, "summary": plugin.summary}


def reload(question: dict[str, Any]) -> dict[str, Any]:
    for holder, attribute, function in patchable():
        setattr(holder, attribute, getattr(function, "__wrapped__", function))
    for name in [name for name in os.environ if name.startswith("DSTACK_SHIM_RESTART_")]:
        del os.environ[name]
    return load(question)


def state(_: dict[str, Any]) -> dict[str, Any]:
    return {
        "patched": [attribute for _, attribute, f in patchable() if hasattr(f, "__wrapped__")],
        "functions": {f"{h.__name__}.{a}": id(f) for h, a, f in patchable()},
        "copies": len(check_modules()),
    }


def patchable() -> list[tuple[Any, str, Any]]:
    client = importlib.import_module(CLIENT).ShimClient
    names = ("_request", "_get_restart_safe_task_statuses", "is_safe_to_restart", "shutdown")
    places = [(client, name) for name in names]
    of_check = (
        "_maybe_install_components",
        "get_dstack_shim_version",
        "get_dstack_shim_download_url",
    )
    places += [(module, name) for module in check_modules() for name in of_check]
    return [(holder, name, getattr(holder, name)) for holder, name in places]


def check_modules() -> list[ModuleType]:
    found = []
    for name in CHECKS:
        try:
            found.append(importlib.import_module(name))
        except ImportError:
            continue
    return found


ANSWERS = {"/check": check, "/load": load, "/reload": reload, "/state": state}


if __name__ == "__main__":
    import logging

    logging.basicConfig(level="DEBUG", stream=sys.stdout, format="%(levelname)s %(message)s")
    logging.getLogger("dstack").setLevel("DEBUG")
    load({"environment": {}})
    Probe()
    sys.stdin.read()
