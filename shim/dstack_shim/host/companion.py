"""A program that runs beside the daemon: started again when it ends, gone when the daemon is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

from dstack_shim.host.threads import call_in_thread
from dstack_shim.log import EventLog

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds before a program that ended is started again; the pause doubles."""

STEADY = 60.0
"""Seconds after which a program counts as healthy and the pause is short again."""

GRACE = 2.0
"""Seconds between the polite and the certain way of ending it."""

_LAST_WORDS = 3  # lines
_LINE = 1000  # bytes

# Run by the same Python in the child, which then becomes the program: the kernel kills it when
# the daemon dies, however that happens (the thread that started it lives as long as the
# daemon). preexec_fn would run Python in a fork of a threaded process.
_TETHERED = """\
import os, sys
daemon = int(sys.argv[1])
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
except Exception:
    pass
if os.getppid() == daemon:  # it may have died before we asked
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class Companion:
    """Keeps one program running until :meth:`stop`."""

    def __init__(self, name: str, argv: Sequence[str], log: EventLog) -> None:
        self._name = name
        self._argv = list(argv)
        self._log = log
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, name=name, daemon=True)

    def start(self) -> None:
        """Begin; whether the program can be started at all shows in the log."""
        self._thread.start()

    async def stop(self) -> None:
        """End the program and its children, and wait for that."""
        await call_in_thread(
            self._end, name=f"stop {self._name}", cancelled=threading.Event(), linger=True
        )

    def _keep_running(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            started = time.monotonic()
            words = self._run_once()
            if self._stopping.is_set():
                return
            self._log.warning(f"{self._name}.ended", last_words=words)
            if time.monotonic() - started >= STEADY:
                pause = FIRST_PAUSE
            self._stopping.wait(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    def _run_once(self) -> str:
        """Run the program to its end; return how it ended, with its last lines."""
        try:
            with self._lock:
                if self._stopping.is_set():
                    return ""
                process = self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _TETHERED, str(os.getpid()), *self._argv],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            return str(error)
        self._log.info(f"{self._name}.started", pid=process.pid)
        lines: deque[str] = deque(maxlen=_LAST_WORDS)
        assert process.stdout is not None
        with process.stdout:
            while line := process.stdout.readline(_LINE):
                lines.append(line.decode("utf-8", errors="replace").strip())
        # Not reaped without the lock: until then its number is surely still its own.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            code = process.wait()
            self._process = None
        return " | ".join([f"code {code}", *lines])

    def _end(self) -> None:
        self._stopping.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            self._thread.join(GRACE)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)
