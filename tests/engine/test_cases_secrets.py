"""Nothing a shim writes, starts or labels has a secret in it, whatever becomes of the tasks."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import docker
import httpx
import pytest
from dstack_shim_contracts.api import ComponentInstallRequest
from dstack_shim_contracts.errors import ShimResponseError
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.protocol import Credentials
from tests.eventually import eventually
from tests.lab.beside import repeating
from tests.lab.census import Census
from tests.lab.host import Host, public_key
from tests.lab.images import RUNS_ON, Images
from tests.lab.registry import Registry
from tests.lab.shim import ShimProcess

RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED
RIGHT = Credentials("user-Zq7rightK", "pass'Zq7right\"$K")
WRONG = Credentials("user-Zq7wrongK", "pass-Zq7wrong\u00e9K")
IN_URLS = "Zq7inurlK"
PORT = 5007


def forms_of(text: str) -> set[bytes]:
    """How a secret may be written."""
    raw = text.encode()
    return {raw, json.dumps(text)[1:-1].encode(), base64.b64encode(raw).rstrip(b"=")}


WORDS = set().union(
    *(
        forms_of(text)
        for login in (RIGHT, WRONG)
        for text in (login.username, login.password, f"{login.username}:{login.password}")
    ),
    {b"Zq7right", b"Zq7wrong", b"Zq7inurl"},
)


class Watch:
    """Looks at arguments of all processes and at all files of a home, again and again."""

    def __init__(self, home: Path) -> None:
        self.found: set[str] = set()
        self.looks = 0
        self._home = home

    def look(self) -> None:
        places = list(Path("/proc").glob("[0-9]*/cmdline"))
        places += [Path(at, name) for at, _, names in os.walk(self._home) for name in names]
        for place in places:
            with suppress(OSError):  # gone meanwhile
                content = place.read_bytes()
                self.found |= {f"{place}: {word!r}" for word in WORDS if word in content}
        self.looks += 1


@contextmanager
def watching(home: Path) -> Iterator[Watch]:
    watch = Watch(home)
    try:
        with repeating(watch.look, every=0.05):
            yield watch
    finally:
        watch.look()


@pytest.mark.parametrize("secret", sorted(WORDS))
def test_the_watch_itself_finds_each_form_in_files_and_arguments(
    tmp_path: Path, secret: bytes
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"x" + secret + b"x")
    watch = Watch(tmp_path)

    def places() -> int:
        watch.look()
        return len({place.partition(": ")[0] for place in watch.found})

    with subprocess.Popen(["cat", "-", secret], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL):
        eventually(lambda: places() == 2, saying="it is seen in the file and in the argument")


def login(credentials: Credentials) -> dict[str, str]:
    return {
        "registry_username": credentials.username,
        "registry_password": credentials.password,
    }


@pytest.fixture
def registry(instance: Host) -> Iterator[Registry]:
    registry = Registry(instance.tools.parent / "registry", PORT, RIGHT)
    if not registry.is_installed():
        pytest.skip("this machine has no docker-registry")
    registry.start()
    yield registry
    registry.stop()


def test_no_secret_is_in_a_file_a_log_an_argument_or_a_label(
    instance: Host, images: Images, client: docker.APIClient, registry: Registry
) -> None:
    instance.user("bob")
    proxy = f"http://proxy:{IN_URLS}@127.0.0.1:9/"
    shim = instance.shim("--shim-log-level=trace", environ={"HTTPS_PROXY": proxy})
    with watching(shim.home) as watch:
        shim.start()
        local, remote = make_images(images, client, registry)
        pull_with_every_login(shim, local, remote)
        ask_badly(shim)
        install_from_everywhere(shim)
        shim.kill()
        cut_short(shim.home / "runners" / container_name("right-0-0", "right") / "task.json")
        shim.start()
        in_containers = Census(shim.home, client, lambda _: None).secrets("Zq7right", "Zq7wrong")
        log = shim.log() + shim.stderr.read_text() + instance.engine.log.read_text()
        shim.remove_all()
        assert shim.statuses() == {}
        shim.terminate()
    assert not watch.found
    assert watch.looks > 20
    assert not in_containers
    assert not [word for word in WORDS if word in log.encode()]
    assert not [key for key in (KEY, CONTAINER_KEY) if key.split()[1] in log]


KEY = public_key(1, "of bob")
CONTAINER_KEY = public_key(2, "for the container")


def make_images(images: Images, client: docker.APIClient, registry: Registry) -> tuple[str, str]:
    """One that is here, and one that takes the password."""
    plain = images.plain("to-push/secret:1", environment={"LAB_JOB": RUNS_ON}, padding=100_000)
    remote = registry.push(client, plain, "secret:1", RIGHT)
    client.remove_image(plain)
    images.forget(plain)
    return images.job(RUNS_ON), remote


def pull_with_every_login(shim: ShimProcess, local: str, remote: str) -> None:
    keys = {
        "host_ssh_user": "bob",
        "host_ssh_keys": (KEY,),
        "container_ssh_keys": (CONTAINER_KEY,),
    }
    shim.submit("wrong", remote, **login(WRONG), **keys)
    wrong = shim.wait_for("wrong", TERMINATED)
    assert "unauthorized" in wrong.termination_message
    shim.submit("right", remote, **login(RIGHT), **keys)
    shim.wait_for("right", RUNNING)
    shim.submit("local", local, **login(RIGHT), **keys)
    shim.wait_for("local", RUNNING)
    shim.submit("nobody", "127.0.0.1:9/nobody/there:1", **login(WRONG))
    assert "refused" in shim.wait_for("nobody", TERMINATED).termination_message
    shim.submit("odd", "not a reference!", **login(WRONG))
    shim.wait_for("odd", TERMINATED)
    shim.submit("broken", local, privileged=True, gpu=5, **login(WRONG))
    shim.wait_for("broken", TERMINATED)
    shim.submit("user", local, container_user="no-such-user", **login(WRONG))
    shim.wait_for("user", TERMINATED)


def ask_badly(shim: ShimProcess) -> None:
    """Bodies with credentials that are refused: the reason must not quote them."""
    good = {"id": "bad", "name": "bad", "image_name": "x", **login(WRONG)}
    texts = [
        json.dumps(good)[:-1],
        json.dumps(good) + " x",
        json.dumps({**good, "registry_password": [WRONG.password]}),
        json.dumps({**good, "registry_password": {WRONG.password: WRONG.password}}),
        json.dumps({**good, "registry_username": WRONG.username + "\0"}),
        json.dumps({**good, "gpu": -7}),
        json.dumps({**good, "name": "../x"}),
        json.dumps([WRONG.password]),
        json.dumps(WRONG.password),
    ]
    with httpx.Client(base_url=f"http://127.0.0.1:{shim.port}", trust_env=False) as client:
        for text in texts:
            headers = {"Content-Type": "application/json"}
            answer = client.post("/api/tasks", content=text.encode(), headers=headers)
            assert answer.status_code == 400
            assert not [word for word in WORDS if word in answer.content]
    with pytest.raises(ShimResponseError) as again:
        shim.submit("right", "x", **login(WRONG))
    assert again.value.status == 409


def install_from_everywhere(shim: ShimProcess) -> None:
    for url in (
        f"http://user:{IN_URLS}@127.0.0.1:9/shim?sig={IN_URLS}",
        f"https://127.0.0.1:9/?token={IN_URLS}#{IN_URLS}",
        f"ftp://u:{IN_URLS}@host/x",
        f"http://[{IN_URLS}/",
    ):
        for name in ("dstack-runner", "dstack-shim"):
            with suppress(ShimResponseError):
                shim.client.install_component(ComponentInstallRequest(name, url))
        eventually(lambda: not is_installing(shim), saying="the install has failed")


def is_installing(shim: ShimProcess) -> bool:
    components = shim.client.components().components
    return any(component.status.value == "installing" for component in components)


def cut_short(record: Path) -> None:
    record.write_bytes(record.read_bytes()[:-40])
