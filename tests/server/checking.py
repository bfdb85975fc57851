"""
As much of a server as checks instances: the plugin, made as a server makes it, and dstack's own
instance check over shims at local ports, round after round until stdin closes.

Run by the Python of a release with the plugin. stdin: one line, {"shims": [{name, port, job}]}.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

CHECK = "dstack._internal.server.background.pipeline_tasks.instances.check"


def main() -> None:
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(levelname)s %(message)s")
    logging.getLogger("dstack").setLevel("INFO")
    shims = json.loads(sys.stdin.readline())["shims"]
    plugin = importlib.import_module("dstack_shim_server.plugin").ShimRestartPlugin()
    assert plugin.active, plugin.summary
    module: Any = importlib.import_module(CHECK)
    # Which CPU an instance has stands in what it was provisioned with; these have not been.
    module._get_instance_cpu_arch = lambda _: None
    module.get_dstack_runner_version = lambda: None
    ended = threading.Event()
    threading.Thread(target=end_with_stdin, args=(ended,), daemon=True).start()
    with ThreadPoolExecutor(4) as pool:
        while not ended.is_set():
            list(pool.map(lambda shim: check(module, shim), shims))
            ended.wait(0.05)


def end_with_stdin(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def check(module: Any, shim: dict[str, Any]) -> None:
    instance = SimpleNamespace(
        id=f"id-{shim['name']}",
        name=shim["name"],
        fleet_id="f1",
        jobs=[SimpleNamespace(id=shim["job"])],
        job_provisioning_data=None,
    )
    addresses = {module.DSTACK_SHIM_HTTP_PORT: shim["port"]}
    result = module._check_instance_inner.__wrapped__(addresses, instance=instance)
    if not result.reachable:
        logging.getLogger("dstack").error("unreachable: %s", result.message)


if __name__ == "__main__":
    main()
