"""Servers that keep a shim busy while it is killed again and again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dstack_shim_contracts.api import TaskConfig, TaskInfo, TerminateRequest
from dstack_shim_contracts.client import ShimClient
from dstack_shim_contracts.errors import ShimResponseError, ShimUnreachable
from dstack_shim_contracts.statuses import TaskStatus

from tests.crash.stage import PATIENCE, Stage
from tests.eventually import eventually

T = TypeVar("T")

REASON = "terminated_by_server"
_LOOK = 0.05  # s between a server's looks at its task
_LIVES = ("runs on", "exits with 0", "exits with 7", "ends while starting")
_SCRIPTS = {
    "runs on": "while true; do sleep 3600; done",
    "exits with 0": "sleep 0.3; exit 0",
    "exits with 7": "sleep 0.3; echo last words; exit 7",
    "ends while starting": "while true; do sleep 3600; done",
}
_OUTCOMES = {
    "exits with 0": ("done_by_runner", ""),
    "exits with 7": ("container_exited_with_error", "last words"),
}
_NEVER_RAN = ("interrupted while ", "container was not started")
"""How the message begins of a task whose start a kill has cut short."""


class Churn:
    """So many servers, each with one task after the other until told to stop.

    While it is paused no server asks anything, so that a census can be taken.
    """

    def __init__(self, stage: Stage, servers: int, seed: int) -> None:
        self.problems: list[str] = []
        self.finished = 0
        self._stage = stage
        self._census = stage.census()
        self._going = threading.Event()
        self._going.set()
        self._stopping = False
        self._asking = threading.Condition()
        self._active = 0
        # Made here: the first use of an image imports it, which threads must not do at once.
        self._images = {life: stage.images.job(_SCRIPTS[life]) for life in _LIVES}
        self._threads = [
            threading.Thread(target=self._serve, args=(number, random.Random(f"{seed}/{number}")))
            for number in range(servers)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody asks for anything inside."""
        self._going.clear()
        with self._asking:
            self._asking.wait_for(lambda: self._active == 0, PATIENCE)
        try:
            yield
        finally:
            self._going.set()

    def take_census(self) -> None:
        """Note what does not hold; to be called while paused, with a shim that answers."""

        def settled() -> bool:
            return set(self._stage.shim.statuses().values()) <= {"running", "terminated"}

        eventually(settled, within=PATIENCE, saying="no start is in flight")
        found: list[str] = []

        def holds() -> bool:
            found[:] = self._census.take()
            return not found

        try:
            eventually(holds, within=10, every=0.1)
        except AssertionError:
            self.problems += found

    def stop(self) -> None:
        """Let each server see its task through, then end."""
        self._stopping = True
        self._going.set()
        for thread in self._threads:
            thread.join(PATIENCE * 2)
            assert not thread.is_alive()

    def _serve(self, number: int, chance: random.Random) -> None:
        try:
            with ShimClient(self._stage.shim.port, timeout=60) as client:
                count = 0
                while not self._stopping:
                    count += 1
                    life = chance.choice(_LIVES)
                    _Task(self, client, f"s{number}-{count}", life, self._images[life]).live()
                    self.finished += 1
        except BaseException as error:  # noqa: BLE001 - shown by the test, not lost in a thread
            self.problems.append(f"server {number}: {error!r}")

    @contextmanager
    def asking(self) -> Iterator[None]:
        """One question to the shim, which a pause waits for."""
        while True:
            self._going.wait()
            with self._asking:
                if self._going.is_set():
                    self._active += 1
                    break
        try:
            yield
        finally:
            with self._asking:
                self._active -= 1
                self._asking.notify_all()

    def accepted(self, task_id: str) -> None:
        self._census.accepted(task_id)

    def removed(self, task_id: str) -> None:
        self._census.removed(task_id)


class _Task:
    """One task of one server, which asks until it has an answer."""

    def __init__(
        self, churn: Churn, client: ShimClient, task_id: str, life: str, image: str
    ) -> None:
        self._churn = churn
        self._client = client
        self._id = task_id
        self._life = life
        self._config = TaskConfig(id=task_id, name=f"{task_id}-0-0", image_name=image)

    def live(self) -> None:
        self._until_answered(self._submit)
        if self._life == "runs on":
            self._wait_for(TaskStatus.RUNNING)
        elif self._life in _OUTCOMES:
            self._check_outcome(self._wait_for(TaskStatus.TERMINATED))
        self._until_answered(self._terminate)
        self._until_answered(self._remove)

    def _submit(self) -> None:
        try:
            self._client.submit(self._config)
        except ShimResponseError as error:
            if error.status != 409:  # an earlier call came through, its answer did not
                raise
        self._churn.accepted(self._id)

    def _terminate(self) -> None:
        info = self._client.terminate(self._id, TerminateRequest(REASON, "", 0))
        if info.status is not TaskStatus.TERMINATED or not info.termination_reason:
            self._complain(f"it was terminated, yet {info}")

    def _remove(self) -> None:
        self._churn.removed(self._id)  # from now on it may be gone, whatever is answered
        try:
            self._client.remove(self._id)
        except ShimResponseError as error:
            if error.status != 404:
                raise

    def _wait_for(self, status: TaskStatus) -> TaskInfo:
        def reached() -> TaskInfo | None:
            info = self._until_answered(lambda: self._client.task(self._id))
            return info if info.status in (status, TaskStatus.TERMINATED) else None

        info = eventually(reached, within=PATIENCE, every=_LOOK, saying=f"{self._id} is {status}")
        assert info is not None
        return info

    def _check_outcome(self, info: TaskInfo) -> None:
        outcome = (info.termination_reason, info.termination_message)
        never_ran = outcome[0] == "executor_error" and outcome[1].startswith(_NEVER_RAN)
        if outcome != _OUTCOMES[self._life] and not never_ran:
            self._complain(f"it {self._life} and ended as {outcome}")

    def _until_answered(self, ask: Callable[[], T]) -> T:
        answer: list[T] = []

        def answered() -> bool:
            with self._churn.asking():
                try:
                    answer.append(ask())
                except ShimUnreachable:
                    return False
            return True

        eventually(answered, within=PATIENCE, every=_LOOK, saying=f"{self._id} is answered")
        return answer[0]

    def _complain(self, what: str) -> None:
        self._churn.problems.append(f"{self._id}: {what}")
