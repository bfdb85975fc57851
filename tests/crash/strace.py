"""The system calls of a running shim: listed, or killed and refused at the N-th of a kind.

strace counts calls for each thread by itself. Attached to one thread it knows no other, so the
N-th call of a kind is the same one in every run of a thread that does the same things.
"""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from types import TracebackType

import attrs

_LINE = re.compile(r"(?:(?P<thread>\d+) +)?(?P<name>[a-z_]\w*)\((?P<rest>.*)")
_LONGEST = 120  # characters of a string shown


@attrs.frozen
class Call:
    """One call as strace shows it; ``number`` counts those of this kind in this thread from 1."""

    thread: int
    name: str
    number: int
    text: str

    def __str__(self) -> str:
        return self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]}…"


class Strace:
    """strace attached to ``threads`` for as long as the context lasts, or until they are gone.

    ``calls`` are names or ``/patterns``; ``inject`` is what to do to one of them, in strace's own
    words (``fsync:signal=KILL:when=3``).
    """

    def __init__(
        self, threads: tuple[int, ...], calls: tuple[str, ...], output: Path, inject: str = ""
    ) -> None:
        self._threads = threads
        self._output = output
        self._command = ["strace", "-s", "160", "-o", str(output), "-e", "signal=none"]
        self._command += ["-e", f"trace={','.join(calls)}"]
        self._command += ["-e", f"inject={inject}"] if inject else []
        for thread in threads:
            self._command += ["-p", str(thread)]

    def __enter__(self) -> Strace:  # noqa: PYI034 - typing.Self came with Python 3.11
        self._output.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        for thread in self._threads:
            line = self._process.stderr.readline()
            if f"Process {thread} attached" not in line:
                self._process.kill()
                rest = self._process.communicate()[1]
                raise RuntimeError(f"strace: {line}{rest}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # it lets go of the threads first
        self._process.communicate(timeout=30)

    def calls(self) -> list[Call]:
        """What was called so far, in the order of time."""
        return read(self._output.read_text(errors="replace"), self._threads[0])


def read(text: str, thread: int = 0) -> list[Call]:
    """The calls in strace's output; ``thread`` is whose they are where it does not say."""
    calls = []
    count: dict[tuple[int, str], int] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:  # the second half of a call, or the end of a thread
            continue
        key = (int(match["thread"] or thread), match["name"])
        count[key] = count.get(key, 0) + 1
        calls.append(Call(*key, count[key], f"{match['name']}({match['rest']}"))
    return calls


def threads_of(pid: int) -> tuple[int, ...]:
    """The threads of a process in the order they were started, the main one first (proc(5))."""
    return tuple(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
