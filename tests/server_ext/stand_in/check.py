"""A server's instance check in our own words, as far as the decision goes."""

from __future__ import annotations

import json
from typing import Any

# What the server would have installed; None: it does not know.
WANTED: str | None = None


def check_instance(instance: Any, client: Any) -> None:
    """One check: what the server asks first, then the part that may restart the shim."""
    client.healthcheck()
    client.list_tasks()
    _maybe_install_components(instance, client)


def get_dstack_shim_version() -> str | None:
    return WANTED


def get_dstack_shim_download_url(arch: str | None = None, version: str | None = None) -> str:
    return f"https://stock.example/{version}/{arch}"


def _maybe_install_components(instance_model: Any, shim_client: Any) -> None:
    components = shim_client.get_components()
    wanted = get_dstack_shim_version()
    if wanted is not None and wanted != _installed(components):
        url = get_dstack_shim_download_url(arch="x86", version=wanted)
        shim_client.install_shim(url)
        return
    if shim_client.is_safe_to_restart():
        shim_client.shutdown(force=False)


def _installed(components: Any) -> str:
    listed = json.loads(components.content)["components"]
    return next(str(c["version"]) for c in listed if c["name"] == "dstack-shim")
