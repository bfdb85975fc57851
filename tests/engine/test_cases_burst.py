"""Many tasks that end at once, on a machine that has no time for them."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import docker
import pytest
from attrs import frozen
from dstack_shim_contracts.api import TerminateRequest, VolumeMount
from dstack_shim_contracts.client import REQUEST_TIMEOUT, ShimClient
from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.census import mounted_volumes
from tests.lab.host import MIB, Host, load, public_key, volume
from tests.lab.images import RUNS_ON, Images
from tests.lab.shim import ShimProcess

TASKS = 20


@frozen
class Ended:
    """How the two requests about a task went: seconds, and what was held right after each."""

    seconds: tuple[float, float]
    reason: str
    still_mounted: bool
    still_running: bool


@pytest.mark.slow
def test_twenty_tasks_ending_at_once_are_answered_in_time_with_everything_released(
    instance: Host, images: Images, client: docker.APIClient
) -> None:
    """A server gives each call 9 s and then detaches the volumes whatever was answered: only a
    loaded machine and real unmounts show whether that is enough.
    """
    user = instance.user("alice")
    names = [f"data{number}" for number in range(TASKS)]
    instance.gpus(*(f"GPU-{number}" for number in range(TASKS)))
    for name in names:
        instance.disk(name, size=MIB, file_system=True)
    shim = instance.start_shim()
    census = instance.census(shim)
    image = images.job(f"dd if=/dev/zero of=/data/fill bs=64k count=8; {RUNS_ON}")
    for number, name in enumerate(names):
        shim.submit(
            name,
            image,
            gpu=1,
            volumes=(volume(name),),
            volume_mounts=(VolumeMount(name, "/data"),),
            host_ssh_user="alice",
            host_ssh_keys=(public_key(number), public_key(1000)),
        )
    boxes = {
        name: shim.wait_for(name, TaskStatus.RUNNING, within=90).container_id for name in names
    }
    assert len(mounted_volumes()) == TASKS
    assert census.take() == []
    with load(2 * (os.cpu_count() or 1)), ThreadPoolExecutor(TASKS) as pool:
        ended = list(pool.map(lambda name: end(shim, client, name, boxes[name]), names))
    assert max(max(one.seconds) for one in ended) < REQUEST_TIMEOUT
    assert {one.reason for one in ended} == {"terminated_by_user"}
    assert not [one for one in ended if one.still_mounted or one.still_running]
    assert shim.statuses() == {}
    assert mounted_volumes() == []
    assert (user / ".ssh" / "authorized_keys").read_bytes() == b""
    assert client.containers(all=True) == []
    assert census.take() == []


def end(shim: ShimProcess, client: docker.APIClient, task_id: str, container_id: str) -> Ended:
    """Terminate and remove as a server does; an error it could not have read is raised."""
    with closing(ShimClient(shim.port, timeout=REQUEST_TIMEOUT)) as server:
        began = time.monotonic()
        info = server.terminate(task_id, TerminateRequest("terminated_by_user"))
        terminated = time.monotonic()
        still_mounted = task_id in mounted_volumes()
        still_running = client.inspect_container(container_id)["State"]["Running"]
        again = time.monotonic()
        server.remove(task_id)
        removed = time.monotonic()
    return Ended(
        (terminated - began, removed - again),
        info.termination_reason,
        still_mounted,
        still_running,
    )
