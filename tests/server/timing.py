"""
What dstack's instance check costs without the plugin and with it, over one shim.

Time of the processor in all threads, the record's too: the plugin waits for nothing in a check, and
how long a busy machine lets anybody wait says nothing about it.

Run by the Python of a release with the plugin. Arguments: port of the shim, how many checks of each.
stdout, the last line: {"stock": [seconds], "loaded": [seconds]}.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

CHECK = "dstack._internal.server.background.pipeline_tasks.instances.check"


def main() -> None:
    port, count = int(sys.argv[1]), int(sys.argv[2])
    module: Any = importlib.import_module(CHECK)
    module.get_dstack_shim_version = lambda: "0.22.5"
    instance = SimpleNamespace(
        id="id",
        name="box",
        fleet_id="f1",
        jobs=[SimpleNamespace(id=f"job-{number}") for number in range(8)],
        job_provisioning_data=None,
    )
    rounds = []
    for load in (False, True):
        if load:
            plugin = importlib.import_module("dstack_shim_server.plugin").ShimRestartPlugin()
            assert plugin.active, plugin.summary
        gc.collect()
        rounds.append([timed(module, port, instance) for _ in range(count)])
    sys.stdout.write(json.dumps({"stock": rounds[0], "loaded": rounds[1]}) + "\n")


def timed(module: Any, port: int, instance: Any) -> float:
    began = time.process_time()
    addresses = {module.DSTACK_SHIM_HTTP_PORT: port}
    result = module._check_instance_inner.__wrapped__(addresses, instance=instance)
    took = time.process_time() - began
    assert result.reachable, result.message
    return took


if __name__ == "__main__":
    main()
