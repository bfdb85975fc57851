"""A real shim on a real engine, killed and started again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest
from dstack_shim_contracts.api import TaskInfo, TerminateRequest
from dstack_shim_contracts.errors import ShimResponseError
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.statuses import TaskStatus

from tests.eventually import eventually
from tests.evidence import Evidence
from tests.lab.engine import PrivateEngine
from tests.lab.images import RUNS_ON, Images, exits, write_runner
from tests.lab.proxy import CountingProxy, Hang
from tests.lab.shim import ShimProcess

RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


@pytest.fixture(autouse=True)
def runner() -> Path:
    return write_runner(Path("/usr/local/bin/dstack-runner"))


Make = Callable[..., ShimProcess]


@pytest.fixture
def make_shim() -> Iterator[Make]:
    """Makes shims that are not started; none outlives its test, whatever became of that."""
    made: list[ShimProcess] = []

    def make(*arguments: Any, **more: Any) -> ShimProcess:
        made.append(ShimProcess(*arguments, **more))
        return made[-1]

    yield make
    for shim in made:
        shim.close()


@pytest.fixture
def shim(home: Path, private_engine: PrivateEngine, make_shim: Make) -> ShimProcess:
    shim = make_shim(home, private_engine.environ)
    shim.start()
    return shim


def started(client: docker.APIClient, info: TaskInfo) -> tuple[str, str, int]:
    """What must not change while a job runs: its container, when that began, and its process."""
    details = client.inspect_container(info.container_id)
    return details["Id"], details["State"]["StartedAt"], details["State"]["Pid"]


@pytest.mark.slow
def test_twenty_kills_with_eight_tasks_lose_no_outcome_and_disturb_nobody(
    shim: ShimProcess, images: Images, client: docker.APIClient, evidence: Evidence
) -> None:
    """The promise itself, on a real engine with real kills: no fake can stand for it."""
    runs_on = images.job(RUNS_ON)
    ends = {
        "zero": images.job("until [ -e /tmp/go ]; do sleep 0.05; done; exit 0", tag="zero"),
        "seven": images.job(
            "echo first; until [ -e /tmp/go ]; do sleep 0.05; done; echo last words; exit 7",
            tag="seven",
        ),
        "killed": runs_on,
    }
    stay = [f"stay{number}" for number in range(5)]
    for task_id in stay:
        shim.submit(task_id, runs_on)
    before = {}
    for task_id in stay:
        before[task_id] = started(client, shim.wait_for(task_id, RUNNING))
    rounds = evidence.share(range(200)) if evidence.full else range(20)
    for number in rounds:
        ids = {name: f"{name}{number}" for name in ends}
        for name, task_id in ids.items():
            shim.submit(task_id, ends[name])
        boxes = {name: shim.wait_for(ids[name], RUNNING).container_id for name in ends}
        shim.kill()
        for name in ("zero", "seven"):
            execution = client.exec_create(boxes[name], ["touch", "/tmp/go"])
            client.exec_start(execution["Id"])
        client.kill(boxes["killed"])
        for box in boxes.values():
            client.wait(box)
        shim.launch()
        answer = eventually(lambda: shim.answers() and shim.statuses(), within=30)
        assert answer
        assert {name: answer[ids[name]] for name in ends} == dict.fromkeys(ends, "terminated")
        assert {answer[task_id] for task_id in stay} == {"running"}
        outcomes = {name: shim.client.task(ids[name]) for name in ends}
        assert outcomes["zero"].termination_reason == "done_by_runner"
        assert outcomes["zero"].termination_message == ""
        for name in ("seven", "killed"):
            assert outcomes[name].termination_reason == "container_exited_with_error"
        assert outcomes["seven"].termination_message == "first\nlast words"
        for task_id in stay:
            assert started(client, shim.client.task(task_id)) == before[task_id]
        for name in ends:
            shim.client.remove(ids[name])
    evidence.write("kill9", kill9_rounds=len(rounds), census_violations=0)


def test_a_reason_recorded_before_a_kill_is_the_same_after_it(
    shim: ShimProcess, images: Images
) -> None:
    shim.submit("t1", images.job(RUNS_ON))
    shim.wait_for("t1", RUNNING)
    request = TerminateRequest("max_duration_exceeded", "ran for too long", 0)
    said = shim.client.terminate("t1", request)
    shim.kill()
    shim.start()
    assert shim.client.task("t1").termination_reason == "max_duration_exceeded"
    assert shim.client.task("t1").termination_message == "ran for too long"
    assert shim.client.task("t1").container_id == said.container_id
    shim.client.remove("t1")
    assert shim.statuses() == {}


def test_a_task_acknowledged_right_before_a_kill_is_known_after_it(
    shim: ShimProcess, images: Images
) -> None:
    shim.submit("t1", images.job(RUNS_ON))
    shim.kill()
    shim.start()
    assert "t1" in shim.statuses()


def test_a_pull_cut_short_leaves_a_task_that_says_where_it_stood_until_it_is_removed(
    home: Path, private_engine: PrivateEngine, proxy: CountingProxy, make_shim: Make
) -> None:
    proxy.spoil(Hang(), path="/images/create")
    shim = make_shim(home, {"DOCKER_HOST": proxy.address})
    shim.start()
    shim.submit("t1", "never/arrives:1")
    shim.wait_for("t1", TaskStatus.PULLING)
    for _ in range(2):
        shim.kill()
        shim.start()
        info = shim.client.task("t1")
        assert (info.status, info.termination_reason) == (TERMINATED, "executor_error")
        assert "pulling" in info.termination_message
        task_dir = home / "runners" / info.container_name
        assert sorted(path.name for path in task_dir.iterdir()) == ["task.json"]
    shim.client.remove("t1")
    assert list((home / "runners").iterdir()) == []


def test_a_directory_without_a_record_is_left_alone(shim: ShimProcess, home: Path) -> None:
    stray = home / "runners" / "stray-12345678"
    stray.mkdir()
    (stray / "precious").touch()
    shim.kill()
    shim.start()
    assert (stray / "precious").exists()
    assert shim.statuses() == {}


def run_container(
    client: docker.APIClient, image: str, task_id: str, mount: Path, **labels: str
) -> str:
    """A container as an older shim left it: its directory mounted, no record beside it."""
    name = container_name("old-0-0", task_id)
    label = {"ai.dstack.shim.is-task": "true", "ai.dstack.shim.task-id": task_id, **labels}
    binds = client.create_host_config(binds=[f"{mount}:/tmp/runner"], network_mode="host")
    box: str = client.create_container(
        image,
        ["/bin/sh", "-c", "until [ -e /tmp/runner/go ]; do sleep 0.05; done; echo done; exit 3"],
        name=name,
        labels=label,
        host_config=binds,
    )["Id"]
    client.start(box)
    return box


def test_a_container_of_an_older_layout_is_adopted_and_finishes(
    shim: ShimProcess, home: Path, images: Images, client: docker.APIClient
) -> None:
    shim.kill()
    task_dir = home / "runners" / container_name("old-0-0", "old")
    task_dir.mkdir()
    box = run_container(client, images.plain(), "old", task_dir)
    shim.start()
    assert shim.client.task("old").status is RUNNING
    assert shim.client.task("old").container_id == box
    (task_dir / "go").touch()
    info = shim.wait_for("old", TERMINATED)
    assert (info.termination_reason, info.termination_message) == (
        "container_exited_with_error",
        "done",
    )
    shim.kill()
    shim.start()
    assert shim.client.task("old") == info
    shim.client.remove("old")
    assert not task_dir.exists()


def test_a_container_of_another_home_is_left_alone(
    shim: ShimProcess, tmp_path: Path, images: Images, client: docker.APIClient
) -> None:
    label = {"ai.dstack.shim.home": "/another/home"}
    box = run_container(client, images.plain(), "foreign", tmp_path, **label)
    shim.kill()
    shim.start()
    assert shim.statuses() == {}
    (tmp_path / "go").touch()
    client.wait(box)
    assert client.inspect_container(box)["State"]["ExitCode"] == 3


@pytest.mark.parametrize(
    "content",
    [b"", b'{"version": 1, "id": "ba', b'{"version": 1}\n\0', b"[]", b"null", b'{"id": 7}'],
    ids=["empty", "cut", "bytes-after", "list", "null", "wrong-type"],
)
def test_an_unreadable_record_never_stops_the_start_and_costs_only_itself(
    shim: ShimProcess, home: Path, images: Images, client: docker.APIClient, content: bytes
) -> None:
    for task_id in ("good", "bad"):
        shim.submit(task_id, images.job(RUNS_ON))
        shim.wait_for(task_id, RUNNING)
    bad = shim.client.task("bad")
    shim.kill()
    (home / "runners" / bad.container_name / "task.json").write_bytes(content)
    shim.start()
    assert shim.statuses() == {"good": "running", "bad": "running"}
    assert shim.client.task("bad").container_id == bad.container_id
    assert "record.damaged" in shim.log()
    client.kill(bad.container_id)
    assert shim.wait_for("bad", TERMINATED).termination_reason == "container_exited_with_error"
    shim.client.remove("bad")
    assert not (home / "runners" / bad.container_name).exists()


def test_fifty_running_tasks_cost_one_list_a_round_and_no_inspect(
    home: Path,
    private_engine: PrivateEngine,
    images: Images,
    proxy: CountingProxy,
    make_shim: Make,
) -> None:
    shim = make_shim(home, {"DOCKER_HOST": proxy.address})
    shim.start()
    image = images.job(RUNS_ON)
    for number in range(50):
        shim.submit(f"t{number}", image)
    for number in range(50):
        shim.wait_for(f"t{number}", RUNNING, within=60)
    shim.kill()
    proxy.forget()
    shim.start()
    eventually(lambda: proxy.count("GET", "/containers/json") >= 4, within=30)
    paths = [request.path for request in proxy.requests]
    assert not [path for path in paths if path.endswith("/json") and path != "/containers/json"]
    rounds = proxy.count("GET", "/containers/json") - 1  # and one to restore from
    assert len([path for path in paths if path.startswith("/containers/")]) == rounds + 1
    assert set(shim.statuses().values()) == {"running"}


def test_no_credential_is_in_anything_the_shim_wrote(
    home: Path,
    private_engine: PrivateEngine,
    client: docker.APIClient,
    images: Images,
    make_shim: Make,
) -> None:
    secret = "s3cret-" + hashlib.sha256(b"x").hexdigest()[:12]
    shim = make_shim(home, private_engine.environ, "--shim-log-level=trace")
    shim.start()
    login = {"registry_username": f"user-{secret}", "registry_password": secret}
    shim.submit("local", images.job(RUNS_ON), **login)
    shim.submit("remote", "127.0.0.1:9/nobody/there:1", **login)
    shim.wait_for("local", RUNNING)
    info = shim.wait_for("remote", TERMINATED)
    assert "refused" in info.termination_message
    written = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    written.append(shim.stderr.read_bytes())
    written.append(Path(f"/proc/{shim.pid}/cmdline").read_bytes())
    written.append(
        json.dumps(client.inspect_container(shim.client.task("local").container_id)).encode()
    )
    assert not [text for text in written if secret.encode() in text]


def test_without_an_engine_it_says_so_and_exits_within_five_seconds(
    home: Path, make_shim: Make
) -> None:
    shim = make_shim(home, {"DOCKER_HOST": "unix:///run/lab/nobody.sock"})
    shim.launch()
    assert shim.wait(within=10) == 1
    assert "no Docker Engine" in shim.stderr.read_text()


def test_a_second_shim_on_the_home_is_refused_and_changes_nothing(
    shim: ShimProcess, home: Path, private_engine: PrivateEngine, make_shim: Make
) -> None:
    second = make_shim(home, private_engine.environ, port=11998)
    second.launch()
    assert second.wait() == 1
    assert f"pid {shim.pid}" in second.stderr.read_text()
    assert shim.answers()


def test_a_shim_told_to_shut_down_goes_and_its_tasks_stay(
    shim: ShimProcess, images: Images, client: docker.APIClient
) -> None:
    shim.submit("t1", images.job(RUNS_ON))
    before = started(client, shim.wait_for("t1", RUNNING))
    shim.client.shutdown()
    assert shim.wait() == 0
    shim.start()
    assert started(client, shim.client.task("t1")) == before
    assert shim.terminate() == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "../../x"}, "name"),
        ({"id": "a/b"}, "id"),
        ({"id": ""}, "id"),
        ({"id": None}, "id"),
        ({"id": 7}, "id"),
        ({"name": ""}, "name"),
        ({"image_name": ""}, "image_name"),
        ({"image_name": "a\0b"}, "image_name"),
        ({"cpu": "1"}, "cpu"),
        ({"memory": 1.5}, "memory"),
        ({"network_mode": "none"}, "network_mode"),
        ({"volumes": {}}, "volumes"),
        ({"volume_mounts": [{"name": "../x", "path": "/x"}]}, r"volume_mounts\[0\].name"),
    ],
)
def test_a_bad_submit_is_refused_naming_the_field_and_leaves_nothing(
    shim: ShimProcess, home: Path, client: docker.APIClient, body: dict[str, object], field: str
) -> None:
    answer = httpx.post(
        f"http://localhost:{shim.port}/api/tasks",
        json={"id": "t1", "name": "job", "image_name": "x:1", **body},
        trust_env=False,
    )
    assert answer.status_code == 400
    assert answer.text.startswith(field.replace("\\", ""))
    assert list((home / "runners").iterdir()) == []
    assert client.containers(all=True) == []


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{" + b" " * 2_000_000 + b"}", "application/json", 413),
        (b"{}", "text/plain", 415),
        (b"", "application/json", 400),
        (b'{"id":"t1"} x', "application/json", 400),
        (b"{", "Application/JSON; charset=utf-8", 400),
    ],
)
def test_a_body_that_is_no_submit_is_refused(
    shim: ShimProcess, home: Path, content: bytes, kind: str, status: int
) -> None:
    answer = httpx.post(
        f"http://localhost:{shim.port}/api/tasks",
        content=content,
        headers={"Content-Type": kind},
        trust_env=False,
    )
    assert answer.status_code == status
    assert answer.text.endswith("\n")
    assert list((home / "runners").iterdir()) == []


def test_the_same_id_twice_is_refused_the_second_time(shim: ShimProcess, images: Images) -> None:
    image = images.job(exits(0))
    shim.submit("t1", image)
    with pytest.raises(ShimResponseError) as refused:
        shim.submit("t1", image)
    assert refused.value.status == 409
