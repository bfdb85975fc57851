"""
The entry point dstack's server loads: `plugins: [shim_restart]` in its config.yml.

dstack lets only ImportError of a plugin pass; anything else raised while loading stops the server.
So this module imports as little as it can and the rest behind a guard of its own.
"""

import importlib
import logging
import os

from dstack.plugins import Plugin

_logger = logging.getLogger("dstack.plugins.shim_restart")


class ShimRestartPlugin(Plugin):  # type: ignore[misc]  # dstack is untyped where we are checked
    """
    Takes over dstack's decision whether a shim may be restarted; `active` and `summary` say how.

    It adds no apply policies: what it does is done once it is made.
    """

    active: bool = False
    summary: str = "not loaded"

    def __init__(self) -> None:
        super().__init__()
        try:
            outcome = importlib.import_module("dstack_shim_server.activation").load(os.environ)
            self.active, self.summary = outcome.active, outcome.summary
        except Exception as exception:
            self.summary = f"inactive: {type(exception).__name__}: {exception}"
            _logger.exception("shim_restart: inactive, loading it failed; dstack is as it was")
