"""How a process leaves: which of a shutdown, a signal and a file that will not do has the last word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from dstack_shim.departure import Departure
from dstack_shim.errors import UpgradeRefused
from dstack_shim.log import event_log
from dstack_shim.tasks.core import Core
from dstack_shim.upgrade import Upgrades

FILE = Path("/bin/.dstack-shim.next")


class StandIn:
    """A core and upgrades: notes what it is told, and chooses what it was told to choose."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.book: list[Any] = []
        self.choice: Path | Exception | None = None
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    def hold(self) -> None:
        self.told.append("hold")

    def admit(self) -> None:
        self.told.append("admit")

    async def choose(self, tasks: Callable[[], object]) -> Path | None:
        assert tasks() == {}
        self.asked.set()
        await self.go.wait()
        if isinstance(self.choice, Exception):
            raise self.choice
        return self.choice


@pytest.fixture
def host() -> StandIn:
    return StandIn()


@pytest.fixture
def departure(host: StandIn) -> Departure:
    return Departure(cast("Upgrades", host), event_log())


def core(host: StandIn) -> Core:
    return cast("Core", host)


@pytest.mark.parametrize("choice", [None, FILE])
async def test_a_shutdown_holds_submits_and_leaves_by_what_was_chosen(
    host: StandIn, departure: Departure, choice: Path | None
) -> None:
    host.choice = choice
    departure.begin(core(host))
    assert host.told == ["hold"]
    await asyncio.wait_for(departure.wait(), 5)
    assert departure.successor == choice
    assert host.told == ["hold"]


@pytest.mark.parametrize("error", [UpgradeRefused("it would lose task t1"), ValueError("a fault")])
async def test_where_no_file_would_do_it_goes_on_and_may_be_asked_again(
    host: StandIn, departure: Departure, error: Exception
) -> None:
    host.choice = error
    for times in (1, 2):
        departure.begin(core(host))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert host.told == ["hold", "admit"] * times
        assert not departure.is_under_way


async def test_a_second_shutdown_changes_nothing(host: StandIn, departure: Departure) -> None:
    host.go.clear()
    departure.begin(core(host))
    departure.begin(core(host))
    assert host.told == ["hold"]
    departure.exit(force=False)
    await departure.wait()


async def test_a_signal_ends_the_choosing_and_the_process(
    host: StandIn, departure: Departure
) -> None:
    host.go.clear()
    host.choice = FILE
    departure.begin(core(host))
    await host.asked.wait()
    departure.exit(force=True)
    await asyncio.wait_for(departure.wait(), 5)
    assert departure.successor is None
    assert departure.forced


async def test_a_signal_after_the_choice_ends_the_process_all_the_same(
    host: StandIn, departure: Departure
) -> None:
    host.choice = FILE
    departure.begin(core(host))
    await departure.wait()
    departure.exit(force=False)
    assert departure.successor is None
