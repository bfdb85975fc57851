"""Runs nox sessions, several lanes of them side by side, each with its output in a file.

Tests with an engine mostly wait and those without mostly compute: side by side they take the time
of the longer, and two whole runs take turns on no core.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "logs"
DIED = "died"


@dataclass(frozen=True)
class Session:
    """What became of one nox session: ``result`` is success, failed, skipped, aborted or died."""

    name: str
    result: str
    reason: str
    seconds: float
    log: Path


class Lanes:
    """Runs lanes of sessions; a lane goes on after a failed session.

    ``limit``: seconds for one session; what takes longer is killed, with all it started.
    """

    def __init__(self, environment: dict[str, str], limit: float) -> None:
        self._environment = environment
        self._limit = limit
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopping = False
        self.finished: list[Session] = []

    def run(self, lanes: Sequence[Sequence[str]]) -> None:
        """Run them all to their end; an interrupt ends what is running and is raised again."""
        LOGS.mkdir(parents=True, exist_ok=True)
        threads = [threading.Thread(target=self._lane, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop()
            for thread in threads:
                thread.join()
            raise

    def _lane(self, names: Sequence[str]) -> None:
        for name in names:
            if self._stopping:
                return
            self._say(f"--- {name} ...")
            session = self._session(name)
            with self._lock:
                self.finished.append(session)
            self._say(describe(session))

    def _session(self, name: str) -> Session:
        log, report = LOGS / f"{name}.log", LOGS / f"{name}.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "nox", "--report", str(report), "--session", name]
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            late = self._wait(process)
        result, reason = _read_report(report)
        seconds = time.monotonic() - began
        return Session(
            name, result, f"not done in {self._limit:g} s" if late else reason, seconds, log
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether it had to be killed because its time was over."""
        with self._lock:
            self._running.add(process)
        try:
            process.wait(timeout=self._limit)
        except subprocess.TimeoutExpired:
            _kill(process)
            return True
        else:
            return False
        finally:
            with self._lock:
                self._running.discard(process)

    def _stop(self) -> None:
        self._stopping = True
        with self._lock:
            for process in self._running:
                _kill(process)

    def _say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)


def describe(session: Session) -> str:
    """One line for a success with pytest's own count, the whole output for anything else."""
    head = f"--- {session.name}: {session.result} {session.reason}".rstrip()
    head += f" in {session.seconds:.0f} s"
    lines = session.log.read_text(encoding="utf-8", errors="replace").splitlines()
    if session.result not in ("success", "skipped"):
        return "\n".join([head, *lines, f"--- end of {session.name}"])
    told = [line for line in lines if line.startswith(("coverage of", "dist/")) or _counts(line)]
    return "\n".join([head, *(f"    {line.strip('= ')}" for line in told)])


def _counts(line: str) -> bool:
    """Whether it is the last line of a pytest run: ``3 passed, 1 skipped in 0.12s``."""
    return " passed" in line and " in " in line


def _read_report(file: Path) -> tuple[str, str]:
    """Result and reason; nox leaves no report if it is killed or cannot read its own file."""
    try:
        sessions = json.loads(file.read_text(encoding="utf-8"))["sessions"]
        session = sessions[0]
        return str(session["result"]), str(session.get("reason") or "")
    except (OSError, ValueError, LookupError):
        return DIED, "nox left no report"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group; what left it dies with the sandbox or is found as a leftover."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
