"""Writes what a pytest run counted, for the one closing line of `./dev test`.

With ``DSTACK_SHIM_COUNTS`` set to a folder, a run leaves ``<name>.json`` there, the name taken
from ``DSTACK_SHIM_RUN`` or the process id. The file is there from the start with ``finished``
false, so that a run which dies is noticed. Only the standard library and pytest: it also runs
inside the environments of dstack's own releases.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


class Counts:
    """Collects the outcome of each test; a broken fixture of a test counts as its failure."""

    def __init__(self, file: Path, name: str) -> None:
        self._file = file
        self._name = name
        self._outcomes: dict[str, str] = {}
        self._skips: dict[str, str] = {}
        self._write(finished=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
        elif report.skipped:
            expected = getattr(report, "wasxfail", None)  # then longrepr is the whole failure
            self._skipped(report.nodeid, expected or report.longrepr)
        elif report.when == "call":
            self._outcomes.setdefault(report.nodeid, "passed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
        elif report.skipped:  # a whole module
            self._skipped(report.nodeid, report.longrepr)

    def pytest_sessionfinish(self) -> None:
        self._write(finished=True)

    def _skipped(self, nodeid: str, longrepr: Any) -> None:
        self._outcomes[nodeid] = "skipped"
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        self._skips[nodeid] = reason.removeprefix("Skipped: ")

    def _write(self, *, finished: bool) -> None:
        outcomes = list(self._outcomes.values())
        document = {
            "run": self._name,
            "finished": finished,
            **{word: outcomes.count(word) for word in ("passed", "failed", "skipped")},
            "skips": self._skips,
        }
        self._file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("DSTACK_SHIM_COUNTS")
    if not folder or hasattr(config, "workerinput"):  # a worker of xdist reports to its parent
        return
    name = os.environ.get("DSTACK_SHIM_RUN") or f"pid-{os.getpid()}"
    file = Path(folder) / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    config.pluginmanager.register(Counts(file, name), "dstack-shim-counts")
