"""How soon the end of a job is seen, and how soon a job runs."""

from __future__ import annotations

import random
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from dstack_shim_contracts.statuses import TaskStatus

from benchmarks.candidates import Candidate
from benchmarks.samples import Samples
from benchmarks.stand import ENDS_ON_DEMAND, Stand, run_tasks
from tests.eventually import eventually
from tests.lab.images import RUNS_ON
from tests.lab.shim import ShimProcess

LOOK = 0.005  # s between two looks at the API
PATIENCE = 60.0  # s


def ends(
    stand: Stand, candidate: Candidate, samples: Samples, *, running: int, count: int
) -> None:
    """End ``count`` tasks, one at a time, while ``running`` of them run."""
    image = stand.images.job(ENDS_ON_DEMAND)
    dice = random.Random(f"{running} {count}")
    with stand.home() as home, stand.shim(candidate, home) as shim:
        names = list(run_tasks(shim, image, running))
        for number in range(count):
            time.sleep(dice.random())  # not in step with who looks once a second
            name = names.pop(0)
            samples.add(f"ends {running}", candidate.name, [_end(stand, shim, name) * 1000])
            names += run_tasks(shim, image, 1, first=running + number)


def ends_after_restart(
    stand: Stand, candidate: Candidate, samples: Samples, *, running: int, count: int
) -> None:
    """The same for tasks that an earlier process of the shim has started.

    An end that is not told of within a minute counts as one, and no other is waited for.
    """
    image = stand.images.job(ENDS_ON_DEMAND)
    dice = random.Random(f"{running} {count}")
    with stand.home() as home:
        with stand.shim(candidate, home) as shim:
            names = run_tasks(shim, image, running)
        with stand.shim(candidate, home) as shim:
            for name in names[:count]:
                time.sleep(dice.random())
                try:
                    took = _end(stand, shim, name)
                except TimeoutError:
                    samples.add("ends restarted", candidate.name, [PATIENCE * 1000])
                    break
                samples.add("ends restarted", candidate.name, [took * 1000])


def _end(stand: Stand, shim: ShimProcess, name: str) -> float:
    """Let the task's job end; seconds from its end to the answer that says so."""
    container = shim.client.task(name).container_id
    mounts = stand.client.inspect_container(container)["Mounts"]
    (folder,) = (mount["Source"] for mount in mounts if mount["Destination"] == "/tmp/runner")  # noqa: S108 - in the container
    pipe = Path(folder, "end")
    eventually(pipe.is_fifo, within=30, saying="the job waits for its end")
    pipe.write_text("now\n", encoding="ascii")
    seen = _reached(shim, name, TaskStatus.TERMINATED)
    finished = stand.client.inspect_container(container)["State"]["FinishedAt"]
    shim.client.remove(name)
    return seen - _unix(finished)


def _reached(shim: ShimProcess, name: str, status: TaskStatus) -> float:
    """The time of day (unix seconds) at which the API first told this status."""
    deadline = time.monotonic() + PATIENCE
    while shim.client.task(name).status is not status:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is not {status.value} within a minute")
        time.sleep(LOOK)
    return time.time()


def _unix(stamp: str) -> float:
    """Seconds of a time as the engine writes it, with up to nine digits of a second."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


def submits(stand: Stand, candidate: Candidate, samples: Samples, *, count: int) -> None:
    """Submit tasks one at a time, and make and start the same containers by hand in between."""
    image = stand.images.job(RUNS_ON)
    with stand.home() as home, stand.shim(candidate, home) as shim:
        for number in range(count):
            name = f"s{number}"
            began = time.time()
            shim.submit(name, image)
            told = _reached(shim, name, TaskStatus.RUNNING)
            took = max(told, _started(stand, shim, name)) - began
            bare = _bare(stand, shim.client.task(name).container_id)
            shim.client.terminate(name)
            shim.client.remove(name)
            samples.add("submit", candidate.name, [took * 1000])
            samples.add("submit over bare", candidate.name, [(took - bare) * 1000])


def _started(stand: Stand, shim: ShimProcess, name: str) -> float:
    """When the task's container began to run, by the engine: some shims tell so before it does."""

    def started() -> str | None:
        container = shim.client.task(name).container_id
        state = stand.client.inspect_container(container)["State"] if container else {}
        return state["StartedAt"] if state.get("Running") else None

    stamp = eventually(started, within=60, every=LOOK, saying=f"{name} has a container that runs")
    assert stamp is not None
    return _unix(stamp)


def _bare(stand: Stand, like: str) -> float:
    """Seconds to create and start a container like that one."""
    model: dict[str, Any] = stand.client.inspect_container(like)
    config = {**model["Config"], "HostConfig": model["HostConfig"], "Labels": {}}
    began = time.time()
    made: dict[str, str] = stand.client.create_container_from_config(  # type: ignore[no-untyped-call]  # the SDK's
        config, name="bare"
    )
    stand.client.start(made["Id"])
    took = time.time() - began
    stand.client.remove_container(made["Id"], force=True)
    return took
