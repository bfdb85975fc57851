"""
Make the plugin's class the way a server does, and print what it says of itself.

Runs inside an environment with the plugin installed. stdout: {"active", "summary", "log", "again"}:
the log lines of the first load, and the summary of a second.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from importlib.metadata import entry_points

NAME = "shim_restart"


def main() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dstack").addHandler(handler)
    logging.getLogger("dstack").setLevel(logging.INFO)
    (entry_point,) = entry_points(group="dstack.plugins", name=NAME)
    base = importlib.import_module("dstack.plugins").Plugin
    plugin_class = entry_point.load()
    assert issubclass(plugin_class, base)
    plugin = plugin_class()
    answer = {
        "active": plugin.active,
        "summary": plugin.summary,
        "log": [line for line in lines if line.startswith(NAME)],
        "policies": plugin.get_apply_policies(),
        "again": plugin_class().summary,
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
