"""Clients that never let up: new connections at a steady rate, each answer judged.

    with Traffic(rate=200, expect={"t1": "running"}) as traffic:
        …
    assert traffic.problems == []

They are a process of their own, so that a busy test does not count as a slow shim.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.lab.shim import PORT

PATHS = ("/api/healthcheck", "/api/tasks", "/api/components", "/api/instance/info")
_ROOT = Path(__file__).parents[2]
_LIMIT = 30.0  # s for one answer


class Traffic:
    """Asks a shim up to ``rate`` times a second for as long as the context lasts.

    Every request has a connection of its own, begun when its time has come whether or not others
    still wait. ``expect`` are the statuses that every task list must have.
    """

    def __init__(
        self,
        *,
        rate: int,
        expect: Mapping[str, str] | None = None,
        paths: Sequence[str] = PATHS,
        port: int = PORT,
    ) -> None:
        self.problems: list[str] = []
        self.answered = 0
        self.longest = 0.0
        """Seconds that one answer took at most, connecting included."""
        self._words = [str(rate), str(port), json.dumps(expect), *paths]

    def __enter__(self) -> Traffic:  # noqa: PYI034 - typing.Self came with Python 3.11
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.traffic", *self._words],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has begun
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        out, _ = self._process.communicate(timeout=2 * _LIMIT)
        found = json.loads(out)
        self.problems, self.answered = found["problems"], found["answered"]
        self.longest = found["longest"]
        print(f"traffic: {out}")  # noqa: T201 - shown with -s, and where a test fails


class _Clients:
    def __init__(self, rate: int, port: int, expect: Mapping[str, str] | None) -> None:
        self.problems: list[str] = []
        self.answered = 0
        self.longest = 0.0
        self.late = 0.0  # told with the rest: how busy the machine is
        self._pause = 1 / rate
        self._port = port
        self._expect = expect
        self._asked: set[asyncio.Task[None]] = set()

    async def run(self, paths: Sequence[str]) -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, over.set)
        print("begun", flush=True)  # noqa: T201 - what the other process waits for
        due, number = time.monotonic(), 0
        while not over.is_set():
            self.late = max(self.late, time.monotonic() - due)
            task = asyncio.ensure_future(self._ask(paths[number % len(paths)]))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
            number += 1
            due = max(due + self._pause, time.monotonic())  # late: not made good by a burst
            await asyncio.sleep(due - time.monotonic())
        if self._asked:
            await asyncio.wait(tuple(self._asked))

    async def _ask(self, path: str) -> None:
        begun = time.monotonic()
        try:
            raw = await asyncio.wait_for(self._exchange(path), _LIMIT)
        except (OSError, asyncio.TimeoutError) as error:
            self.problems.append(f"{path}: {type(error).__name__}")
            return
        self.longest = max(self.longest, time.monotonic() - begun)
        problem = self._judge(path, raw)
        if problem:
            self.problems.append(f"{path}: {problem}")
        else:
            self.answered += 1

    async def _exchange(self, path: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            return await reader.read()
        finally:
            writer.close()

    def _judge(self, path: str, raw: bytes) -> str:
        head, _, body = raw.partition(b"\r\n\r\n")
        if not head:
            return "closed without an answer"
        if not head.startswith(b"HTTP/1.1 200 "):
            return head.split(b"\r\n")[0].decode(errors="replace")
        try:
            document = json.loads(body)
        except ValueError:
            return "half an answer"
        if path == "/api/tasks" and self._expect is not None:
            found = {task["id"]: task["status"] for task in document["tasks"]}
            return "" if found == self._expect else f"wrong: {found}"
        return ""


def main(words: Sequence[str]) -> None:
    rate, port, expect, *paths = words
    clients = _Clients(int(rate), int(port), json.loads(expect))
    begun = time.monotonic()
    asyncio.run(clients.run(paths))
    found = {
        "problems": clients.problems,
        "answered": clients.answered,
        "longest": round(clients.longest, 3),
        "late": round(clients.late, 3),
        "rate": round(clients.answered / (time.monotonic() - begun)),
    }
    print(json.dumps(found))  # noqa: T201 - the answer


if __name__ == "__main__":
    main(sys.argv[1:])
