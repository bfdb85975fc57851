"""The rows of the report: what is told of which samples, in which unit, and the budget for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs

from benchmarks.samples import median, quantile

Statistic = Callable[[Sequence[float]], float]

p99 = partial(quantile, part=0.99)


@attrs.frozen
class Row:
    """One row. Less is better in all of them; ``budget`` is in the row's unit.

    ``in_picture`` is what the picture calls it, "" for a row that is not in it.
    """

    source: str
    label: str
    unit: str
    statistic: Statistic = median
    digits: int = 0
    budget: float | None = None
    in_picture: str = ""


@attrs.frozen
class Section:
    """Rows under one heading, and how they were measured."""

    title: str
    how: str
    rows: tuple[Row, ...]


SECTIONS: tuple[Section, ...] = (
    Section(
        "A job ends",
        "From the moment at which the engine says that the container's process ended, to the first "
        "answer of the API with `terminated` (asked every 5 ms). The ends come at random moments; one "
        "that is not told of within a minute counts as one.",
        (
            Row("ends 1", "1 task, p50", "ms", median, 0, 100, "end of a job seen, p50"),
            Row("ends 1", "1 task, p99", "ms", p99, budget=300),
            Row("ends 50", "50 tasks, p50", "ms", median, budget=100),
            Row("ends 50", "50 tasks, p99", "ms", p99, 0, 300, "… beside 50 others, p99"),
            Row("ends restarted", "50 tasks, shim restarted, p50", "ms", median, budget=100),
            Row("ends restarted", "50 tasks, shim restarted, p99", "ms", p99, budget=300),
        ),
    ),
    Section(
        "Nothing happens",
        "Requests that reach the engine, and processor time of the engine and of the shim, while "
        "tasks run and nobody asks anything; scaled to a minute.",
        tuple(
            Row(
                f"idle {tasks} {what}",
                f"{label}, {tasks} tasks",
                f"{unit}/min".strip(),
                median,
                digits,
                budget,
                f"{label}, idle" if tasks == 100 and what != "shim" else "",
            )
            for what, label, unit, digits, budget in (
                ("requests", "engine requests", "", 1, 7.0),
                ("engine", "engine's processor time", "ms", 0, None),
                ("shim", "shim's processor time", "ms", 0, None),
            )
            for tasks in (0, 10, 100)
        ),
    ),
    Section(
        "It goes and comes back",
        "After `kill -9`, under a supervisor that waits 3 s as dstack's do: until the first answer. "
        "A cold start: from the start of the process until then, with 1 task.",
        (
            *(
                Row(
                    f"kill {tasks}",
                    f"kill -9 to the first answer, {tasks} task{'s' * (tasks > 1)}",
                    "s",
                    median,
                    2,
                    {64: 4.0}.get(tasks),
                    "kill -9 to first answer, 64 tasks" if tasks == 64 else "",
                )
                for tasks in (1, 64, 200)
            ),
            Row("cold debian", "cold start, Debian's own Python", "s", median, 3, 0.35),
            *(
                Row(f"cold {version}", f"cold start, Python {version}", "s", median, 3, 0.45)
                for version in ("3.10", "3.11", "3.12", "3.13")
            ),
            Row("version", "`--version`", "s", median, 3, 0.05),
        ),
    ),
    Section(
        "It comes back to a full host",
        "From the start of the process to its first answer, and what it has asked the engine until "
        "then: with 1 task, and with 200 of which 150 run. The bound is 1.5 × the time with 1 task "
        "and 2 s.",
        (
            Row("restart 1", "ready, 1 task", "s", median, 3),
            Row("restart many", "ready, 200 tasks", "s", median, 3),
            Row("restart bound", "that, as a share of the bound", "", max, 2, 1.0),
            Row("restart many lists", "lists asked for, 200 tasks", "", max, 0, 1),
            Row("restart many inspects", "inspects asked for, 200 tasks", "", max, 0, 0),
        ),
    ),
    Section(
        "It is replaced",
        "200 requests a second, each over a connection of its own, while the next file takes over "
        "as each shim has it: in place, or by exit and the supervisor's next start after 3 s (20 times "
        "at most).",
        (
            Row("absence refused", "connections refused, all replacements", "", sum, 0, 0),
            Row("absence failed", "other requests without an answer, all", "", sum, 0, 0),
            Row("absence wait", "longest wait for an answer, p50", "s", median, 2),
            Row(
                "absence wait",
                "longest wait for an answer, all",
                "s",
                max,
                2,
                1.5,
                "longest wait, replaced",
            ),
        ),
    ),
    Section(
        "It works",
        "Submit to `running` for an image that is there, beside the same container made and started "
        "by hand. API calls over one connection, 20 tasks running.",
        (
            Row("submit", "submit to running", "ms", in_picture="submit to running"),
            Row("submit over bare", "of that, more than create and start take", "ms", median),
            Row("api task", "task info, p50", "ms", median, 2),
            Row("api task", "task info, p99", "ms", p99, 2),
            Row("api list", "task list, p50", "ms", median, 2),
            Row("api list", "task list, p99", "ms", p99, 2),
        ),
    ),
    Section(
        "It takes",
        "Resident memory after the start, and the size of the file.",
        (
            Row("rss 0", "memory, idle", "MB", median, 1, 48, "memory, idle"),
            Row("rss 200", "memory, 200 tasks", "MB", median, 1),
            Row("size", "the file", "MB", median, 1, 12),
        ),
    ),
)
