"""The end of a world: the dust settles, the census is taken, everything is removed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.simulation.census import census
from tests.simulation.shim import Shim

if TYPE_CHECKING:
    from tests.simulation.world import World

LONGEST_GRACE = 3700.0
ROUNDS = 4
PATIENCE = 2000.0
"""Seconds a shim gets to serve once nothing goes wrong any more."""


class NotSettled(Exception):
    """Something that should have come to its end has not."""


async def settle(world: World) -> None:
    """Take the census when nothing goes wrong any more; then again after a restart; then remove."""
    world.faults.disarm()
    world.engine.heal()
    await asyncio.sleep(60)  # for what was struck by then
    await _until_back(world)
    shim = await _serving(world)
    await _quiet(world, shim)
    _take_census(world, shim, "in the end")
    if world.violations or world.schedule.seed % 2:
        return
    before = _views(world, shim)
    world.pause = 3.0
    world.kill(shim)
    shim = await _serving(world)
    await _quiet(world, shim)
    _take_census(world, shim, "after one more restart")
    after = _views(world, shim)
    for task_id in sorted(before.keys() | after.keys()):
        story = world.stories.by_id.get(task_id)
        if task_id not in after and story is not None and story.may_be_gone:
            continue  # its remove failed at the very last flush
        if before.get(task_id) != after.get(task_id):
            world.violate(
                f"a restart changes {task_id} from {before.get(task_id)} to {after.get(task_id)}"
            )
    await _remove_all(world, shim)


async def _until_back(world: World) -> None:
    """Whatever is away comes back by itself: the engine, the power, another shim."""
    for _ in range(200):
        if not world.engine.is_down and not world.is_away:
            return
        await asyncio.sleep(20)
    raise NotSettled("the host never came back")


async def _serving(world: World) -> Shim:
    waited = 0.0
    while waited < PATIENCE:
        shim = world.shim
        if shim is not None and shim.is_serving:
            return shim
        await asyncio.sleep(5)
        waited += 5
    raise NotSettled("no shim serves, though nothing is wrong")


async def _quiet(world: World, shim: Shim) -> None:
    """Let all graces, starts and rounds of the shim come to their end."""
    await _done(shim.in_context(shim.end_step()), "the end of the background step")
    await asyncio.sleep(LONGEST_GRACE if _has_grace(world, shim) else 200.0)
    for _ in range(ROUNDS):
        await _done(shim.round(), "a round of the background step")
        await asyncio.sleep(70)
    world.watch.observe(shim)


async def _done(task: asyncio.Task[None], what: str) -> None:
    await asyncio.wait((task,), timeout=PATIENCE)
    if not task.done():
        raise NotSettled(f"{what} never comes")
    task.result()


def _has_grace(world: World, shim: Shim) -> bool:
    """Whether anything takes its time by leave: a grace, or a slow pull."""
    return any(
        entry.busy or entry.task.record.stop_by is not None for entry in shim.core.book
    ) or bool(world.schedule.remote)


def _take_census(world: World, shim: Shim, when: str) -> None:
    for problem in census(world, shim):
        world.violate(f"{when}: {problem}")


def _views(world: World, shim: Shim) -> dict[str, tuple[str, str, str]]:
    """What the API tells; of damaged records not all is left to tell."""
    damaged = {story.id for story in world.stories if story.is_damaged}
    return {
        info.id: (
            info.status.value,
            info.termination_reason,
            info.termination_message,
        )
        for info in (entry.task.info() for entry in shim.core.book)
        if info.id not in damaged
    }


async def _remove_all(world: World, shim: Shim) -> None:
    """As a server that is done with the host: terminate and remove everything."""

    async def work() -> None:
        for item in shim.core.list():
            await shim.core.terminate(item.id, "terminated_by_server", "the end", 0)
            story = world.stories.get(item.id)
            if story is not None:
                story.removals += 1
                story.asked.append(("terminated_by_server", "the end"))
            await shim.core.remove(item.id)

    await _done(shim.in_context(work()), "the removal of everything")
    _take_census(world, shim, "after everything was removed")
    if world.watch.alive():
        world.violate("containers run after everything was removed")
    if shim.gpus.held() or (
        not world.damaged and (world.host.mounted or any(world.host.keys.values()))
    ):
        world.violate("something is held after everything was removed")
