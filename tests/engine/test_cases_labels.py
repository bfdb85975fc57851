"""A restart on one list of containers: our labels tell the rest, also of lost records."""

from __future__ import annotations

from dstack_shim_contracts.api import TaskInfo
from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.host import Host, public_key
from tests.lab.images import RUNS_ON, Images
from tests.lab.proxy import CountingProxy, First, Hang
from tests.lab.shim import ShimProcess

RUNNING = TaskStatus.RUNNING
UUIDS = tuple(f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(8))
LIST = "/containers/json"
INSPECT = "/containers/[0-9a-f]+/json"
TASKS = tuple(f"t{number}" for number in range(20))
LOST = TASKS[::3]


def run_all(shim: ShimProcess, image: str) -> dict[str, TaskInfo]:
    """Twenty tasks, some with a GPU, some with ports of their own, all with a key."""
    for number, task_id in enumerate(TASKS):
        shim.submit(
            task_id,
            image,
            gpu=int(number < len(UUIDS)),
            network_mode="bridge" if number % 2 else "host",
            host_ssh_user="alice",
            host_ssh_keys=(public_key(number, task_id),),
        )
    return {task_id: shim.wait_for(task_id, RUNNING, within=120) for task_id in TASKS}


def test_twenty_running_tasks_are_restored_from_one_list_some_of_them_without_their_record(
    instance: Host, images: Images, proxy: CountingProxy
) -> None:
    instance.user("alice")
    instance.gpus(*UUIDS)
    shim = instance.start_shim(environ={"DOCKER_HOST": proxy.address})
    before = run_all(shim, images.job(RUNS_ON))
    keys = instance.keys_of("alice")
    shim.kill()
    for task_id in LOST:
        (shim.home / "runners" / before[task_id].container_name / "task.json").write_bytes(b"")
    proxy.forget()
    proxy.spoil(First(lambda: None), path=LIST, times=1)
    proxy.spoil(Hang(), path=LIST)  # no second answer: the first has to do
    proxy.spoil(Hang(), path=INSPECT)
    shim.start()
    assert {task_id: shim.client.task(task_id) for task_id in TASKS} == before
    assert proxy.count("GET", INSPECT) == 0
    proxy.mend()
    census = instance.census(shim)
    shim.client.terminate(TASKS[1])
    left = [line for line in keys.splitlines() if not line.startswith(public_key(1).encode())]
    assert sorted(instance.keys_of("alice").splitlines()) == sorted(left)
    for task_id in TASKS:
        shim.client.terminate(task_id)
    assert instance.keys_of("alice") == b""
    assert census.take() == []
