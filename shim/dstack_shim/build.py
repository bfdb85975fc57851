"""What this build says of itself.

The version that goes over the wire is the dstack release the shim stands in for: servers up to
0.22.0 fetch and overwrite a shim whose version string is not exactly the expected one. A
single-file build carries its own in ``dstack-shim.json`` at the root of the zip; our
distribution's version is told apart from it, in ``implementation``.
"""

from __future__ import annotations

import json
import sys
import zipfile
from functools import lru_cache
from pathlib import Path

# The dstack release whose shim this one is a drop-in for, unless the build says otherwise.
DEFAULT_VERSION = "0.22.5"
NAME = "dstack-shim"
IMPLEMENTATION_NAME = "dstack-shim-restartable"
IMPLEMENTATION_VERSION = "0.1.0"
DOCUMENT_NAME = "dstack-shim.json"


@lru_cache(maxsize=1)
def version() -> str:
    """The version this shim reports, as a PEP 440 string."""
    document = _own_document()
    value = document.get("version") if document else None
    return value if isinstance(value, str) and value else DEFAULT_VERSION


@lru_cache(maxsize=1)
def own_file() -> Path | None:
    """The single-file build this process was started from; None when run from an installation.

    Looked for once: a file that takes over is renamed while it runs.
    """
    for parent in Path(__file__).parents:
        if parent.is_file():
            return parent
    return None


def own_path() -> Path:
    """Where this shim is installed, if nobody says otherwise."""
    script = Path(sys.executable).with_name(NAME)
    return own_file() or (script if script.exists() else Path(sys.argv[0]).absolute())


def _own_document() -> dict[str, object] | None:
    file = own_file()
    if file is None:
        return None
    with zipfile.ZipFile(file) as archive:
        document = json.loads(archive.read(DOCUMENT_NAME))
    return document if isinstance(document, dict) else None
