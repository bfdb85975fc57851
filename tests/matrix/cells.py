"""The cells of ``expected.md``, and what each of its words claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

TABLE = Path(__file__).with_name("expected.md")
_HEADING = "## Record: "

GOOD, NONE, DAMAGED = "good", "none", "damaged"
OTHER_VERSION, KEYS_LOST = "other version", "ours, keys lost"
USABLE = (GOOD, KEYS_LOST)
"""Records that still tell what was asked for and decided."""

STEPS = {
    "pending": "preparing",
    "preparing": "preparing",
    "pulling": "pulling",
    "creating": "creating",
    "starting": "starting",
    "running": "running",
    "terminating": "running",
    "terminated": "running",
    "terminated, no reason": "running",
    "half ended": "running",
}
"""Row → the step that its record tells."""
GAVE_BACK = ("terminated", "terminated, no reason", "half ended")
DECIDED = ("terminating", "terminated", "terminated, no reason")
REASON, MESSAGE = "terminated_by_user", "by hand"

LINES = tuple(f"line {number}" for number in range(1, 8))
"""What a job says that ends with 7."""
_LAST_LINES = "\n".join(LINES[-5:])
_OUT_OF_MEMORY = "container exited with code 137: out of memory"
_FAILED = "container_exited_with_error"
_AS_IT_WAS = "as it was"


@attrs.frozen
class Seen:
    """What there is to see of one task, from outside: the API, the host, the engine, the disk.

    ``container`` is what became of it. ``record``: whether what could not be read is still there.
    """

    status: str
    reason: str = ""
    message: str = ""
    has_gpu: bool = False
    has_volume: bool = False
    has_key: bool = False
    container: str = _AS_IT_WAS
    record: str = ""


@attrs.frozen
class Cell:
    """One cell: what is found, and the word for what must come of it."""

    number: int
    record: str
    task: str
    container: str
    word: str

    def __str__(self) -> str:
        return f"{self.task} × {self.container} × {self.record}"

    @property
    def task_id(self) -> str:
        """The task's id; tasks of a whole matrix live on one host."""
        return f"cell{self.number}"

    @property
    def gave_back(self) -> bool:
        """Whether the task had given back what it held."""
        return self.task in GAVE_BACK

    @property
    def has_things(self) -> bool:
        """Whether its volume is mounted and its key let in when its shim is killed."""
        return self.task != "pending" and not self.gave_back

    def expected(self) -> Seen:
        """What the word claims, in full."""
        reason, message = self._outcome()
        lives_on = self.word in ("runs", "started")
        holds = lives_on and not (self.record in USABLE and self.gave_back)
        return Seen(
            status=_STATUS.get(self.word, "terminated"),
            reason=reason,
            message=message,
            has_gpu=holds,
            has_volume=(lives_on or self.word == "unknown") and self.has_things,
            has_key=holds,
            container=self._container_afterwards(),
            record={DAMAGED: "set aside", OTHER_VERSION: "untouched"}.get(self.record, ""),
        )

    def _outcome(self) -> tuple[str, str]:
        step = STEPS[self.task] if self.record == GOOD else ""
        while_ = f", interrupted while {step}" if step else ""
        recorded = ("", "") if self.task == "terminated, no reason" else (REASON, MESSAGE)
        return {
            "done": ("done_by_runner", ""),
            "failed": (_FAILED, _LAST_LINES),
            "oom": (_FAILED, _OUT_OF_MEMORY),
            "unstarted": ("executor_error", f"container was not started{while_}"),
            "interrupted": (
                "executor_error",
                f"interrupted while {step}: the shim was restarted",
            ),
            "lost": ("executor_error", "container not found"),
            "ended": recorded,
            "stopped": recorded,
        }.get(self.word, ("", ""))

    def _container_afterwards(self) -> str:
        if self.container == "none":
            return "none"
        return {"started": "started", "stopped": "stopped"}.get(self.word, _AS_IT_WAS)


_STATUS = {"runs": "running", "started": "running", "unknown": "unknown"}


def cells() -> tuple[Cell, ...]:
    """All of them, in the order of the tables."""
    return tuple(
        Cell(number, *found) for number, found in enumerate(_found(TABLE.read_text("utf-8")))
    )


def wrong(
    seen: Callable[[Cell], Seen], chosen: Sequence[Cell]
) -> dict[str, dict[str, tuple[object, object]]]:
    """Of each cell that is not as it must be: what is seen, and what should be."""
    differences = {
        str(cell): {
            name: (is_so, should_be)
            for (name, is_so), should_be in zip(
                attrs.asdict(seen(cell)).items(), attrs.astuple(cell.expected()), strict=True
            )
            if is_so != should_be
        }
        for cell in chosen
    }
    return {name: found for name, found in differences.items() if found}


def _found(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Record, task, container and word of each cell."""
    for section in text.split(_HEADING)[1:]:
        record = section.partition("\n")[0]
        head, _, *rows = (_words(line) for line in section.splitlines() if line.startswith("|"))
        for task, *words in rows:
            for container, word in zip(head[1:], words, strict=True):
                yield record, task, container, word


def _words(line: str) -> list[str]:
    return [word.strip() for word in line.strip("|").split("|")]
