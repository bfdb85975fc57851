"""Do what a server does at each check of an instance: install a newer component, or restart into it.

    check_components.py PORT VERSION URL CHECKS

The release's own decision and its own client; what is stood in for is where it learns which shim
to expect. Prints the shim's entry as each check saw it.
"""

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

from dstack._internal.server.background.pipeline_tasks.instances import check
from dstack._internal.server.services.runner.client import ShimClient

PATIENCE = 60.0  # seconds for an install, and for a shim that is being replaced


def entry(client: Any) -> Any:
    """The shim's own entry once nothing is being installed, whoever answers."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            found = client.get_components().shim
        except Exception:  # noqa: BLE001 - whatever a client makes of a shim that is away
            found = None
        if found is not None and found.status.value != "installing":
            return found
        if time.monotonic() > until:
            raise RuntimeError("the shim does not come to rest")
        time.sleep(0.1)


def main() -> None:
    port, version, url, checks = sys.argv[1:]
    check.get_dstack_runner_version = lambda: None
    check.get_dstack_shim_version = lambda: version
    check.get_dstack_shim_download_url = lambda *_, **__: url
    check._get_instance_cpu_arch = lambda _: None
    instance = SimpleNamespace(name="instance", id="1", job_provisioning_data=None)
    seen = []
    for _ in range(int(checks)):
        client = ShimClient(port=int(port))
        found = entry(client)
        seen.append([found.version, found.status.value])
        check._maybe_install_components(instance, client)
    print(json.dumps(seen))  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
