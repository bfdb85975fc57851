"""The unmodified client of each dstack release, through a whole life of a job on a real host."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest
from attrs import asdict
from dstack_shim_contracts.api import TaskInfo
from dstack_shim_contracts.statuses import TaskStatus

from tests.eventually import eventually
from tests.lab.census import VOLUMES, mounted_volumes
from tests.lab.host import Host, public_key, volume
from tests.lab.images import RUNS_ON, Images
from tests.lab.registry import Registry, SlowWay
from tests.lab.shim import ShimProcess
from tests.lab.worlds import LOGIN
from tests.releases import environments
from tests.releases.running import run_inside

RELEASES = environments.CONTRACT
DRIVER = Path(environments.__file__).with_name("drive_shim.py")
SLOW_PORT = 5004
UUIDS = {version: f"GPU-{number}" for number, version in enumerate(RELEASES)}


@pytest.fixture
def slow_way(locked_registry: Registry | None) -> Iterator[SlowWay]:
    if locked_registry is None:
        pytest.skip("this machine has no docker-registry")
    way = SlowWay(5001, SLOW_PORT, bytes_per_second=800_000)
    way.open()
    yield way
    way.close()


class Life:
    """A job of one release: a volume to format, a key, a GPU, mapped ports, a slow pull."""

    def __init__(self, version: str, host: Host, image: str) -> None:
        self.version = version
        self.id = f"00000000-0000-4000-8000-{version.replace('.', ''):0>12}"
        self.user = f"user{version.replace('.', '')}"
        self.key = public_key(len(version) + int(version.replace(".", "")), version)
        self.volume = f"volume-{version}"
        self.folder = host.tools.parent / f"instance-{version}"
        self.image = image
        host.disk(self.volume)
        host.user(self.user)

    def task(self) -> str:
        return json.dumps(
            {
                "registry_username": LOGIN.username,
                "registry_password": LOGIN.password,
                "gpu": 1,
                "cpu": 0.5,
                "memory": 0.25,
                "shm_size": 0.0625,
                "volumes": [asdict(volume(self.volume, init_fs=True))],
                "volume_mounts": [{"name": self.volume, "path": "/data"}],
                "instance_mounts": [{"instance_path": str(self.folder), "path": "/inst"}],
                "host_ssh_user": self.user,
                "host_ssh_keys": [self.key],
                "container_ssh_keys": [self.key],
            }
        )

    def drive(self, shim: ShimProcess, hold: Path) -> Any:
        words = ["--id", self.id, "--image", self.image, "--network", "bridge"]
        words += ["--task", self.task(), "--hold", str(hold), "--message", "by the test"]
        python = environments.pristine(self.version)
        return run_inside(python, DRIVER, str(shim.port), "life", *words)


@pytest.mark.slow
def test_each_release_gets_a_job_with_everything_through_its_life(
    instance: Host,
    images: Images,
    client: docker.APIClient,
    locked_registry: Registry,
    slow_way: SlowWay,
    tmp_path: Path,
) -> None:
    """All four at once on one shim: what only the whole of them shows is what they share."""
    lives = [
        Life(version, instance, push(version, locked_registry, client, images, slow_way))
        for version in RELEASES
    ]
    instance.gpus(*UUIDS.values())
    shim = instance.start_shim()
    census = instance.census(shim)
    hold = tmp_path / "go-on"
    with ThreadPoolExecutor(len(lives)) as pool:
        driven = {life.version: pool.submit(life.drive, shim, hold) for life in lives}
        try:
            for life in lives:
                census.accepted(life.id)
                check_running(life, wait_for_running(shim, life, driven[life.version]))
            assert {gpu for life in lives for gpu in shim.client.task(life.id).gpus_ids} == {
                *UUIDS.values()
            }
            assert sorted(mounted_volumes()) == sorted(life.volume for life in lives)
            assert [instance.keys_of(life.user) for life in lives] == [
                f"{life.key} # added by dstack-shim\n".encode() for life in lives
            ]
            assert census.take() == []
        finally:
            hold.touch()
        for life in lives:
            check_told(life, driven[life.version].result(60))
            census.removed(life.id)
    assert census.take() == []
    assert shim.statuses() == {}
    assert mounted_volumes() == []
    assert [instance.keys_of(life.user) for life in lives] == [b""] * len(lives)
    assert client.containers(all=True) == []
    assert LOGIN.password not in shim.log()


def push(
    version: str, registry: Registry, client: docker.APIClient, images: Images, way: SlowWay
) -> str:
    """An image of the release's own behind the slow way and the password; its reference."""
    job = f"serve; echo {version} | tee /data/mark >/inst/mark; {RUNS_ON}"
    name = f"life-{version}:1"
    local = images.plain(f"to-push/{name}", environment={"LAB_JOB": job}, padding=1_000_000)
    registry.push(client, local, name, LOGIN)
    client.remove_image(local)
    images.forget(local)
    return f"{way.host}/{name}"


def wait_for_running(shim: ShimProcess, life: Life, driven: Future[Any]) -> TaskInfo:
    def running() -> TaskInfo | None:
        if driven.done():
            raise RuntimeError(f"{life.version} is through already: {driven.result()}")
        if life.id not in shim.statuses():
            return None
        info = shim.client.task(life.id)
        return info if info.status is TaskStatus.RUNNING else None

    info = eventually(running, within=60, saying=f"the job of {life.version} runs")
    assert info is not None
    return info


def check_running(life: Life, info: TaskInfo) -> None:
    """The job does what it can only do with its volume, its mount and its port."""
    mark = f"{life.version}\n"
    assert eventually((life.folder / "mark").exists, saying="the job wrote")
    assert (life.folder / "mark").read_text() == mark
    assert Path(VOLUMES, life.volume, "mark").read_text() == mark
    assert info.ports is not None
    (port,) = [mapping.host for mapping in info.ports if mapping.container == 10999]

    def answers() -> bytes:
        url = f"http://127.0.0.1:{port}/api/healthcheck"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                content: bytes = answer.read()
                return content
        except OSError:
            return b""

    assert b"dstack-runner" in eventually(answers, saying="the runner answers")


def check_told(life: Life, told: Any) -> None:
    """What the release's own client made of the answers."""
    assert told["release"] == life.version
    steps = [step["step"] for step in told["steps"]]
    assert steps == [
        *("healthcheck", "submit", "list", "started", "info"),
        *("terminate", "info", "remove", "list"),
    ]
    answers = [step["answer"] for step in told["steps"]]
    seen = told["steps"][3]["seen"]
    assert list(seen) == [status.value for status in TaskStatus if status.value in seen]
    assert seen["pulling"]["image_pull_progress"]["downloaded_bytes"] > 0
    assert answers[4]["status"] == "running"
    assert {port["container"] for port in answers[4]["ports"]} == {10999, 10022}
    ended = answers[6]
    said = (ended["status"], ended["termination_reason"], ended["termination_message"])
    assert said == ("terminated", "terminated_by_user", "by the test")
    assert life.id not in json.dumps(answers[8])
