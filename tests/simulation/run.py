"""Runs one schedule to its end and says what became of it."""

from __future__ import annotations

import asyncio
from collections import Counter

import attrs

from tests.simulation.happenings import Happenings
from tests.simulation.loop import Deadlock
from tests.simulation.schedule import Schedule
from tests.simulation.settle import NotSettled, settle
from tests.simulation.world import World


@attrs.frozen
class Result:
    """What became of a run. ``steps`` are events that happened, ``calls`` those of the core."""

    seed: int
    violations: tuple[str, ...]
    steps: int
    calls: int
    generations: int
    seconds: float
    struck: Counter[tuple[str, str]]
    happened: Counter[str]
    trace: tuple[str, ...]


def run(schedule: Schedule, *, tells: bool = False) -> Result:
    """Let everything happen, in virtual time."""
    world = World(schedule, tells=tells)
    steps = 0

    async def live() -> None:
        nonlocal steps
        happenings = Happenings(world)
        world.start()
        await asyncio.sleep(1)
        for event in schedule.events:
            await asyncio.sleep(event.after)
            happenings.happen(event)
            steps += 1
            if world.shim is not None:
                world.watch.observe(world.shim)
            if world.violations:
                return
        await settle(world)

    try:
        world.loop.run(live())
    except (Deadlock, NotSettled) as error:
        world.violate(f"{type(error).__name__}: {error}")
    for line in world.loop.broken:
        world.violate(f"in the event loop: {line}")
    if world.shim is not None:
        world.shim.die()
        world.unburied.append(world.shim)
    world.bury()
    world.loop.forget()
    return Result(
        seed=schedule.seed,
        violations=tuple(world.violations),
        steps=steps,
        calls=world.engine.asked,
        generations=world.generations,
        seconds=world.loop.time(),
        struck=world.faults.struck,
        happened=world.happened,
        trace=tuple(world.trace),
    )
