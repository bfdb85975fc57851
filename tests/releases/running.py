"""Run a script inside a release's environment and read the JSON it prints."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INSIDE = Path(__file__).with_name("inside")


def run_inside(
    python: Path,
    script: str | Path,
    *arguments: str,
    stdin: object = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 180,
) -> Any:
    """
    Run a script of ``inside/`` (or any other by its path) and return what it printed.

    The home is a folder of its own: importing dstack's server modules makes directories there.
    Raises RuntimeError with the end of what it said if it fails.
    """
    with tempfile.TemporaryDirectory() as home:
        finished = subprocess.run(
            [python, INSIDE / script, *arguments],
            input=json.dumps(stdin),
            env={
                "PATH": os.environ["PATH"],
                "HOME": home,
                "DSTACK_SERVER_DIR": f"{home}/server",
                **(environment or {}),
            },
            cwd=home,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    if finished.returncode != 0:
        said = f"{finished.stdout[-4000:]}\n{finished.stderr[-4000:]}"
        raise RuntimeError(f"{script} in {python}:\n{said}")
    return json.loads(finished.stdout)
