"""Lives of tasks that end early, late, twice or at once, through a real shim."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import docker
import pytest
from dstack_shim_contracts.api import InstanceMount, TaskConfig, TerminateRequest, VolumeMount
from dstack_shim_contracts.client import ShimClient
from dstack_shim_contracts.errors import ShimResponseError, ShimUnreachable
from dstack_shim_contracts.statuses import TaskStatus

from tests.eventually import eventually
from tests.lab.host import Host, public_key, volume
from tests.lab.images import RUNS_ON, Images, exits
from tests.lab.proxy import CountingProxy, First
from tests.lab.shim import ShimProcess

RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED
RUNNER_PORT = 10999
BY_USER = TerminateRequest("terminated_by_user", "enough", 0)


@pytest.mark.parametrize("network_mode", ["host", "bridge"])
def test_a_container_that_exits_before_the_first_look_has_its_true_outcome(
    instance: Host, images: Images, network_mode: str
) -> None:
    shim = instance.start_shim()
    for code in (0, 3):
        image = images.job(exits(code, saying="that was quick"))
        shim.submit(f"t{code}", image, network_mode=network_mode)
    success, failure = (shim.wait_for(f"t{code}", TERMINATED) for code in (0, 3))
    assert (success.termination_reason, success.termination_message) == ("done_by_runner", "")
    assert failure.termination_reason == "container_exited_with_error"
    assert failure.termination_message == "that was quick"


def test_a_taken_runner_port_ends_the_task_on_the_hosts_network_and_not_on_the_bridge(
    instance: Host, images: Images
) -> None:
    shim = instance.start_shim()
    image = images.job(f"serve || exit 7; {RUNS_ON}")
    with socket.create_server(("127.0.0.1", RUNNER_PORT)):
        shim.submit("host", image, network_mode="host")
        shim.submit("bridge", image, network_mode="bridge")
        failed = shim.wait_for("host", TERMINATED)
        assert failed.termination_reason == "container_exited_with_error"
        assert "Address already in use" in failed.termination_message
        ports = shim.wait_for("bridge", RUNNING).ports
    assert ports is not None
    assert {mapping.container for mapping in ports} == {RUNNER_PORT, 10022}
    assert RUNNER_PORT not in {mapping.host for mapping in ports}


def test_what_a_client_gave_up_waiting_for_is_done_all_the_same(
    instance: Host, images: Images, client: docker.APIClient
) -> None:
    """Three graces at once; nobody waits for the answers. A task's shell takes no TERM, so only
    the end of its grace, or its own, ends it.
    """
    instance.disk("data", file_system=True)
    shim = instance.start_shim()
    image = images.job("until [ -e /tmp/go ]; do sleep 0.05; done; exit 0")
    graces = {"none": 0, "some": 5, "long": 3600}
    boxes = {}
    for task_id in graces:
        shim.submit(task_id, image, volumes=(volume("data"),))
    for task_id in graces:
        boxes[task_id] = shim.wait_for(task_id, RUNNING).container_id
    began = time.monotonic()
    for task_id, timeout in graces.items():
        give_up(shim, task_id, timeout)
    shim.wait_for("none", TERMINATED, within=4)
    assert shim.client.task("some").status is RUNNING
    assert shim.client.task("long").status is RUNNING
    shim.wait_for("some", TERMINATED)
    assert time.monotonic() - began > 5
    assert shim.client.task("long").status is RUNNING
    client.exec_start(client.exec_create(boxes["long"], ["touch", "/tmp/go"])["Id"])
    shim.wait_for("long", TERMINATED)
    told = {task_id: shim.client.task(task_id) for task_id in graces}
    assert {info.termination_reason for info in told.values()} == {"terminated_by_user"}
    assert {info.termination_message for info in told.values()} == {"enough"}
    eventually(lambda: instance.census(shim).take() == [], saying="all is released")
    for task_id in graces:
        shim.client.remove(task_id)


def give_up(shim: ShimProcess, task_id: str, timeout: int) -> None:
    """Ask for the end and hang up at once, as a server does after its 9 s."""
    with closing(ShimClient(shim.port, timeout=0.2)) as impatient:
        try:
            impatient.terminate(task_id, TerminateRequest("terminated_by_user", "enough", timeout))
        except ShimUnreachable:
            return
        assert timeout == 0


def test_a_second_terminate_with_less_patience_cuts_the_first_ones_grace(
    instance: Host, images: Images
) -> None:
    shim = instance.start_shim()
    shim.submit("t1", images.job(RUNS_ON))
    shim.wait_for("t1", RUNNING)
    give_up(shim, "t1", 3600)
    began = time.monotonic()
    info = shim.client.terminate("t1", TerminateRequest("terminated_by_server", "too late", 0))
    assert time.monotonic() - began < 9
    assert (info.status, info.termination_reason) == (TERMINATED, "terminated_by_user")
    shim.client.remove("t1")


def test_remove_while_a_task_starts_or_ends_never_leaves_a_container(
    instance: Host, images: Images, proxy: CountingProxy, client: docker.APIClient
) -> None:
    """The start is held at its create, then at its start; terminate and remove land there."""
    shim = instance.start_shim(environ={"DOCKER_HOST": proxy.address})
    image = images.job(RUNS_ON)
    paths = ("/containers/create", "/containers/[0-9a-f]+/start")
    for number, path in enumerate(paths, start=1):
        task_id = f"t{number}"
        with held(proxy, path) as (arrived, go_on):
            shim.submit(task_id, image)
            assert arrived.wait(20)
            with pytest.raises(ShimResponseError) as refused:
                shim.client.remove(task_id)
            assert refused.value.status == 409
            with ThreadPoolExecutor() as pool:
                ending = pool.submit(shim.client.terminate, task_id, BY_USER)
                eventually(partial(has_begun_to_end, shim, task_id))
                removing = pool.submit(removed, shim, task_id)
                go_on.set()
                assert ending.result(20).termination_reason == "terminated_by_user"
                assert removing.result(20) in (200, 409)
        removed(shim, task_id)
        assert shim.statuses() == {}
        assert client.containers(all=True) == []
    assert list((shim.home / "runners").iterdir()) == []


def has_begun_to_end(shim: ShimProcess, task_id: str) -> bool:
    return f"task.terminate task={task_id} " in shim.log()


@contextmanager
def held(proxy: CountingProxy, path: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The engine gets the next such request only once the second event is set."""
    arrived, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        go_on.wait(30)

    proxy.spoil(First(hold), path=path, times=1)
    try:
        yield arrived, go_on
    finally:
        go_on.set()
        proxy.mend()


def removed(shim: ShimProcess, task_id: str) -> int:
    """The status of a remove."""
    with closing(ShimClient(shim.port, timeout=30)) as another:
        try:
            another.remove(task_id)
        except ShimResponseError as error:
            return error.status
    return 200


def test_every_request_at_once_about_one_task_leaves_nothing(
    instance: Host, images: Images, client: docker.APIClient
) -> None:
    """Submit twice, terminate twice, remove twice, all together, again and again."""
    shim = instance.start_shim()
    image = images.job(RUNS_ON)

    def status_of(call: Callable[[ShimClient], object]) -> int:
        with closing(ShimClient(shim.port, timeout=30)) as another:
            try:
                call(another)
            except ShimResponseError as error:
                return error.status
        return 200

    config = TaskConfig(id="t1", name="job", image_name=image)
    calls: list[Callable[[ShimClient], object]] = [
        lambda c: c.submit(config),
        lambda c: c.terminate("t1", BY_USER),
        lambda c: c.remove("t1"),
    ]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            first, second = pool.map(status_of, [calls[0]] * 2)
            assert sorted((first, second)) == [200, 409]
            answers = list(pool.map(status_of, [*calls[1:], *calls[1:]]))
            assert set(answers) <= {200, 404, 409}
            assert status_of(calls[1]) in (200, 404)
            assert status_of(calls[2]) in (200, 404)
            assert shim.statuses() == {}
            assert client.containers(all=True) == []
    assert list((shim.home / "runners").iterdir()) == []


HOSTILE = 'it\'s $(touch /tmp/pwned) `id` \\ "q" ; exit 9 # 🚀 ${HOME} %s *'


def test_quotes_dollars_and_emoji_in_keys_names_and_paths_are_just_characters(
    instance: Host, images: Images, client: docker.APIClient
) -> None:
    folder = instance.tools.parent / HOSTILE
    name = HOSTILE.replace("/", "-")
    instance.disk("data", file_system=True)
    instance.user("alice")
    shim = instance.start_shim()
    census = instance.census(shim)
    container_keys = (HOSTILE, "two\nlines", "", "--flag")
    shim.submit(
        "placeholder",
        images.job(f"echo written >'/inst 🚀/out'; {RUNS_ON}"),
        container_ssh_keys=container_keys,
        host_ssh_user="alice",
        host_ssh_keys=(f"{public_key(1)} {HOSTILE}",),
        volumes=(volume(name, "data"),),
        volume_mounts=(VolumeMount(name, f"/vol {HOSTILE}"),),
        instance_mounts=(InstanceMount(str(folder), "/inst 🚀"),),
    )
    info = shim.wait_for("placeholder", RUNNING)
    assert eventually((folder / "out").exists)
    told = (shim.home / "runners" / info.container_name / "runner" / "argv").read_text()
    words = told.split("\0")
    positions = [at for at, word in enumerate(words) if word == "--ssh-authorized-key"]
    assert tuple(words[at + 1] for at in positions) == container_keys
    assert instance.keys_of("alice").endswith(
        b"\xf0\x9f\x9a\x80 ${HOME} %s * # added by dstack-shim\n"
    )
    assert census.take() == []
    shim.kill()
    shim.start()
    assert shim.client.task("placeholder") == info
    shim.client.terminate("placeholder", TerminateRequest(HOSTILE, HOSTILE, 0))
    said = shim.client.task("placeholder")
    assert (said.termination_reason, said.termination_message) == (HOSTILE, HOSTILE)
    assert census.take() == []
    assert not Path("/tmp/pwned").exists()


def test_an_id_of_odd_characters_is_one_task_like_any_other(
    instance: Host, images: Images, client: docker.APIClient
) -> None:
    shim = instance.start_shim()
    image = images.job(RUNS_ON)
    ids = [HOSTILE.replace("/", "-"), "💥", "a b", "%2e%2e", "..x", "?#&=+", "e\u0301", "é"]
    for task_id in ids:
        shim.client.submit(TaskConfig(id=task_id, name="job", image_name=image))
    for task_id in ids:
        shim.wait_for(task_id, RUNNING)
    assert set(shim.statuses()) == set(ids)
    shim.kill()
    shim.start()
    assert set(shim.statuses()) == set(ids)
    for task_id in ids:
        shim.client.terminate(task_id)
        shim.client.remove(task_id)
    assert shim.statuses() == {}
    assert client.containers(all=True) == []
