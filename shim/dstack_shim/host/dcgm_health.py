"""The health of NVIDIA GPUs as libdcgm sees it, asked through a process of its own.

The process lives as long as the daemon: DCGM reports what happened since the last question,
and its watches need a minute of data. It is started from memory, because the file this daemon
was started from may have been replaced meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import marshal
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType

from dstack_shim_contracts.api import Dcgm
from dstack_shim_contracts.codec import decode
from dstack_shim_contracts.errors import BodyError

from dstack_shim.host import dcgm_library
from dstack_shim.host.threads import call_in_thread
from dstack_shim.log import EventLog

LIBRARIES = ("libdcgm.so.4", "libdcgm.so.3", "libdcgm.so")

PATIENCE = 5.0
"""Seconds a request waits: clients give up after 9. A later answer is for the next request."""

STUCK = 60.0
"""Seconds after which the process is killed: starting an engine for eight GPUs takes many."""

FIRST_PAUSE = 10.0
LONGEST_PAUSE = 600.0
"""Seconds before the process is started again after a failure; the pause doubles."""

_OWN_END = 0.5  # s between its last word, or the end of its output, and its exit
_MAX_ANSWER = 1 << 24  # bytes

# The code comes over stdin and not as an argument, which would fill the list of processes.
_BOOTSTRAP = (
    "import base64,marshal,sys;"
    "exec(marshal.loads(base64.b64decode(sys.stdin.readline())),{'__name__':'__main__'})"
)


class _Failed(Exception):
    """The process gave no health; the text says why."""


class DcgmHealth:
    """Asks for the health, for ever; no failure of library or process is one of ours."""

    def __init__(
        self,
        log: EventLog,
        *,
        address: str = "",
        libraries: Sequence[str] = LIBRARIES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._arguments = [address, *libraries]
        self._monotonic = monotonic
        self._process: subprocess.Popen[bytes] | None = None
        self._question: asyncio.Task[Dcgm | None] | None = None
        self._asked_at = 0.0
        self._pause = FIRST_PAUSE
        self._not_before = float("-inf")
        self._reported = ""
        self._stopped = False

    def start(self) -> None:
        """Ask for the first time, so that a request need not wait for the engine's start."""
        self._ask()

    async def check(self) -> Dcgm | None:
        """Return the health; None while it is not known: no library, no answer, nonsense."""
        question = self._ask()
        if question is None:
            return None
        done, _ = await asyncio.wait([question], timeout=PATIENCE)
        if done:
            self._forget(question)
            return question.result()
        if self._monotonic() - self._asked_at >= STUCK:
            self._kill()
            self._forget(question)  # its thread reaps the process, however long that takes
            self._give_up("the process does not answer")
        return None

    async def stop(self) -> None:
        """End the process and wait for that."""
        self._stopped = True
        self._kill()
        if self._question is not None:
            await asyncio.wait([self._question], timeout=PATIENCE)
        process, self._process = self._process, None
        if process is not None:
            await call_in_thread(
                lambda: _end(process), name="stop dcgm health", cancelled=threading.Event()
            )

    def _ask(self) -> asyncio.Task[Dcgm | None] | None:
        """Return the question under way, or ask one if it is time."""
        if self._question is None and not self._stopped:
            if self._process is None and self._monotonic() < self._not_before:
                return None
            self._asked_at = self._monotonic()
            self._question = asyncio.ensure_future(self._health())
        return self._question

    def _forget(self, question: asyncio.Task[Dcgm | None]) -> None:
        if self._question is question:  # two requests wait for one, and a third may have asked
            self._question = None

    async def _health(self) -> Dcgm | None:
        try:
            health = await call_in_thread(
                self._exchange, name="dcgm health", cancelled=threading.Event()
            )
        except (_Failed, RuntimeError) as failure:  # RuntimeError: no more threads
            self._give_up(str(failure))
            return None
        self._pause = FIRST_PAUSE
        self._reported = ""
        return health

    def _exchange(self) -> Dcgm:
        """Ask the process and wait for its answer, in a thread of its own."""
        process = self._process
        try:
            if process is None:
                process = self._process = self._spawn()
                _put(process, _PROGRAM)
            if self._stopped:
                self._kill()
            _put(process, b"check")
            assert process.stdout is not None
            return _read(process.stdout.readline(_MAX_ANSWER))
        except (_Failed, OSError) as error:
            if process is None:
                raise _Failed(f"no process can be started: {error}") from error
            if self._process is process:
                self._process = None
            raise _Failed(f"{error}{_end(process)}") from error

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _give_up(self, why: str) -> None:
        self._not_before = self._monotonic() + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        if why != self._reported and not self._stopped:  # a missing library is told once
            self._reported = why
            self._log.warning("dcgm.no_health", reason=why)

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            _signal_group(process)


def _program() -> bytes:
    """Return the other module's code, whatever this daemon is run from."""
    spec = dcgm_library.__spec__
    assert spec is not None
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if not isinstance(code, CodeType):
        return b""
    return base64.b64encode(marshal.dumps(code))


_PROGRAM = _program()


def _put(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()


def _read(raw: bytes) -> Dcgm:
    if not raw.endswith(b"\n"):
        raise _Failed("the process ended")
    try:
        answer = json.loads(raw)
        problem = answer.get("error") or answer.get("absent")
    except (ValueError, AttributeError, RecursionError) as error:
        raise _Failed("the process answered nonsense") from error
    if problem:
        raise _Failed(str(problem))
    try:
        return decode(Dcgm, raw)
    except BodyError as error:
        # A number servers do not know would make them call the instance unreachable.
        raise _Failed(f"the library answered {error}") from error


def _end(process: subprocess.Popen[bytes]) -> str:
    """End and reap the process; return how it ended if that was not our doing."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_OWN_END)
    by_itself = process.returncode is not None
    _signal_group(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    return f" (code {process.returncode})" if by_itself and process.returncode else ""


def _signal_group(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # reaped, its number may be somebody else's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
