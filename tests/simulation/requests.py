"""The server's requests, and what must be true at the instant each is answered."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from dstack_shim_contracts.api import TaskInfo
from dstack_shim_contracts.record import TaskRecord
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.errors import (
    EngineError,
    ResourceError,
    ShimError,
    ShuttingDown,
    StoreError,
    TaskExists,
    TaskNotFound,
    TaskNotTerminated,
)
from tests.simulation.shim import Shim
from tests.simulation.stories import Story, dir_of

if TYPE_CHECKING:
    from tests.simulation.world import World


class Requests:
    """Asks the shim that serves, if any; nobody waits for the answer but the checks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.answers = 0

    def submit(self, task: int) -> None:
        """Ask it to take a task."""
        self._ask("submit", lambda shim: self._submit(shim, task))

    def terminate(self, task: int, reason: str, timeout: int) -> None:
        """Ask it to end a task."""
        asked = (reason, f"said with {reason}" if reason else "")
        self._ask("terminate", lambda shim: self._terminate(shim, f"t{task}", asked, timeout))

    def remove(self, task: int) -> None:
        """Ask it to take a task away."""
        self._ask("remove", lambda shim: self._remove(shim, f"t{task}"))

    def _ask(self, what: str, work: Callable[[Shim], Coroutine[Any, Any, None]]) -> None:
        """Ask now, or, as a tunnel that repeats a call, as soon as somebody is there."""

        def ask(shim: Shim) -> None:
            shim.request(work(shim))

        shim = self._world.shim
        if shim is not None and shim.is_serving:
            ask(shim)
        else:
            self._world.happened[f"{what}: nobody there"] += 1
            self._world.waiting.append(ask)

    # Answers.

    async def _submit(self, shim: Shim, task: int) -> None:
        task_id = f"t{task}"
        config = self._world.schedule.configs[task]
        try:
            await shim.core.submit(config)
        except (TaskExists, StoreError, ShuttingDown) as error:
            self._answered(shim, "submit", task_id, error)
            if not isinstance(error, TaskExists):
                self._must_be_unknown(shim, task)
        else:
            self._answered(shim, "submit", task_id, None)
            self._world.stories.submitted(task_id)

    async def _terminate(
        self, shim: Shim, task_id: str, asked: tuple[str, str], timeout: int
    ) -> None:
        story = self._world.stories.get(task_id)
        if story is not None and task_id in shim.core.book:
            story.asked.append(asked)
            until = self._world.loop.time() + timeout
            story.grace_until = min(until, story.grace_until or until)
        try:
            info = await shim.core.terminate(task_id, *asked, timeout)
        except (TaskNotFound, EngineError, ResourceError, StoreError) as error:
            self._answered(shim, "terminate", task_id, error)
        else:
            self._answered(shim, "terminate", task_id, None)
            if story is not None and not story.is_gone:
                self._check_terminated(shim, story, info)

    async def _remove(self, shim: Shim, task_id: str) -> None:
        story = self._world.stories.get(task_id)
        if story is not None:
            story.removals += 1
        try:
            await shim.core.remove(task_id)
        except (TaskNotTerminated, TaskNotFound) as error:
            if story is not None:
                story.removals -= 1
            self._answered(shim, "remove", task_id, error)
        except (EngineError, ResourceError, StoreError) as error:
            self._answered(shim, "remove", task_id, error)
        else:
            self._answered(shim, "remove", task_id, None)
            if story is not None:
                self._check_removed(shim, story)

    def _answered(self, shim: Shim, what: str, task_id: str, error: ShimError | None) -> None:
        world = self._world
        self.answers += 1
        outcome = type(error).__name__ if error else "200"
        world.happened[f"{what}: {outcome}"] += 1
        if world.tells:
            world.tell(f"ANSWER {what} {task_id}: {outcome} {error or ''}")
        world.watch.observe(shim)

    # What must be true with an answer.

    def _must_be_unknown(self, shim: Shim, task: int) -> None:
        task_id, world = f"t{task}", self._world
        if world.stories.get(task_id) is not None:
            return  # there was one before
        content = world.disk.visible.get(dir_of(task))
        if task_id in shim.core.book or (content is not None and content.record is not None):
            world.violate(f"submit of {task_id} was refused and has left something")

    def _check_terminated(self, shim: Shim, story: Story, info: TaskInfo) -> None:
        world = self._world
        world.stories.terminated(story, info.termination_reason, info.termination_message)
        if info.status is not TaskStatus.TERMINATED:
            world.violate(f"terminate of {story.id} is answered and it is {info.status.value}")
        if world.watch.runs(story.id):
            world.violate(f"terminate of {story.id} is answered while its container runs")
        self._check_released(shim, story)

    def _check_removed(self, shim: Shim, story: Story) -> None:
        world = self._world
        world.stories.removed(story)
        if any(
            container is world.engine.containers.get(container.id)
            for container in story.containers
        ):
            world.violate(f"remove of {story.id} is answered and its container is still there")
        self._check_released(shim, story)

    def _check_released(self, shim: Shim, story: Story) -> None:
        world = self._world
        if story.config is None or story.is_damaged:
            return  # what it took is written down nowhere
        if world.stories.get(story.id) not in (story, None):
            return  # submitted anew meanwhile
        if story.id in shim.gpus.held():
            world.violate(f"{story.id} holds GPUs after it was answered as ended")
        others = [
            entry.task.record
            for entry in shim.core.book
            if entry.task.id != story.id and not entry.task.released
        ]
        lost = [damaged.config for damaged in world.damaged if damaged.config is not None]
        lost_volumes = {volume.name for config in lost for volume in config.volumes}
        for volume in story.config.volumes:
            is_needed = volume.name in _volumes(others) | lost_volumes
            if volume.name in world.host.mounted and not is_needed:
                world.violate(f"{story.id} is answered as ended and {volume.name} is mounted")
        user = story.config.host_ssh_user
        left = set(story.config.host_ssh_keys) & set(world.host.keys.get(user, ()))
        lost_keys = {key for config in lost for key in config.host_ssh_keys}
        if left - _keys(others, user) - lost_keys:
            world.violate(f"{story.id} is answered as ended and its keys are there")


def _volumes(records: Sequence[TaskRecord]) -> set[str]:
    return {volume.name for record in records for volume in record.config.volumes}


def _keys(records: Sequence[TaskRecord], user: str) -> set[str]:
    return {
        key
        for record in records
        if record.config.host_ssh_user == user
        for key in record.config.host_ssh_keys
    }
