"""A shim that comes back to a full host: how long until it answers, and what it asks the engine."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from pathlib import Path

from dstack_shim_contracts.statuses import TaskStatus

from benchmarks.candidates import Candidate
from benchmarks.samples import Samples, median
from benchmarks.stand import Stand, run_tasks
from tests.eventually import eventually
from tests.lab.images import exits
from tests.lab.proxy import First

_LOOK = 0.002  # s
_MUTE = 2.0  # s after which a shim that says nothing does not serve yet
_ASKED = {"lists": "/containers/json", "inspects": "/containers/(?!json$)[^/]+/json"}


def restarts(
    stand: Stand, candidate: Candidate, samples: Samples, *, tasks: int, rounds: int
) -> None:
    """Restart with 1 task, then with ``tasks`` of which a quarter has ended.

    The bound is 1.5 × the time with 1 task and 2 s more; ``restart bound`` is the share of it
    that was taken.
    """
    times = {}
    for number, over in ((1, 0), (tasks, tasks // 4)):
        name = "1" if number == 1 else "many"
        with stand.populated(candidate, number - over) as home:
            _end_some(stand, candidate, home, over)
            for _ in range(rounds):
                samples.add(f"restart {name}", candidate.name, [_restart(stand, candidate, home)])
            asked = _requests(stand, candidate, home)
            for what in _ASKED:
                samples.add(f"restart {name} {what}", candidate.name, [asked[what]])
        times[name] = median(samples.of(f"restart {name}", candidate.name))
    bound = 1.5 * times["1"] + 2
    samples.add("restart bound", candidate.name, [times["many"] / bound])


def _end_some(stand: Stand, candidate: Candidate, home: Path, count: int) -> None:
    if not count:
        return
    with stand.shim(candidate, home) as shim:
        running = sum(status == "running" for status in shim.statuses().values())
        # They run for long enough to be seen running.
        names = run_tasks(shim, stand.images.job(exits(0, after=3)), count, first=running)
        for name in names:
            shim.wait_for(name, TaskStatus.TERMINATED, within=60)


def _restart(stand: Stand, candidate: Candidate, home: Path) -> float:
    """Seconds from the start of the process to its first answer; it is killed then."""
    shim = stand.unstarted(candidate, home)
    began = time.perf_counter()
    shim.launch()
    eventually(shim.answers, within=60, every=_LOOK, saying="the shim answers")
    seconds = time.perf_counter() - began
    shim.close()
    return seconds


def _requests(stand: Stand, candidate: Candidate, home: Path) -> Counter[str]:
    """What a shim asks the engine before it answers anybody: tried out at each request."""
    asked: Counter[str] = Counter()
    is_back = threading.Event()
    with stand.proxy() as proxy:
        shim = stand.unstarted(candidate, home, address=proxy.address)
        for what, path in _ASKED.items():

            def note(what: str = what) -> None:
                asked[what] += not (_answers(shim.port) or is_back.is_set())

            proxy.spoil(First(note), method="GET", path=path)
        shim.launch()
        eventually(shim.answers, within=60, saying="the shim answers")
        is_back.set()
        shim.close()
    return asked


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_MUTE)
    try:
        connection.request("GET", "/api/healthcheck")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
