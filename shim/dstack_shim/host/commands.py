"""External commands: no shell, always a time limit, nothing left behind.

Each command runs under a thread of its own that starts it, reads it, kills it and reaps it
(``subprocess`` alone; asyncio's child watchers differ between Python 3.10 and 3.13, need
care outside the main thread, and may lose a process whose start is cancelled).
The price is one short-lived thread a command, about 0.1 ms.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from attrs import frozen

from dstack_shim.errors import CommandError, CommandMissing, CommandTimedOut
from dstack_shim.host.threads import call_in_thread

__all__ = [
    "MAX_OUTPUT",
    "CommandError",
    "CommandMissing",
    "CommandTimedOut",
    "Finished",
    "Runner",
    "run",
]

MAX_OUTPUT = 1 << 20
"""Bytes kept of each of stdout and stderr; the rest is read and dropped."""

_CHUNK = 1 << 16
_TICK = 0.05  # s: how late a cancel or an exit with open pipes may be seen
_DRAIN = 0.5  # s: for output still in the pipes when a child of the command holds them open
_BUSY = 1.0  # s: for a program that is "busy" because somebody may still write to it
_REAP = 5.0  # s: a killed process that is stuck in the kernel is no longer waited for

# What execve answers when there is no such program or it is not one for this machine.
_NOT_A_PROGRAM = frozenset(
    {errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC, errno.ELOOP, errno.EPERM}
)


@frozen
class Finished:
    """A command that ran to its end.

    ``code`` is the exit code, or minus the number of the signal that ended it. The texts
    are UTF-8 with undecodable bytes replaced; ``truncated`` tells that either was longer
    than the limit.
    """

    code: int
    out: str = ""
    err: str = ""
    truncated: bool = False

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.code == 0

    @property
    def failure(self) -> str:
        """One line saying how it ended and its last words, fit for a user's message."""
        how = f"exited with {self.code}" if self.code >= 0 else _signal_words(-self.code)
        words = (self.err.strip() or self.out.strip()).splitlines()
        return f"{how}: {words[-1].strip()}" if words else how


class Runner(Protocol):
    """How a command is run: :func:`run`, or a test's own."""

    async def __call__(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> Finished:
        """Run ``argv`` to its end; the arguments and errors are those of :func:`run`."""
        ...


async def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    max_output: int = MAX_OUTPUT,
) -> Finished:
    """Run ``argv`` to its end, for at most ``timeout`` seconds.

    The program is looked up on PATH, gets no input, and runs in a session of its own, so
    that its whole process group can be killed. ``env`` replaces the environment (None:
    ours). Children it leaves running after its own exit are let be.

    When the caller is cancelled the command is killed and reaped first.

    Raises:
        CommandMissing: there is no such program, or it cannot be executed.
        CommandTimedOut: it was killed after ``timeout`` seconds.
        CommandError: it could not be started (no processes or descriptors left, NUL in an
            argument).
    """
    command = _Command(list(argv), timeout, env, max_output)
    name = f"command {argv[0]}" if argv else "command"
    try:
        return await call_in_thread(
            command.run, name=name, cancelled=command.cancelled, linger=True
        )
    except RuntimeError as error:
        raise CommandError(f"{name} could not be started: {error}") from error


class _Command:
    """One command, driven from its own thread."""

    def __init__(
        self, argv: list[str], timeout: float, env: Mapping[str, str] | None, max_output: int
    ) -> None:
        self.cancelled = threading.Event()
        self._argv = argv
        self._timeout = timeout
        self._env = env
        self._max_output = max_output

    def run(self) -> Finished:
        deadline = time.monotonic() + self._timeout
        process = self._start()
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
            out, err = _Kept(self._max_output), _Kept(self._max_output)
            for pipe, kept in ((process.stdout, out), (process.stderr, err)):
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, kept)
            self._read_until_exit(process, selector, deadline)
        return Finished(process.returncode, out.text(), err.text(), truncated=out.cut or err.cut)

    def _start(self) -> subprocess.Popen[bytes]:
        if not self._argv:
            raise CommandError("a command needs a program")
        program = self._argv[0]
        try:
            return self._popen()
        except OSError as error:
            if error.errno in _NOT_A_PROGRAM:
                raise CommandMissing(f"{program} cannot be run: {error.strerror}") from error
            raise CommandError(f"{program} could not be started: {error}") from error
        except ValueError as error:  # a NUL in an argument or variable
            raise CommandError(f"{program} could not be started: {error}") from error

    def _popen(self) -> subprocess.Popen[bytes]:
        give_up = time.monotonic() + _BUSY
        while True:
            try:
                return subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=None if self._env is None else dict(self._env),
                    bufsize=0,
                    start_new_session=True,
                )
            except OSError as error:
                # A file just written may be open for writing in the child of another thread
                # for the moment between its fork and its exec.
                if error.errno != errno.ETXTBSY or time.monotonic() >= give_up:
                    raise
            time.sleep(_TICK / 5)

    def _read_until_exit(
        self,
        process: subprocess.Popen[bytes],
        selector: selectors.BaseSelector,
        deadline: float,
    ) -> None:
        drain_until: float | None = None
        while selector.get_map() or process.poll() is None:
            now = time.monotonic()
            if drain_until is None and process.poll() is not None:
                drain_until = now + _DRAIN
            if drain_until is not None:
                if now >= drain_until:
                    return  # a child of the command keeps the pipes: not ours to wait for
            elif self.cancelled.is_set() or now >= deadline:
                self._kill(process)
                raise CommandTimedOut(f"{self._argv[0]} took longer than {self._timeout:g} s")
            if selector.get_map():
                _read_ready(selector)
            else:
                # Both pipes are closed: nothing left to read, only the exit to wait for.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_TICK)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        # Not reaped yet, so the number still names this group and no other.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(_REAP)
        except subprocess.TimeoutExpired:
            # Stuck in the kernel (a dead network mount): the answer must not wait for it.
            threading.Thread(target=process.wait, name="reaper", daemon=True).start()


class _Kept:
    """The first bytes of a stream, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.cut = False
        self._limit = limit
        self._data = bytearray()

    def add(self, chunk: bytes) -> None:
        room = self._limit - len(self._data)
        self._data += chunk[:room]
        self.cut = self.cut or len(chunk) > room

    def text(self) -> str:
        return self._data.decode("utf-8", errors="replace")


def _read_ready(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(_TICK):
        try:
            chunk = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            continue
        if chunk:
            key.data.add(chunk)
        else:
            selector.unregister(key.fileobj)


def _signal_words(number: int) -> str:
    with suppress(ValueError):
        return f"killed by {signal.Signals(number).name}"
    return f"killed by signal {number}"
