"""Files of the repository that a script makes: written, or with ``--check`` only compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(path: Path, text: str, arguments: Sequence[str], module: str) -> int:
    """Write ``text``, or with ``--check`` tell whether the file holds it; the exit code.

    ``module`` is the script's name, for who has to run it.
    """
    if "--check" not in arguments:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{path} is out of date: run python -m {module}", file=sys.stderr)
    return 1
