"""What is known, from outside, of each task: what was answered, what is on disk, what it did.

A story follows one incarnation of an id, from the moment its record can be seen to the moment its
directory is certainly gone. What contradicts it is a violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.record import Step, TaskRecord
from dstack_shim_contracts.statuses import Reason

from dstack_shim.engine.protocol import LABEL_TASK_ID
from dstack_shim.tasks.outcomes import LAST_LINES
from tests.lab.fake_engine import FakeContainer
from tests.simulation.disk import Content, Disk
from tests.simulation.schedule import SECRET

Violate = Callable[[str], None]


@attrs.define
class Exit:
    """The end of a container: its code, and what ended it."""

    code: int
    by: str


@attrs.define(eq=False)
class Story:
    """One incarnation of an id.

    ``excuses`` are things that happened to it and may end it as an ``executor_error`` or
    ``creating_container_error``. ``is_loose``: its record was damaged or lost what dstack's own
    shim does not keep, so that less can be expected of it. ``removals`` are asked for, under way
    or done. ``config`` is None for a container that nobody submitted here.
    """

    id: str
    dir: str
    config: TaskConfig | None = None
    removals: int = 0
    is_accepted: bool = False
    is_terminated: bool = False
    is_gone: bool = False
    is_loose: bool = False
    is_bare: bool = False
    """Begun by a container without a record: gone with it, if nobody has made it one."""
    is_damaged: bool = False
    fixed: tuple[str, str] | None = None
    asked: list[tuple[str, str]] = attrs.Factory(list)
    excuses: set[str] = attrs.Factory(set)
    exits: list[Exit] = attrs.Factory(list)
    containers: list[FakeContainer] = attrs.Factory(list)
    never_started: bool = False
    grace_until: float | None = None
    """Until when its container may take its time, by the shortest grace that was given."""

    @property
    def may_be_gone(self) -> bool:
        """Whether a remove was asked for and not refused."""
        return self.removals > 0

    @property
    def has_started(self) -> bool:
        """Whether a container of it has run."""
        return any(container.starts for container in self.containers)


class Stories:
    """The stories of a world, by id."""

    def __init__(self, disk: Disk, violate: Violate) -> None:
        self.by_id: dict[str, Story] = {}
        self.ended = 0
        self.output_may_be_lost = False
        """Whether the engine refused to show some container's output."""
        self._disk = disk
        self._violate = violate
        self._dirs: dict[str, str] = {}

    def __iter__(self) -> Iterator[Story]:
        return iter(self.by_id.values())

    def get(self, task_id: str) -> Story | None:
        """The story of an id that is not over."""
        story = self.by_id.get(task_id)
        return None if story is None or story.is_gone else story

    # The disk.

    def record_appears(self, dir: str, record: TaskRecord) -> Story | None:
        """A first record can be seen; its story, unless it is of a container adopted."""
        if record.intent is None or record.intent.step is not Step.PREPARING or record.terminated:
            return None
        old = self.get(record.id)
        if old is not None and not (old.may_be_gone or old.is_damaged or old.is_bare):
            self._violate(f"{record.id} is made anew while it exists")
        return self.begin(record.id, dir, record.config)

    def record_is_taken_back(self, dir: str) -> None:
        """The first record could not be flushed."""
        self._gone(dir)

    def certain(self, dir: str, content: Content | None) -> None:
        """A directory certainly holds this from now on."""
        record = None if content is None else content.record
        if record is None:
            story = self.by_id.get(self._dirs.get(dir, ""))
            if content is None or (story and not story.is_accepted and not story.is_damaged):
                self._gone(dir)  # damage, on the other hand, leaves a task to look after
            return
        if SECRET in (record.config.registry_username, record.config.registry_password):
            self._violate(f"the record in {dir} holds credentials")
        story = self.get(record.id)
        if story is not None and record.termination_reason:
            reason = (record.termination_reason, record.termination_message)
            self.fix(story, reason, f"the record in {dir}")

    def fix(self, story: Story, reason: tuple[str, str], where: str) -> None:
        """A reason is recorded for good: it never changes again."""
        if story.fixed is None or story.is_damaged:
            story.fixed = reason
        elif story.fixed != reason:
            self._violate(
                f"the reason of {story.id} changes from {story.fixed} to {reason}: {where}"
            )

    def excuse_unstarted(self, why: str) -> None:
        """Whatever has not run yet may end by this."""
        for story in self.by_id.values():
            if not story.has_started:
                story.excuses.add(why)

    def begin(self, task_id: str, dir: str, config: TaskConfig | None = None) -> Story:
        """A new incarnation of an id."""
        story = Story(task_id, dir, config)
        self.by_id[task_id] = story
        self._dirs[dir] = task_id
        return story

    def _gone(self, dir: str) -> None:
        story = self.by_id.get(self._dirs.get(dir, ""))
        if story is None or story.dir != dir or story.is_gone:
            return
        if story.is_accepted and not (story.may_be_gone or story.is_damaged):
            self._violate(f"the directory of {story.id} goes before anybody removes it")
        story.is_gone = True
        self.ended += 1

    # Containers.

    def container_created(self, container: FakeContainer) -> Story:
        """Its story, a new one for a container nobody submitted here."""
        task_id = container.spec.labels[LABEL_TASK_ID]
        story = self.get(task_id)
        if story is None:
            story = self.begin(task_id, container.spec.name)
            story.excuses.add("a container without a record")
            story.is_loose = story.is_bare = True
        story.containers.append(container)
        return story

    def of_container(self, container: FakeContainer) -> Story | None:
        """The story a container belongs to."""
        return self.by_id.get(container.spec.labels.get(LABEL_TASK_ID, ""))

    # Answers.

    def submitted(self, task_id: str) -> None:
        """A submit was answered with success."""
        story = self.get(task_id)
        if story is None:
            self._violate(f"submit of {task_id} is answered without a record")
            return
        story.is_accepted = True
        if story.is_damaged:
            return
        for content in self._disk.possible(story.dir):
            if content is None or content.record is None or content.record.id != task_id:
                self._violate(f"submit of {task_id} is answered before it is certain on disk")

    def terminated(self, story: Story, reason: str, message: str) -> None:
        """A terminate was answered with success: reason and message as answered."""
        story.is_terminated = True
        if reason:
            self.fix(story, (reason, message), "the answer of terminate")
        if story.is_damaged:
            return
        for content in self._disk.possible(story.dir):
            if content is None:
                if not story.may_be_gone:
                    self._violate(f"{story.id} can vanish after its terminate is answered")
                continue
            record = content.record
            if record is None or not (record.terminated and record.cleaned_up):
                self._violate(f"terminate of {story.id} is answered before it is certain on disk")
            elif reason and record.termination_reason != reason:
                self._violate(f"terminate of {story.id}: its answer's reason is not certain")

    def removed(self, story: Story) -> None:
        """A remove was answered with success."""
        if story.is_gone:
            return  # certain already; by now the directory may be of the next task of its id
        if any(content is not None for content in self._disk.possible(story.dir)):
            self._violate(f"remove of {story.id} is answered before it is certain on disk")
        self._gone(story.dir)
        story.is_gone = True

    # Outcomes.

    def check_outcome(self, story: Story, reason: str, message: str) -> None:
        """Whether a task may have ended this way, from all that happened to it."""
        wrong = _wrong(story, reason, message)
        if wrong == _NOT_ITS_OUTPUT and self.output_may_be_lost:
            return
        if wrong:
            self._violate(f"{story.id} ended with {reason!r} ({message!r}): {wrong}")


_NOT_ITS_OUTPUT = "its message is not its last output"


def _wrong(story: Story, reason: str, message: str) -> str:
    if (reason, message) in story.asked:
        return ""
    if reason == Reason.DONE_BY_RUNNER:
        return _wrong_success(story, message)
    if reason == Reason.CONTAINER_EXITED_WITH_ERROR:
        return _wrong_failure(story, message)
    if reason in (Reason.EXECUTOR_ERROR, Reason.CREATING_CONTAINER_ERROR):
        lacked_gpus = story.config is not None and story.config.gpu > 0 and "idle" in message
        return "" if story.excuses or lacked_gpus else "nothing happened to it"
    return "nobody asked for that"


def _wrong_success(story: Story, message: str) -> str:
    zeros = [end for end in story.exits if end.code == 0]
    if not zeros:
        return "no container of it exited with 0"
    if all(end.by == "power" for end in zeros) and not story.is_loose:
        return "the 0 was written by the engine after the power came back"
    return "it has a message" if message else ""


def _wrong_failure(story: Story, message: str) -> str:
    codes = [end.code for end in story.exits if end.code]
    if not codes and not story.never_started:
        return "no container of it failed"
    lines = {
        "\n".join(container.output[-LAST_LINES:])
        for container in story.containers
        if container.output
    }
    if lines and not story.excuses and message not in lines and not story.never_started:
        return _NOT_ITS_OUTPUT
    return ""


def dir_of(task: int) -> str:
    """The directory and container name of a task of the schedule."""
    return container_name(f"job{task}", f"t{task}")
