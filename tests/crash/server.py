"""What a server does with one task, what it was told, and what must be true ever after.

It asks as dstack's servers ask: submit, wait, terminate, remove. Whatever was answered with 200
is a fact that no crash may undo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from dstack_shim_contracts.api import TaskInfo, TerminateRequest
from dstack_shim_contracts.client import ShimClient
from dstack_shim_contracts.errors import ShimResponseError, ShimUnreachable
from dstack_shim_contracts.statuses import TaskStatus

from tests.crash.stage import PATIENCE, Stage
from tests.eventually import eventually

REASON, MESSAGE = "terminated_by_user", "asked for by a test"
WORDS = "last words"
_OF_THE_SHIM = ("executor_error", "creating_container_error", "container_exited_with_error")
_DUST = 10.0  # s for the background step to do what could not be done at once


class Job(str, Enum):
    """What a task's job does, in its own words."""

    RUNS_ON = "while true; do sleep 3600; done"
    ENDS = f"echo {WORDS}; exit 7"
    ENDS_WHEN_TOLD = f"until [ -e /marks/go ]; do sleep 0.02; done; echo {WORDS}; exit 7"


class Gone(Exception):
    """The shim ended while it was asked or waited for."""


class Server:
    """One server with one task, which lets a key of ours log in as ``user``.

    ``refused`` collects the answers that were errors, ``problems`` what is not as it must be.
    """

    def __init__(self, stage: Stage, task_id: str, user: str, job: Job) -> None:
        self.task_id = task_id
        self.refused: list[str] = []
        self.problems: list[str] = []
        self._stage = stage
        self._ends = job is not Job.RUNS_ON
        self._config = stage.config(task_id, user, job.value)
        self._asked: set[str] = set()
        self._done: set[str] = set()
        self._census = stage.census()

    def live(self) -> None:
        """See the task through its life, asking again whatever was refused.

        The shim is asked nothing else: each answer would be one more call of its own. Raises
        :class:`Gone` as soon as it ends.
        """
        self.begin()
        if self._ends:
            self._wait_on_disk(lambda record: record.get("cleaned_up"))
        else:
            self._insist(self._terminate)
        self._insist(self._remove)

    def begin(self) -> None:
        """The first part of its life: until it runs, or has ended instead."""
        self._insist(self._submit)
        self._wait_on_disk(lambda record: record.get("cleaned_up") or _step(record) == "running")

    def ask(self, what: str) -> None:
        """Submit, terminate or remove it, once.

        Raises :class:`Gone`, and ``ShimResponseError`` for an answer that is an error.
        """
        {"submit": self._submit, "terminate": self._terminate, "remove": self._remove}[what]()

    def acknowledged(self, what: str) -> None:
        """That was answered with 200, whether or not the answer came through."""
        self._done.add(what)

    def check(self) -> None:
        """Note what is not as it was acknowledged, once the dust has settled."""
        self._settle()
        known = self.task_id in self._stage.shim.statuses()
        if "remove" in self._done and known:
            self._complain("a removed task is back")
        if "submit" in self._done and "remove" not in self._asked and not known:
            self._complain("an accepted task is unknown")
        if "terminate" in self._done and known:
            info = self._client.task(self.task_id)
            if info.status is not TaskStatus.TERMINATED or not info.termination_reason:
                self._complain(f"it was terminated, yet {info}")
        if self._stage.starts(self.task_id) > 1:
            self._complain("its job was started twice")
        if "submit" in self._done and "remove" not in self._asked:
            self._census.accepted(self.task_id)
        self._complain(*self._settled_census())

    def finish(self) -> None:
        """After an interruption, do the rest; then nothing of the task may be left."""
        if "submit" not in self._done:
            self._submit_again()
        if "remove" not in self._done and self.task_id in self._stage.shim.statuses():
            self._end()
        elif "remove" not in self._asked:
            self._complain("it is unknown before its removal")
        self.check()
        if self.task_id in self._stage.shim.statuses():
            self._complain("it is still known after its removal")
        self._complain(*self._stage.leftovers())

    def _submit_again(self) -> None:
        """A tunnel that saw no answer repeats the whole call."""
        known = self.task_id in self._stage.shim.statuses()
        try:
            self._submit()
        except ShimResponseError as error:
            if error.status != 409 or not known:
                self._complain(f"submitted again it got {error.status} {error}")
            self._done.add("submit")
        else:
            if known:
                self._complain("it was accepted twice")

    def _end(self) -> None:
        if self._ends:
            info = eventually(self._ended, within=PATIENCE, saying=f"{self.task_id} ended")
            assert info is not None
            self._check_own_end(info)
        self._insist(self._terminate)
        self._check_reason(self._client.task(self.task_id))
        self._insist(self._remove)

    def _ended(self) -> TaskInfo | None:
        info = self._client.task(self.task_id)
        return info if info.status is TaskStatus.TERMINATED else None

    def _check_own_end(self, info: TaskInfo) -> None:
        outcome = (info.termination_reason, info.termination_message)
        if self._stage.starts(self.task_id) == 0:
            if outcome[0] not in _OF_THE_SHIM or not outcome[1]:
                self._complain(f"its job never ran and it ended as {outcome}")
        elif outcome != ("container_exited_with_error", WORDS):
            self._complain(f"its job ended with 7 and it as {outcome}")

    def _check_reason(self, info: TaskInfo) -> None:
        if self._ends:
            return  # told apart by its own end
        if info.termination_reason == REASON and info.termination_message == MESSAGE:
            return
        ran = self._stage.starts(self.task_id) > 0
        if ran or info.termination_reason not in _OF_THE_SHIM or not info.termination_message:
            self._complain(f"it {'ran on' if ran else 'never ran'} and ended as {info}")

    # How it asks.

    def _submit(self) -> None:
        self._ask("submit", lambda: self._client.submit(self._config))

    def _terminate(self) -> None:
        request = TerminateRequest(REASON, MESSAGE, 0)
        self._ask("terminate", lambda: self._client.terminate(self.task_id, request))

    def _remove(self) -> None:
        self._census.removed(self.task_id)  # from now on it may be gone, whatever is answered
        self._ask("remove", lambda: self._client.remove(self.task_id))

    def _ask(self, what: str, call: Callable[[], object]) -> None:
        self._asked.add(what)
        try:
            call()
        except ShimUnreachable as error:
            raise Gone from error
        self._done.add(what)

    def _insist(self, ask: Callable[[], None]) -> None:
        """Ask until it is granted, as servers do."""

        def granted() -> bool:
            try:
                ask()
            except ShimResponseError as error:
                self._note_refusal(error)
                return False
            return True

        eventually(granted, within=PATIENCE, every=0.2, saying=f"{ask.__name__} is granted")

    def _note_refusal(self, error: ShimResponseError) -> None:
        self.refused.append(f"{error.status} {error}")
        if error.status != 500:
            self._complain(f"it got {error.status} {error}")
        if "submit" not in self._done and self._stage.record(self.task_id):
            self._complain("refused, yet it has a record")

    def _wait_on_disk(self, holds: Callable[[Mapping[str, Any]], object]) -> None:
        def says() -> bool:
            if not self._stage.shim.is_running:
                raise Gone
            return bool(holds(self._stage.record(self.task_id)))

        eventually(says, within=PATIENCE, every=0.005, saying="the record says so")

    def _settle(self) -> None:
        def settled() -> bool:
            return set(self._stage.shim.statuses().values()) <= {"running", "terminated"}

        eventually(settled, within=PATIENCE, saying="no start is in flight")

    def _settled_census(self) -> list[str]:
        found: list[str] = []

        def holds() -> bool:
            found[:] = self._census.take()
            return not found

        try:
            eventually(holds, within=_DUST, every=0.1)
        except AssertionError:
            return found
        return []

    @property
    def _client(self) -> ShimClient:
        return self._stage.shim.client

    def _complain(self, *what: str) -> None:
        self.problems += [f"{self.task_id}: {words}" for words in what]


def _step(record: Mapping[str, Any]) -> object:
    return (record.get("intent") or {}).get("step")
