"""The engine's events on the wire, and a real shim that has nothing else to go by.

A shim whose background step comes once an hour sees an end only if it is told.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.connection import Limits
from dstack_shim.engine.docker import DockerEngine
from dstack_shim.errors import EngineError, EngineUnreachable
from tests.eventually import eventually
from tests.lab.engine import PrivateEngine
from tests.lab.images import RUNS_ON, Images, write_runner
from tests.lab.proxy import CountingProxy, Cut, Hang, Mute, Refuse, Reply, Spoiler
from tests.lab.shim import ShimProcess

EVENTS, LIST = "/events", "/containers/json"
RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED
ENDS_ON_DEMAND = "while [ ! -e /tmp/runner/end ]; do sleep 0.1; done"
HASTY = Limits(connect=1, greeting=1, ask=0.5, events=0.5)
SHIM = """
import sys
from dstack_shim import cli, daemon
daemon.STEP_INTERVAL = daemon.QUIET_INTERVAL = 3600.0
sys.exit(cli.main())
"""


def nothing() -> None:
    """Nobody waits for the beginning."""


@pytest.fixture
async def hasty(proxy: CountingProxy) -> AsyncIterator[DockerEngine]:
    """An engine that is waited for half a second."""
    engine = DockerEngine({"DOCKER_HOST": proxy.address}, limits=HASTY)
    await engine.ping()
    yield engine
    await engine.close()


# The wire.


@pytest.mark.parametrize(
    "spoiler",
    [Refuse(), Hang(), Cut(after=20), Mute(), Reply(200, b"garbage\n")],
    ids=["closed", "hangs", "half a head", "silent", "garbage"],
)
async def test_a_stream_that_does_not_go_on_as_it_should_is_broken(
    hasty: DockerEngine, proxy: CountingProxy, spoiler: Spoiler
) -> None:
    proxy.spoil(spoiler, path=EVENTS)
    with pytest.raises(EngineUnreachable):
        await hasty.events(0, nothing, lambda event: None)


async def test_half_a_line_at_the_end_of_a_stream_is_no_event(
    hasty: DockerEngine, proxy: CountingProxy
) -> None:
    proxy.spoil(Reply(200, b'{"Action": "start"}\n{"Action": "di'), path=EVENTS)
    heard: list[str] = []
    await hasty.events(0, nothing, lambda event: heard.append(event.action))
    assert heard == ["start"]


@pytest.mark.parametrize("reply", [Reply(500, {"message": "no"}), Reply(404, b"")])
async def test_an_engine_that_tells_no_events_says_so(
    hasty: DockerEngine, proxy: CountingProxy, reply: Reply
) -> None:
    proxy.spoil(reply, path=EVENTS)
    with pytest.raises(EngineError):
        await hasty.events(0, nothing, lambda event: None)


async def test_silence_between_two_events_may_last_longer_than_any_answer(
    proxy: CountingProxy,
) -> None:
    limits = Limits(connect=1, greeting=1, ask=0.3, events=60)
    engine = DockerEngine({"DOCKER_HOST": proxy.address}, limits=limits)
    begun = asyncio.Event()
    stream = asyncio.ensure_future(engine.events(time.time(), begun.set, lambda event: None))
    await asyncio.wait_for(begun.wait(), 10)
    await asyncio.wait((stream,), timeout=1)
    assert not stream.done()
    stream.cancel()
    await asyncio.wait((stream,))
    await engine.close()


# The shim.


@pytest.fixture
def shim(tmp_path: Path, proxy: CountingProxy) -> Iterator[ShimProcess]:
    """One that looks once an hour; it is not started."""
    write_runner(Path("/usr/local/bin/dstack-runner"))
    home = tmp_path / "home"
    home.mkdir()
    shim = ShimProcess(home, {"DOCKER_HOST": proxy.address}, command=[sys.executable, "-c", SHIM])
    yield shim
    shim.close()


@pytest.fixture
def patient_shim(tmp_path: Path, proxy: CountingProxy) -> Iterator[ShimProcess]:
    """One as hosts have it; it is not started."""
    write_runner(Path("/usr/local/bin/dstack-runner"))
    home = tmp_path / "home"
    home.mkdir()
    shim = ShimProcess(home, {"DOCKER_HOST": proxy.address})
    yield shim
    shim.close()


def end(shim: ShimProcess, task_id: str) -> None:
    """Let the task's job come to its end."""
    name = shim.client.task(task_id).container_name
    (shim.home / "runners" / name / "runner" / "end").touch()


def test_a_shim_that_never_looks_by_itself_is_told_of_every_end(
    shim: ShimProcess, images: Images, proxy: CountingProxy
) -> None:
    shim.start()
    for number in range(3):
        shim.submit(f"t{number}", images.job(ENDS_ON_DEMAND))
        shim.wait_for(f"t{number}", RUNNING)
    proxy.forget()
    for number in range(3):
        end(shim, f"t{number}")
        shim.wait_for(f"t{number}", TERMINATED)
    # Each end is a list, an inspect, and perhaps one list more for an event that came meanwhile.
    assert 3 <= proxy.count("GET", LIST) <= 6
    shim.terminate()


def test_an_end_while_the_stream_is_broken_is_told_by_the_next(
    shim: ShimProcess, images: Images, proxy: CountingProxy, private_engine: PrivateEngine
) -> None:
    shim.start()
    shim.submit("t1", images.job(ENDS_ON_DEMAND))
    shim.wait_for("t1", RUNNING)
    eventually(lambda: proxy.count("GET", EVENTS) == 1)
    proxy.spoil(Refuse(), path=EVENTS)
    proxy.drop()
    eventually(lambda: proxy.count("GET", EVENTS) > 2, saying="it tries to follow again")
    end(shim, "t1")
    eventually(lambda: not private_engine.has_container_processes(), saying="it ended")
    proxy.mend()
    assert shim.wait_for("t1", TERMINATED).termination_reason == "done_by_runner"


def test_a_shim_that_follows_events_goes_at_once_when_told_to(shim: ShimProcess) -> None:
    shim.start()
    eventually(lambda: "events.followed" in shim.log())
    began = time.monotonic()
    assert shim.terminate() == 0
    assert time.monotonic() - began < 4  # whoever waits for the stream waits for its drain, 5 s


@pytest.mark.slow
def test_an_idle_shim_asks_the_engine_six_times_a_minute(
    patient_shim: ShimProcess, images: Images, proxy: CountingProxy
) -> None:
    """Slow because twenty seconds are to pass: that nothing is asked in between is the point."""
    patient_shim.start()
    for number in range(3):
        patient_shim.submit(f"t{number}", images.job(RUNS_ON))
        patient_shim.wait_for(f"t{number}", RUNNING)
    proxy.forget()
    eventually(lambda: proxy.count("GET", LIST) == 1, within=20)
    began = time.monotonic()
    eventually(lambda: proxy.count("GET", LIST) == 3, within=60)
    assert time.monotonic() - began > 19
    assert len(proxy.requests) == 3


@pytest.mark.slow
def test_ends_are_seen_however_silent_the_events_are(
    patient_shim: ShimProcess, images: Images, proxy: CountingProxy
) -> None:
    """Slow because the first silence is only seen by a list, ten seconds after the last."""
    proxy.spoil(Mute(), path=EVENTS)
    patient_shim.start()
    for number in range(2):
        patient_shim.submit(f"t{number}", images.job(ENDS_ON_DEMAND))
        patient_shim.wait_for(f"t{number}", RUNNING)
    end(patient_shim, "t0")
    patient_shim.wait_for("t0", TERMINATED)
    eventually(lambda: "events.lost" in patient_shim.log(), within=20)
    assert "it is silent about what a list shows" in patient_shim.log()
    proxy.forget()
    eventually(lambda: proxy.count("GET", LIST) >= 3, saying="it looks every second", within=8)
    end(patient_shim, "t1")
    patient_shim.wait_for("t1", TERMINATED)


def test_a_restarted_engine_is_followed_again(
    tmp_path: Path, private_engine: PrivateEngine
) -> None:
    write_runner(Path("/usr/local/bin/dstack-runner"))
    home = tmp_path / "home"
    home.mkdir()
    private = PrivateEngine(live_restore=True, shares_network=True)
    private.start()
    shim = ShimProcess(home, private.environ, command=[sys.executable, "-c", SHIM])
    shim.start()
    client = private.client()
    shim.submit("t1", Images(client).job(ENDS_ON_DEMAND))
    client.close()
    shim.wait_for("t1", RUNNING)
    private.restart()
    eventually(lambda: shim.log().count("events.followed") == 2, within=20)
    end(shim, "t1")
    shim.wait_for("t1", TERMINATED)
    shim.close()
    private.close()
