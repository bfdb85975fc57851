"""Watches a world as it goes along: what must hold at every instant, not only in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.record import Step, TaskRecord
from dstack_shim_contracts.statuses import TaskStatus, may_become

from dstack_shim.engine.protocol import LABEL_IS_TASK, LABEL_TASK_ID
from dstack_shim.resources.protocol import Claim
from dstack_shim.tasks.book import Entry
from tests.lab.fake_engine import FakeContainer
from tests.simulation.shim import RUNNER_PORT, Shim
from tests.simulation.stories import Exit, Story

if TYPE_CHECKING:
    from tests.simulation.world import World

View = tuple[TaskStatus, str, str]


class Watch:
    """The world's eyes; implements :class:`tests.simulation.engine.Watcher`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stories = world.stories
        self._seen: dict[Entry, View] = {}
        self._late: set[str] = set()
        self.strangers: set[str] = set()
        """Tasks whose name a stranger's container has or had."""
        disk = world.disk
        disk.on_certain = self._stories.certain
        disk.on_first_record = self._record_appears
        disk.on_taken_back = self._stories.record_is_taken_back

    def _record_appears(self, dir: str, record: TaskRecord) -> None:
        story = self._stories.record_appears(dir, record)
        if story is None:
            return
        if self._world.engine.is_down:
            story.excuses.add("the engine was down")
        if story.id in self.strangers:
            story.excuses.add("a stranger has its name")

    # What happens to shims.

    def generation_begins(self) -> None:
        """Another process: what it tells starts anew."""
        self._seen.clear()

    def excuse_starting(self, shim: Shim, why: str) -> None:
        """Something went wrong that may end whatever is being started."""
        for entry in shim.core.book:
            if entry.task.status not in _SETTLED:
                story = self._stories.get(entry.task.id)
                if story is not None:
                    story.excuses.add(why)

    def host_halts(self) -> None:
        """What runs now ends without having been asked."""
        self._stories.excuse_unstarted("the host went down")
        for story in self._stories:
            for end in story.exits:
                if end.by == "power":
                    end.by = "power, and another boot since"  # nothing tells them apart any more
        for container in self.alive():
            owner = self._stories.of_container(container)
            if owner is not None:
                owner.excuses.add("the host went down while it ran")

    # What happens to containers.

    def container_created(self, container: FakeContainer, *, by_living: bool) -> None:
        """A create has taken effect."""
        if LABEL_IS_TASK not in container.spec.labels:
            return
        story = self._stories.container_created(container)
        if not by_living or story.is_damaged:
            return
        for record in self._certain_records(story.dir):
            intent = None if record is None else record.intent
            if record is None or intent is None or intent.step not in _BEFORE_A_CREATE:
                self._world.violate(f"{story.id} gets a container before it is written down")
            elif set(gpus_of(container)) - set(record.gpus or ()):
                self._world.violate(f"{story.id} gets GPUs that are not written down")

    def container_started(self, container: FakeContainer, *, by_living: bool) -> None:
        """It runs from now on."""
        if not by_living:
            self._late.add(container.id)
        self._world.tell(f"container of {container.spec.labels.get(LABEL_TASK_ID)} runs")
        story = self._stories.of_container(container)
        for other in self.alive():
            if other is container or not {container.id, other.id}.isdisjoint(self._late):
                continue
            if self._stories.of_container(other) is story:
                self._world.violate(f"two containers of {other.spec.labels[LABEL_TASK_ID]} run")
            shared = set(gpus_of(other)) & set(gpus_of(container))
            if shared:
                self._world.violate(f"{min(shared)} is under two running containers")

    def container_exited(self, container: FakeContainer, by: str) -> None:
        """It does not run any more."""
        self._world.tell(
            f"container of {container.spec.labels.get(LABEL_TASK_ID)} exits "
            f"with {container.exit_code} by {by}"
        )
        story = self._stories.of_container(container)
        if story is not None:
            story.exits.append(Exit(container.exit_code, by))

    def told_to_stop(self, container: FakeContainer, timeout: int) -> None:
        """A living shim asks for its end within ``timeout`` seconds."""
        story = self._stories.of_container(container)
        if story is None or story.grace_until is None or not container.state.alive:
            return
        # Something else may have ended the task for good, or somebody removes it.
        is_bound = not (story.excuses or story.removals or story.is_loose)
        if is_bound and self._world.loop.time() + timeout < story.grace_until - 1:
            self._world.violate(f"{story.id} is cut off before its grace has run out")

    def start_failed(self, container: FakeContainer) -> None:
        """It cannot run."""
        story = self._stories.of_container(container)
        if story is not None:
            story.never_started = True

    def alive(self) -> list[FakeContainer]:
        """Labelled containers that run."""
        return [
            container
            for container in self._world.engine.containers.values()
            if container.state.alive and LABEL_IS_TASK in container.spec.labels
        ]

    def runs(self, task_id: str) -> bool:
        """Whether a container of the task runs that a living shim can know of."""
        return any(
            container.spec.labels[LABEL_TASK_ID] == task_id and container.id not in self._late
            for container in self.alive()
        )

    # What is taken and given back.

    def may_take(self, claim: Claim) -> None:
        """Nothing is taken before it is certain on disk who takes it."""
        story = self._stories.get(claim.id)
        if story is not None and story.is_damaged:
            return
        for record in self._certain_records(container_name(claim.config.name, claim.id)):
            if record is None or record.id != claim.id or record.cleaned_up:
                self._world.violate(f"{claim.id} takes something before it is written down")

    def may_give(self, claim: Claim) -> None:
        """Nothing is given back while it may be in use."""
        if self.runs(claim.id):
            self._world.violate(f"something of {claim.id} is given back while its container runs")

    def _certain_records(self, dir: str) -> list[TaskRecord | None]:
        return [
            None if content is None else content.record
            for content in self._world.disk.possible(dir)
        ]

    # What the API tells.

    def observe(self, shim: Shim) -> None:
        """Look at all tasks as a server would."""
        if not shim.is_serving:
            return
        book = shim.core.book
        for story in self._stories:
            is_due = story.is_accepted and not (
                story.may_be_gone or story.is_gone or story.is_damaged
            )
            if is_due and story.id not in book:
                self._world.violate(f"{story.id} is accepted and unknown")
        for entry in book:
            record = entry.task.record
            view = (entry.task.status, record.termination_reason, record.termination_message)
            seen = self._seen.get(entry)
            if view != seen:
                self._seen[entry] = view
                self._check(entry, seen, view)

    def _check(self, entry: Entry, seen: View | None, view: View) -> None:
        task, (status, *reason) = entry.task, view
        if seen is not None:
            old, *old_reason = seen
            if old is not status and not may_become(old, status):
                self._world.violate(f"{task.id} goes from {old.value} to {status.value}")
            if old_reason[0] and old_reason != reason:
                self._world.violate(
                    f"the reason of {task.id} changes from {old_reason} to {reason}"
                )
        if (
            status is TaskStatus.RUNNING
            and task.record.config.network_mode == "bridge"
            and task.ports is not None
            and not any(port.container == RUNNER_PORT for port in task.ports)
        ):
            self._world.violate(f"{task.id} is shown running without the runner's port")
        story = self._stories.get(task.id)
        if story is not None:
            self._check_story(entry, story, (reason[0], reason[1]))

    def _check_story(self, entry: Entry, story: Story, reason: tuple[str, str]) -> None:
        if entry.lock.locked() or story.is_damaged:
            return  # between the disk and the book
        if story.fixed is not None and reason != story.fixed:
            self._world.violate(f"{story.id} is told with {reason}, recorded was {story.fixed}")
        if story.is_terminated and not entry.task.terminated and not story.is_loose:
            self._world.violate(f"{story.id} was terminated and is {entry.task.status.value}")


_BEFORE_A_CREATE = frozenset({Step.CREATING, Step.STARTING})
_SETTLED = frozenset({TaskStatus.RUNNING, TaskStatus.TERMINATED})


def gpus_of(container: FakeContainer) -> tuple[str, ...]:
    """The GPUs a container was given."""
    return tuple(gpu for request in container.spec.device_requests for gpu in request.device_ids)
