"""A server's instance check in our own words, as far as the decision goes."""

from __future__ import annotations

from typing import Any


def check_instance(instance: Any, client: Any) -> None:
    """One check: what the server asks first, then the part that may restart the shim."""
    client.healthcheck()
    client.list_tasks()
    _maybe_install_components(instance, client)


def _maybe_install_components(instance_model: Any, shim_client: Any) -> None:
    shim_client.get_components()
    if shim_client.is_safe_to_restart():
        shim_client.shutdown(force=False)
