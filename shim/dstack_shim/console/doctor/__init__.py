"""``dstack-shim doctor``: what is wrong on this host, what to do, and what a start would do.

It looks only, unless ``--fix`` is given. What a start would do is told by
:mod:`dstack_shim.doctor`, the same that a shim asks of its successor.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from dstack_shim import build
from dstack_shim.console.doctor.bundle import write_bundle
from dstack_shim.console.doctor.checks import checks
from dstack_shim.console.doctor.facts import Facts, gather
from dstack_shim.console.doctor.findings import Check
from dstack_shim.console.doctor.fixes import alone, mend
from dstack_shim.console.screen import Cell, Screen, as_json, note, screen
from dstack_shim.doctor import Examination, Level, worst
from dstack_shim.engine.docker import DockerEngine
from dstack_shim.engine.protocol import Engine
from dstack_shim.errors import ShimError, UsageError
from dstack_shim.settings import Invocation, Settings

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.BROKEN: "red"}
_VERDICTS = {
    Level.OK: "nothing is wrong; a start would keep everything there is: {count} task(s)",
    Level.WARNING: "a start would keep {count} task(s); see the lines that begin with warning",
    Level.BROKEN: "see the lines that begin with broken",
}


def run(invocation: Invocation) -> int:
    """Examine this host and print what is found; returns the exit code."""
    fix = "fix" in invocation.options
    if fix and invocation.json:
        raise UsageError("--fix asks a person; it does not go with --json")
    engine = DockerEngine()
    return asyncio.run(_run(invocation, engine, fix=fix))


async def _run(invocation: Invocation, engine: Engine, *, fix: bool) -> int:
    try:
        facts = await gather(invocation.settings, engine)
        found = checks(facts)
        if invocation.json:
            print(as_json(document(facts.seen, found)))  # noqa: T201 - the answer
        else:
            _tell(screen(), facts.seen, found)
        if "bundle" in invocation.options:
            path = Path(invocation.options["bundle"])
            write_bundle(path, facts, document(facts.seen, found))
            note(f"{path} is written; look through it before you pass it on")
        if fix:
            found = await _mended(invocation.settings, facts, engine)
    finally:
        await engine.close()
    return int(worst(found))


async def _mended(settings: Settings, facts: Facts, engine: Engine) -> tuple[Check, ...]:
    if facts.sources is None:
        raise ShimError("--fix: there is no home to mend")
    with alone(facts.sources.home):
        # Looked at again: what was seen before the lock was ours may be another's by now.
        again = await gather(settings, engine)
        await mend(again, checks(again), engine, _ask, screen().line)
    return checks(await gather(settings, engine))


def _ask(question: str) -> bool:
    here = screen()
    here.file.write(f"{here.shown(question)} [y/N] ")
    here.file.flush()
    answer = sys.stdin.readline()
    if not answer:
        here.line("")
    return answer.strip().lower() in ("y", "yes")


def _tell(here: Screen, seen: Examination, found: Sequence[Check]) -> None:
    here.facts(list(_facts(seen, found)))
    here.line(_VERDICTS[worst(found)].format(count=len(seen.kept)))


def _facts(seen: Examination, found: Sequence[Check]) -> Iterator[tuple[str, Cell]]:
    for check in found:
        name = check.level.name.lower()
        yield name, Cell(f"{check.what}: {check.words}", _STYLES[check.level])
        if check.todo:
            yield "", Cell(check.todo + (" (or --fix)" if check.fix else ""))
    for line in seen.plan.lines() if seen.plan is not None else ():
        yield "plan", Cell(line)
    for task in seen.kept:
        if task.next != "nothing":
            yield "then", Cell(f"task {task.id}: {task.next}")


def document(seen: Examination, found: Sequence[Check]) -> dict[str, object]:
    """For programs; keys are added in later versions, never taken away or changed."""
    return {
        "version": build.version(),
        "implementation": build.IMPLEMENTATION_VERSION,
        "level": worst(found).name.lower(),
        "findings": [check.document() for check in found],
        "plan": list(seen.plan.lines()) if seen.plan is not None else None,
        "tasks": [attrs.asdict(task) for task in seen.kept],
    }
