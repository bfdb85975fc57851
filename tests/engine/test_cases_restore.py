"""What a restart finds that must not be there: doubles, leftovers, and records a job has forged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import docker
from dstack_shim_contracts.api import TaskInfo
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.census import VOLUMES, mounted_volumes
from tests.lab.host import BY_ID, Host, public_key, run, volume
from tests.lab.images import RUNS_ON, Images
from tests.lab.shim import ShimProcess

RUNNING = TaskStatus.RUNNING
UUIDS = tuple(f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(3))


def record_of(shim: ShimProcess, task_id: str) -> Path:
    return shim.home / "runners" / container_name(f"{task_id}-0-0", task_id) / "task.json"


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}) + "\n")


def test_of_two_tasks_that_claim_one_gpu_at_restore_one_has_it_and_nobody_else_gets_it(
    instance: Host, images: Images
) -> None:
    instance.gpus(*UUIDS[:2])
    shim = instance.start_shim()
    image = images.job(RUNS_ON)
    for task_id in ("t1", "t2"):
        shim.submit(task_id, image, gpu=1)
        shim.wait_for(task_id, RUNNING)
    shim.kill()
    rewrite(record_of(shim, "t2"), gpus=gpus_in(record_of(shim, "t1")))
    shim.start()
    holders = {task_id: shim.client.task(task_id).gpus_ids for task_id in ("t1", "t2")}
    assert sorted(holders.values()) == [(), (UUIDS[0],)]
    assert instance.census(shim).take() == []
    loser = next(task_id for task_id, gpus in holders.items() if not gpus)
    shim.client.terminate(loser)  # gives back nothing of the other's
    shim.client.remove(loser)
    shim.submit("t3", image, gpu=-1)
    assert shim.wait_for("t3", RUNNING).gpus_ids == (UUIDS[1],)


def gpus_in(record: Path) -> list[str]:
    gpus: list[str] = json.loads(record.read_bytes())["gpus"]
    return gpus


def test_of_two_containers_of_one_task_the_second_holds_and_changes_nothing(
    instance: Host, images: Images, client: docker.APIClient
) -> None:
    instance.gpus(*UUIDS[:2])
    shim = instance.start_shim()
    shim.submit("t1", images.job(RUNS_ON), gpu=1)
    info = shim.wait_for("t1", RUNNING)
    shim.kill()
    labels = client.inspect_container(info.container_id)["Config"]["Labels"]
    second = client.create_container(
        images.plain(), ["/bin/sh", "-c", "exit 3"], name="second", labels=labels
    )["Id"]
    client.start(second)
    client.wait(second)
    for _ in range(2):
        shim.start()
        assert shim.client.task("t1") == info
        shim.kill()
    shim.start()
    assert shim.statuses() == {"t1": "running"}
    shim.client.terminate("t1")
    shim.client.remove("t1")
    shim.submit("t2", images.job(RUNS_ON), gpu=2)
    assert shim.wait_for("t2", RUNNING).gpus_ids == UUIDS[:2]


FORGED_KEY = public_key(66, "of the job")
OWN_KEY = public_key(1, "of the task")


def test_records_that_jobs_have_forged_get_them_nothing(
    instance: Host, images: Images, client: docker.APIClient, tmp_path: Path
) -> None:
    """The layout of 0.21.3: a job could write its own record. These want to log in as root and as
    others, to take a volume and a GPU away, to reach out of their directories.
    """
    users = ("alice", "victim", "root")
    by_hand = f"{FORGED_KEY}\n".encode()
    for user in users[:2]:
        instance.user(user)
    instance.write_keys("victim", by_hand)
    instance.gpus(*UUIDS)
    for name in ("others", "own"):
        instance.disk(name, file_system=True)
    shim = instance.start_shim()
    census = instance.census(shim)
    other = run_other(shim, images)
    shim.kill()
    keys = instance.keys_of("alice")
    run("mount", str(BY_ID / "google-own"), str(make_dir(Path(VOLUMES, "own"))))
    for user in users:
        forge(shim.home, client, images.plain(), user, tmp_path / "outside", other.gpus_ids)

    def nothing_is_taken() -> None:
        assert instance.keys_of("alice") == keys
        assert instance.keys_of("victim") == by_hand
        assert not Path("/root/.ssh").exists()
        assert not (tmp_path / "outside").exists()
        assert shim.client.task("other") == other

    shim.start()
    assert shim.statuses() == {"other": "running", **dict.fromkeys(users, "running")}
    assert [shim.client.task(user).gpus_ids for user in users] == [()] * 3
    assert sorted(mounted_volumes()) == ["others", "own"]
    nothing_is_taken()
    for user in users:
        shim.client.terminate(user)
        shim.client.remove(user)
    assert mounted_volumes() == ["others"]  # what they really had is given back
    nothing_is_taken()
    shim.submit("next", images.job(RUNS_ON), gpu=-1)
    assert shim.wait_for("next", RUNNING).gpus_ids == UUIDS[1:]
    assert census.take() == []


def run_other(shim: ShimProcess, images: Images) -> TaskInfo:
    """The task that has what the others want."""
    shim.submit(
        "other",
        images.job(RUNS_ON),
        gpu=1,
        volumes=(volume("others"),),
        host_ssh_user="alice",
        host_ssh_keys=(OWN_KEY,),
    )
    return shim.wait_for("other", RUNNING)


def make_dir(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def forge(
    home: Path,
    client: docker.APIClient,
    image: str,
    user: str,
    outside: Path,
    gpus: tuple[str, ...],
) -> None:
    """A running task, called like the user it wants to log in as."""
    name = container_name("old", user)
    task_dir = make_dir(home / "runners" / name)
    volumes = ("others", "../../..", "own/../others", "/")
    config = {
        "id": user,
        "name": f"../../../{outside.name}",
        "image_name": image,
        "gpu": 1,
        "host_ssh_user": user,
        "host_ssh_keys": [FORGED_KEY, OWN_KEY],
        "volumes": [attrs.asdict(volume(name, "own", init_fs=True)) for name in volumes],
        "volume_mounts": [{"name": "others", "path": "/data"}],
        "instance_mounts": [{"instance_path": str(outside), "path": "/p"}],
    }
    decided = {"termination_reason": "", "termination_message": "", "cleaned_up": user == "alice"}
    record = {"version": 1, "id": user, "config": config, "gpus": gpus, **decided}
    (task_dir / "task.json").write_text(json.dumps(record) + "\n")
    binds = [f"{task_dir}:/tmp/runner", f"{VOLUMES}own:/data"]
    container = client.create_container(
        image,
        ["/bin/sh", "-c", RUNS_ON],
        name=name,
        labels={"ai.dstack.shim.is-task": "true", "ai.dstack.shim.task-id": user},
        host_config=client.create_host_config(binds=binds, network_mode="host"),
    )["Id"]
    client.start(container)
