"""A shim with tasks while its engine is away in every way there is: nobody's task ends by that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import attrs
import docker
import pytest
from dstack_shim_contracts.statuses import TaskStatus

from tests.eventually import eventually
from tests.evidence import Evidence
from tests.lab.engine import PrivateEngine
from tests.lab.images import RUNS_ON, Images, write_runner
from tests.lab.proxy import CountingProxy, Cut, Hang, Refuse, Reply, Spoiler
from tests.lab.shim import ShimProcess

RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED
LIST = "/containers/json"
FAILED = "container_exited_with_error"
ENDS = "until [ -e /tmp/runner/go ]; do sleep 0.05; done; exit 7"


@attrs.define
class Place:
    """An engine, the way to it, and a shim that has two tasks on it."""

    engine: PrivateEngine
    proxy: CountingProxy
    shim: ShimProcess

    def spoil(self, spoiler: Spoiler, path: str = ".*") -> Callable[[], None]:
        self.proxy.spoil(spoiler, path=path)
        return self.proxy.mend


@attrs.frozen
class Outage:
    """``begin`` takes the engine away and returns what brings it back.

    ``seconds`` it lasts at least, in full counts ``full``. Without ``survive`` the engine itself
    ends the containers, and that is the truth about their tasks.
    """

    name: str
    begin: Callable[[Place], Callable[[], None]]
    live_restore: bool = True
    survive: bool = True
    seconds: float = 1.5
    full: float = 1.5

    def __str__(self) -> str:
        return self.name


def _killed(place: Place) -> Callable[[], None]:
    place.engine.kill()
    return lambda: place.engine.start(within=60)


def _stopped(place: Place) -> Callable[[], None]:
    place.engine.term()
    return lambda: place.engine.start(within=60)


def _without_socket(place: Place) -> Callable[[], None]:
    place.proxy.close()
    return place.proxy.open


SAMPLE = (
    Outage("killed, live-restore", _killed),
    Outage("socket gone", _without_socket, full=30.0),
    Outage("answers 500", lambda place: place.spoil(Reply(500, {"message": "not now"}))),
    Outage("half a list", lambda place: place.spoil(Cut(after=250), LIST)),
)
FULL = (
    Outage("stopped, live-restore", _stopped),
    Outage("stopped", _stopped, live_restore=False, survive=False),
    Outage("killed", _killed, live_restore=False, survive=False),
    Outage("refuses", lambda place: place.spoil(Refuse())),
    Outage("hangs", lambda place: place.spoil(Hang()), full=45.0),
    Outage("a list that is none", lambda place: place.spoil(Reply(200, None), LIST)),
)
"""Engines take their time for these: 12 s to come back from a kill, 10 s to stop containers; and
the shim waits for an answer for 30 s.
"""


@attrs.define
class Tally:
    outages: int = 0
    falsely_ended: int = 0
    doubles: int = 0
    unknown: int = 0


@pytest.fixture(scope="module")
def tally(evidence: Evidence) -> Iterator[Tally]:
    tally = Tally()
    yield tally
    wrong = tally.falsely_ended + tally.doubles + tally.unknown
    evidence.write("outages", **attrs.asdict(tally), census_violations=wrong)


@pytest.fixture
def make_place(tmp_path: Path) -> Iterator[Callable[[Outage], Place]]:
    with ExitStack() as stack:

        def make(outage: Outage) -> Place:
            engine = PrivateEngine(live_restore=outage.live_restore, shares_network=True)
            stack.callback(engine.close)
            engine.start()
            proxy = stack.enter_context(CountingProxy(engine.socket, engine.directory / "p"))
            home = tmp_path / "home"
            home.mkdir()
            write_runner(Path("/usr/local/bin/dstack-runner"))
            shim = ShimProcess(home, {"DOCKER_HOST": proxy.address})
            stack.callback(shim.close)
            shim.start()
            return Place(engine, proxy, shim)

        yield make


def look(shim: ShimProcess, until: threading.Event, tally: Tally) -> None:
    """Count what must never be told while the engine is away."""
    while not until.wait(0.1):
        told = shim.statuses()
        tally.falsely_ended += sum(status != "running" for status in told.values())
        tally.unknown += len({"stays", "ends"} - told.keys())


def started(client: docker.APIClient, box: str) -> tuple[str, int]:
    state = client.inspect_container(box)["State"]
    return state["StartedAt"], state["Pid"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "outage", [*SAMPLE, *(pytest.param(one, marks=pytest.mark.full) for one in FULL)], ids=str
)
def test_an_outage_ends_no_task_and_hides_no_end(
    make_place: Callable[[Outage], Place], outage: Outage, tally: Tally, evidence: Evidence
) -> None:
    """Only a shim on an engine that is really away shows what it tells its server meanwhile."""
    place = make_place(outage)
    shim, client = place.shim, place.engine.client()
    images = Images(client)
    boxes = {}
    for task_id, job in {"stays": RUNS_ON, "ends": ENDS}.items():
        shim.submit(task_id, images.job(job))
        boxes[task_id] = shim.wait_for(task_id, RUNNING)
    before = started(client, boxes["stays"].container_id)
    back, over = outage.begin(place), threading.Event()
    watcher = threading.Thread(target=look, args=(shim, over, tally))
    watcher.start()
    (shim.home / "runners" / boxes["ends"].container_name / "runner" / "go").touch()
    began = time.monotonic()
    eventually(lambda: "engine.lost" in shim.log(), within=60, saying="it is noticed")
    lasts = outage.full if evidence.full else outage.seconds
    over.wait(max(0.0, began + lasts - time.monotonic()))
    over.set()
    watcher.join()
    back()
    assert shim.wait_for("ends", TERMINATED, within=60).termination_reason == FAILED
    if outage.survive:
        assert shim.client.task("stays").status is RUNNING
        assert started(client, boxes["stays"].container_id) == before
    else:
        assert shim.wait_for("stays", TERMINATED, within=60).termination_reason == FAILED
    tally.outages += 1
    tally.doubles += len(client.containers(all=True)) - len(boxes)
    shim.kill()
    shim.start()
    assert shim.statuses() == {
        "stays": "running" if outage.survive else "terminated",
        "ends": "terminated",
    }
    assert tally == Tally(outages=tally.outages)
    client.close()
