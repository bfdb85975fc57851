"""Run by a Python to tell the build about itself, as JSON.

``describe.py tree``: the name of its byte code's tree, as single_file/main.py makes it.
``describe.py imports SOURCE``: the standard modules the daemon below SOURCE imports, so that
``--version`` can check for them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys

# Loaded, not only looked for: these need a library of the system, and nothing works without them.
LINKED = ("_ssl", "zlib")


def tree() -> str:
    """For example ``cpython-311-3495``."""
    magic = int.from_bytes(importlib.util.MAGIC_NUMBER[:2], "little")
    return f"{sys.implementation.cache_tag}-{magic}"


def imports(source: str) -> dict[str, list[str]]:
    """The standard modules to load and those to look for.

    Private ones are left out: many are accelerators that another build of the same Python has
    inside or lacks, and the daemon starts without them.
    """
    sys.path[:1] = [source]
    importlib.import_module("dstack_shim.daemon")
    tops = {name.partition(".")[0] for name in sys.modules} & sys.stdlib_module_names
    modules = sorted(name for name in tops if not name.startswith("_") and name not in LINKED)
    return {"modules": modules, "linked": [name for name in LINKED if name in tops]}


if __name__ == "__main__":
    print(json.dumps(tree() if sys.argv[1] == "tree" else imports(sys.argv[2])))
