"""The rules of a replacement in place: what may take over, and what an attempt has come to."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import pytest
from dstack_shim_contracts.api import SHIM, ComponentStatus, TaskListItem
from dstack_shim_contracts.codec import decode, encode
from dstack_shim_contracts.features import PERSISTED_STATE
from dstack_shim_contracts.statuses import TaskStatus
from dstack_shim_contracts.upgrade import (
    MOST_UNFIT,
    Attempt,
    CheckReport,
    Handover,
    Outcome,
    ShimFile,
    UpgradeState,
)

from dstack_shim import takeover
from dstack_shim.components import InstalledComponents, Target
from dstack_shim.errors import CommandTimedOut, UpgradeRefused
from dstack_shim.host.commands import MAX_OUTPUT, Finished
from dstack_shim.host.machine import boot_id
from dstack_shim.log import event_log
from dstack_shim.preflight import KnownTask, objection
from dstack_shim.shim_files import ShimFiles, shim_target
from dstack_shim.staged import file_digest
from dstack_shim.takeover import Possessions
from dstack_shim.upgrade import DOUBTS, Upgrades
from dstack_shim.upgrade_rules import PROBATION, seen_after_an_end
from dstack_shim.upgrade_state import UpgradeFile
from tests.shim.test_components import shim as shim_file

RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED
PULLING, CREATING = TaskStatus.PULLING, TaskStatus.CREATING
OLD, NEW = "0.22.5", "0.22.5.post1"


def report(**tasks: TaskStatus) -> CheckReport:
    items = tuple(TaskListItem(task_id, status) for task_id, status in tasks.items())
    return CheckReport(NEW, (PERSISTED_STATE,), items, tuple(tasks), (), ())


def known(status: TaskStatus, *, recorded: bool = True) -> KnownTask:
    return KnownTask(status, recorded)


# What may take over.


def test_a_file_that_keeps_every_task_may_take_over() -> None:
    tasks = {"t1": known(RUNNING), "t2": known(TERMINATED), "t3": known(PULLING)}
    assert objection(report(t1=RUNNING, t2=TERMINATED, t3=PULLING), NEW, tasks, tasks) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": OLD}, "reports version '0.22.5', not '0.22.5.post1'"),
        ({"features": ()}, "keeps no state"),
        ({"problems": ("engine: no answer", "more")}, "its check found: engine: no answer"),
        ({"tasks": ()}, "would lose task t1"),
        ({"recorded": ()}, "cannot read the record of task t1"),
        (
            {"tasks": (TaskListItem("t1", TERMINATED),)},
            "takes task t1 for terminated, not running",
        ),
    ],
)
def test_a_file_that_does_not_is_refused_with_the_reason(
    change: dict[str, object], words: str
) -> None:
    tasks = {"t1": known(RUNNING)}
    found = attrs.evolve(report(t1=RUNNING), **change)  # type: ignore[arg-type]  # any of its fields
    assert words in objection(found, NEW, tasks, tasks)


def test_a_terminated_task_must_not_come_back_to_life() -> None:
    tasks = {"t1": known(TERMINATED)}
    assert "for running" in objection(report(t1=RUNNING), NEW, tasks, tasks)


def test_what_changed_while_the_check_ran_it_need_not_know() -> None:
    before = {"ended": known(RUNNING), "removed": known(TERMINATED), "new": known(PULLING)}
    after = {"ended": known(TERMINATED), "new": known(RUNNING), "later": known(CREATING)}
    assert objection(report(ended=RUNNING), NEW, before, after) == ""


def test_a_task_that_moves_on_by_itself_is_only_to_be_known() -> None:
    tasks = {"t1": known(PULLING)}
    assert objection(report(t1=CREATING), NEW, tasks, tasks) == ""


def test_a_task_that_never_had_a_record_needs_none() -> None:
    tasks = {"t1": known(RUNNING, recorded=False)}
    found = attrs.evolve(report(t1=RUNNING), recorded=())
    assert objection(found, NEW, tasks, tasks) == ""


# What an attempt has come to.


def attempt(outcome: Outcome, **more: object) -> Attempt:
    made = Attempt(ShimFile(OLD, "a" * 64), ShimFile(NEW, "b" * 64), outcome, "then", "boot")
    return attrs.evolve(made, **more)  # type: ignore[arg-type]  # any of its fields


@pytest.mark.parametrize(
    ("last", "in_place", "same_boot", "outcome", "word"),
    [
        (attempt(Outcome.STOPPING), False, True, Outcome.INTERRUPTED, "before it handed over"),
        (attempt(Outcome.TRYING), False, True, Outcome.DIED, "before it was ready"),
        (attempt(Outcome.TRYING), False, False, Outcome.INTERRUPTED, "host went down"),
        (attempt(Outcome.TRYING), True, True, Outcome.SETTLING, ""),
        (attempt(Outcome.TRYING), True, False, Outcome.SETTLING, ""),
        (attempt(Outcome.SETTLING), True, True, Outcome.SETTLING, ""),
        (attempt(Outcome.SETTLING, deaths=1), True, True, Outcome.DIED, "twice"),
        (attempt(Outcome.SETTLING, deaths=1), True, False, Outcome.DONE, ""),
        (attempt(Outcome.SETTLING, deaths=1), False, True, Outcome.DONE, ""),
        (attempt(Outcome.DONE), True, True, Outcome.DONE, ""),
        (attempt(Outcome.REFUSED), False, True, Outcome.REFUSED, ""),
    ],
)
def test_a_start_to_which_nobody_handed_over_knows_what_that_means(
    last: Attempt, in_place: bool, same_boot: bool, outcome: Outcome, word: str
) -> None:
    seen = seen_after_an_end(last, in_place=in_place, same_boot=same_boot, now=10.0)
    assert seen.outcome is outcome
    assert word in seen.reason


def test_a_first_death_is_counted_and_one_after_the_probation_is_not() -> None:
    settling = attempt(Outcome.SETTLING, ready_at=100.0)
    seen = seen_after_an_end(settling, in_place=True, same_boot=True, now=110.0)
    assert seen.deaths == 1
    late = attrs.evolve(seen, ready_at=100.0)
    seen = seen_after_an_end(late, in_place=True, same_boot=True, now=100.0 + PROBATION)
    assert seen.outcome is Outcome.DONE


def test_a_state_is_read_back_and_remembers_the_latest_unfit_contents(tmp_path: Path) -> None:
    file = UpgradeFile(tmp_path, event_log())
    assert file.read() == UpgradeState()
    state = UpgradeState(attempt(Outcome.DIED))
    for number in range(MOST_UNFIT + 2):
        state = state.with_unfit(ShimFile(NEW, f"{number:064d}"), "it died")
    state = state.with_unfit(ShimFile(NEW, f"{5:064d}"), "it died again")
    file.write(state)
    assert file.read() == state
    assert len(state.unfit) == MOST_UNFIT
    assert state.unfit[-1].reason == "it died again"
    assert state.unfit[0].file.sha256 == f"{2:064d}"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"last":{"outcome":"odd"}}'])
def test_a_damaged_state_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "upgrade.json").write_bytes(content)
    assert UpgradeFile(tmp_path, event_log()).read() == UpgradeState()


def test_under_way_is_told_as_trying_and_on_probation_as_done() -> None:
    told = {outcome: attempt(outcome).told().outcome for outcome in Outcome}
    assert told[Outcome.STOPPING] == told[Outcome.TRYING] == "trying"
    assert told[Outcome.SETTLING] == told[Outcome.DONE] == "done"
    assert told[Outcome.ROLLED_BACK] == "rolled-back"


# Choosing, on a real directory; the new file's check is a stand-in.


class Check:
    """Stands for running the new file: answers every check with what it was told."""

    def __init__(self) -> None:
        self.answer: Finished | Exception = Finished(0)
        self.asked: list[list[str]] = []
        self.go = asyncio.Event()
        self.go.set()

    def says(self, found: CheckReport) -> None:
        self.answer = Finished(0, encode(found).decode())

    async def __call__(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> Finished:
        self.asked.append(list(argv))
        await self.go.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Bench:
    """One shim that runs from ``bin/dstack-shim``, and a proved file that waits beside it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SHIM
        self.waiting = folder / f".{SHIM}.next"
        self.previous = folder / f".{SHIM}.previous"
        self.home = folder / "home"
        self.home.mkdir()
        self.put(self.path, OLD)
        self.check = Check()
        self.components = InstalledComponents(
            (Target(SHIM, self.path, self.waiting),), self.check, event_log()
        )
        self.file = UpgradeFile(self.home, event_log())
        self.upgrades = self.again()

    def put(self, path: Path, version: str, takeover: int = 1) -> None:
        path.write_bytes(shim_file(version, takeover=takeover))
        path.chmod(0o755)

    def again(self) -> Upgrades:
        target = Target(SHIM, self.path, self.waiting)
        self.upgrades = Upgrades(
            ShimFiles(target, event_log()),
            self.components,
            self.file,
            self.check,
            lambda: 0.0,
            event_log(),
        )
        return self.upgrades

    async def choose(self, **tasks: TaskStatus) -> Path | None:
        return await self.upgrades.choose(
            lambda: {task_id: known(status) for task_id, status in tasks.items()}
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_without_a_waiting_file_the_process_exits(bench: Bench) -> None:
    assert await bench.choose() is None
    assert bench.check.asked == []


async def test_a_file_whose_check_satisfies_is_chosen_and_what_was_begun_is_on_disk(
    bench: Bench,
) -> None:
    bench.put(bench.waiting, NEW)
    bench.check.says(report(t1=RUNNING))
    assert await bench.choose(t1=RUNNING) == bench.waiting
    assert bench.check.asked[0][:2] == [str(bench.waiting), "check"]
    state = bench.file.read()
    assert state.last is not None
    assert state.last.outcome is Outcome.STOPPING
    assert state.last.new == ShimFile(NEW, file_digest(bench.waiting))
    assert state.last.old.sha256 == file_digest(bench.path)
    assert bench.components.installing == (SHIM,)  # nobody replaces what was checked


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (CommandTimedOut("it took longer than 30 s"), "longer"),
        (Finished(1, err="dstack-shim: boom\n"), "boom"),
        (Finished(0, "no report"), "no report"),
        (Finished(0, encode(report()).decode()), "lose task t1"),
    ],
)
async def test_a_file_that_is_refused_is_gone_remembered_and_shown_as_an_error(
    bench: Bench, answer: Finished | Exception, word: str
) -> None:
    bench.put(bench.waiting, NEW)
    refused = file_digest(bench.waiting)
    bench.check.answer = answer
    with pytest.raises(UpgradeRefused, match=word):
        await bench.choose(t1=RUNNING)
    assert not bench.waiting.exists()
    assert bench.upgrades.last is not None
    assert bench.upgrades.last.outcome == "refused"
    assert bench.file.read().unfit[-1].file == ShimFile(NEW, refused)
    (entry,) = (await bench.components.list()).components
    assert (entry.version, entry.status) == (NEW, ComponentStatus.ERROR)
    assert bench.components.installing == ()


async def test_a_host_on_which_nothing_can_be_told_is_asked_a_few_times(bench: Bench) -> None:
    bench.put(bench.waiting, NEW)
    bench.check.says(attrs.evolve(report(), problems=("engine: no answer",)))
    for _ in range(DOUBTS - 1):
        with pytest.raises(UpgradeRefused, match="no answer"):
            await bench.choose()
        assert bench.waiting.exists()
        assert bench.file.read().unfit == ()
        assert bench.components.installing == ()
    with pytest.raises(UpgradeRefused, match="no answer"):
        await bench.choose()
    assert not bench.waiting.exists()
    assert len(bench.file.read().unfit) == 1


async def test_where_nothing_can_be_remembered_nothing_is_tried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(bench.waiting, NEW)
    bench.check.says(report())

    def full(state: UpgradeState, *, flush: bool = True) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.file, "write", full)
    with pytest.raises(UpgradeRefused, match="No space left"):
        await bench.choose()
    assert bench.waiting.exists()  # it is not the file's fault


async def test_a_file_that_cannot_take_over_is_put_at_the_path(bench: Bench) -> None:
    bench.put(bench.waiting, NEW, takeover=0)
    old = bench.path.read_bytes()
    assert await bench.choose() is None
    assert NEW.encode() in bench.path.read_bytes()
    assert bench.previous.read_bytes() == old
    assert bench.check.asked == []


async def test_where_the_path_was_replaced_by_hand_there_is_nothing_to_go_back_to(
    bench: Bench,
) -> None:
    bench.put(bench.path, "0.21.5")
    bench.put(bench.waiting, NEW)
    assert await bench.choose() is None
    assert NEW.encode() in bench.path.read_bytes()


# Beginning: what a start makes of what is remembered.


class Executed:
    """Stands for becoming another file, which does not return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file: Path | None = None
        self.given: Handover | None = None
        monkeypatch.setattr(takeover, "execute", self)

    def __call__(self, file: Path, given: Handover) -> None:
        self.file, self.given = file, given


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    return Executed(monkeypatch)


@pytest.fixture
def possessions() -> Iterator[Possessions]:
    with socket.socket() as sock:
        yield Possessions(sock, 0)


def tried(bench: Bench, outcome: Outcome, **more: object) -> Attempt:
    """An attempt from the file at the path to the one that waits, begun in this boot."""
    bench.put(bench.waiting, NEW)
    files = ShimFile(OLD, file_digest(bench.path)), ShimFile(NEW, file_digest(bench.waiting))
    made = Attempt(*files, outcome, "then", boot_id() or "")
    return attrs.evolve(made, **more)  # type: ignore[arg-type]  # any of its fields


async def test_one_that_died_is_gone_unfit_and_reported(
    bench: Bench, possessions: Possessions, executed: Executed
) -> None:
    bench.file.write(UpgradeState(tried(bench, Outcome.TRYING)))
    bench.again().begin(None, possessions)
    assert bench.upgrades.last is not None
    assert bench.upgrades.last.outcome == "died"
    assert not bench.waiting.exists()
    (entry,) = (await bench.components.list()).components
    assert (entry.version, entry.status) == (NEW, ComponentStatus.ERROR)
    assert executed.file is None
    bench.again().begin(None, possessions)  # and still at the next start
    assert bench.file.read().last == bench.upgrades._state.last


def test_one_that_was_interrupted_still_waits(
    bench: Bench, possessions: Possessions, executed: Executed
) -> None:
    bench.file.write(UpgradeState(tried(bench, Outcome.STOPPING)))
    bench.again().begin(None, possessions)
    assert bench.waiting.exists()
    assert bench.file.read().unfit == ()


def test_one_that_died_twice_gives_way_to_the_file_before_it(
    bench: Bench, possessions: Possessions, executed: Executed
) -> None:
    last = tried(bench, Outcome.SETTLING, ready_at=time.monotonic(), deaths=1)
    old = bench.path.read_bytes()
    bench.path.rename(bench.previous)
    bench.waiting.rename(bench.path)
    bench.file.write(UpgradeState(last))
    bench.again().begin(None, possessions)
    assert bench.path.read_bytes() == old
    assert executed.file == bench.path
    assert executed.given is not None
    assert "twice" in executed.given.rolled_back
    assert bench.file.read().unfit[-1].file == last.new


def test_without_the_file_before_it_it_goes_on(
    bench: Bench, possessions: Possessions, executed: Executed
) -> None:
    last = tried(bench, Outcome.SETTLING, ready_at=time.monotonic(), deaths=1)
    bench.waiting.rename(bench.path)
    bench.file.write(UpgradeState(last))
    bench.again().begin(None, possessions)
    assert NEW.encode() in bench.path.read_bytes()
    assert executed.file is None


def test_the_old_file_remembers_why_it_was_gone_back_to(
    bench: Bench, possessions: Possessions, executed: Executed
) -> None:
    bench.file.write(UpgradeState(tried(bench, Outcome.TRYING)))
    given = takeover.handover(possessions, generation=0, path=bench.path, inventory=None)
    bench.again().begin(attrs.evolve(given, rolled_back="it was not ready"), possessions)
    assert bench.upgrades.last is not None
    assert (bench.upgrades.last.outcome, bench.upgrades.last.reason) == (
        "rolled-back",
        "it was not ready",
    )
    assert not bench.waiting.exists()


def test_a_file_that_waits_beside_another_one_than_before_is_dropped(
    bench: Bench, possessions: Possessions
) -> None:
    bench.again().begin(None, possessions)
    bench.put(bench.waiting, NEW)
    bench.again().begin(None, possessions)
    assert bench.waiting.exists()
    deployed = bench.path.with_name("deployed")
    bench.put(deployed, "0.21.5")
    deployed.rename(bench.path)
    bench.again().begin(None, possessions)
    assert not bench.waiting.exists()


def test_taking_its_place_keeps_the_file_before_it_and_is_confirmed_later(
    bench: Bench, possessions: Possessions
) -> None:
    bench.file.write(UpgradeState(tried(bench, Outcome.TRYING)))
    old, new = bench.path.read_bytes(), bench.waiting.read_bytes()
    given = takeover.handover(possessions, generation=1, path=bench.path, inventory=None)
    bench.again().begin(given, possessions)
    bench.upgrades.take_place()
    assert (bench.path.read_bytes(), bench.previous.read_bytes()) == (new, old)
    settling = bench.file.read().last
    assert settling is not None
    assert settling.outcome is Outcome.SETTLING
    assert settling.ready_at > 0
    bench.upgrades.confirm()
    last = bench.file.read().last
    assert last is not None
    assert last.outcome is Outcome.DONE


def test_only_a_file_that_runs_from_its_path_lets_another_wait(tmp_path: Path) -> None:
    (tmp_path / SHIM).touch()
    assert shim_target(tmp_path / SHIM, takes_over=False).waiting is None
    assert shim_target(tmp_path / SHIM, takes_over=True).waiting is not None


def test_unknown_members_of_a_later_release_are_ignored() -> None:
    document = json.loads(encode(report(t1=RUNNING)))
    document["later"] = 1
    assert decode(CheckReport, json.dumps(document)) == report(t1=RUNNING)
