"""
Print where the server of this release has its database, and where the extension takes it to be.

stdout: {"server", "ours"}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main() -> None:
    settings: Any = importlib.import_module("dstack._internal.server.settings")
    # A function since 0.21; a constant before.
    get = getattr(settings, "get_database_url", lambda: settings.DATABASE_URL)
    ours: Any = importlib.import_module("dstack_shim_server.record.database")
    json.dump({"server": get(), "ours": ours.database_url(os.environ)}, sys.stdout)


if __name__ == "__main__":
    main()
