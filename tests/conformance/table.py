"""The closing table of a run: what passed, failed and was skipped, section by section."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.conformance.rows import SECTIONS, cited_by, is_beyond

_OUTCOMES = ("passed", "failed", "skipped")


@dataclass
class _Tally:
    core: Counter[str] = field(default_factory=Counter)
    beyond: Counter[str] = field(default_factory=Counter)


class Table:
    """Collects outcomes by the section of each case's first row; ``beyond`` cases apart."""

    def __init__(self) -> None:
        self._place: dict[str, tuple[str, bool]] = {}
        self._outcome: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            rows = cited_by(item)
            if rows:
                self._place[item.nodeid] = (rows[0].section, is_beyond(rows))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._place:
            return
        if report.failed:
            self._outcome[report.nodeid] = "failed"
        elif report.skipped:
            self._outcome[report.nodeid] = "skipped"
        elif report.when == "call":
            self._outcome.setdefault(report.nodeid, "passed")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._outcome:
            return
        terminalreporter.section("conformance")
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """The table, ready to print."""
        tallies = {letter: _Tally() for letter in SECTIONS}
        for nodeid, outcome in self._outcome.items():
            letter, beyond = self._place[nodeid]
            tally = tallies[letter]
            (tally.beyond if beyond else tally.core)[outcome] += 1
        head = f"{'':24}{'core':^27}{'beyond':^27}"
        lines = [head, f"{'section':24}" + "".join(f"{word:>9}" for word in _OUTCOMES) * 2]
        total = _Tally()
        for letter, tally in tallies.items():
            lines.append(_line(f"{letter} {SECTIONS[letter]}", tally))
            total.core += tally.core
            total.beyond += tally.beyond
        return [*lines, _line("all", total)]


def _line(title: str, tally: _Tally) -> str:
    cells = [counter[word] for counter in (tally.core, tally.beyond) for word in _OUTCOMES]
    return f"{title:24}" + "".join(f"{cell:>9}" for cell in cells)
