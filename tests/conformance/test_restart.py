"""R: what a restart keeps, finds out and gives back."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from tests.conformance.conftest import MakeShim
from tests.conformance.containers import ContainerOf
from tests.conformance.engine import Reply, Request, Wire, refusal
from tests.conformance.images import Images, tell
from tests.conformance.instance import Instance, command
from tests.conformance.pulls import layer, scripted
from tests.conformance.rows import row
from tests.conformance.shim import Setting, Shim, Task, free_port, run_to_end
from tests.eventually import eventually

LIST = r"^/containers/json"
START = r"^/containers/[^/]+/start"
STOP = r"^/containers/[^/]+/(stop|kill)"
OWN_REASONS = {
    *("executor_error", "creating_container_error"),
    *("container_exited_with_error", "done_by_runner"),
}


def labels_of(id_: str, **more: str) -> dict[str, str]:
    return {"ai.dstack.shim.is-task": "true", "ai.dstack.shim.task-id": id_, **more}


# -- what goes on -----------------------------------------------------------------------------


@row("R1", "R5")
@pytest.mark.parametrize("network", ["host", "bridge"])
def test_running_task_goes_on_under_its_id(
    network: str, shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle, network_mode=network)
    before, state = task.info(), container_of(task).attrs["State"]
    shim.restart()
    assert {key: task.info()[key] for key in before if key != "image_pull_progress"} == {
        key: value for key, value in before.items() if key != "image_pull_progress"
    }
    after = container_of(task).attrs["State"]
    assert (after["Pid"], after["StartedAt"]) == (state["Pid"], state["StartedAt"])
    assert task.terminate().status_code == 200
    assert task.remove().status_code == 200


@row("R5")
def test_paused_container_is_a_running_task(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle)
    container_of(task).pause()
    shim.restart()
    assert task.status == "running"
    assert task.terminate().status_code == 200


@row("R2", "R3")
def test_first_answer_has_what_happened_meanwhile(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    tasks = [shim.run(images.idle, name=f"t{number}") for number in range(5)]
    failing = shim.run(
        images.job("read x <>/dev/null; echo a; echo b; sleep 0.5; exit 4"), name="f"
    )
    shim.kill()
    for task, code in zip(tasks[:3], (0, 7, 0), strict=True):
        tell(container_of(task), code)
    for task in [*tasks[:3], failing]:
        container_of(task).wait(timeout=10)
    shim.launch()
    first = eventually(lambda: _task_list_once_up(shim), within=20, every=0.005) or {}
    assert [first[task.id] for task in tasks] == ["terminated"] * 3 + ["running"] * 2
    reasons = [task.info()["termination_reason"] for task in tasks[:3]]
    assert reasons == ["done_by_runner", "container_exited_with_error", "done_by_runner"]
    assert failing.outcome() == ("container_exited_with_error", "a\nb")


@row("R4", "S13")
def test_recorded_reason_survives(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    task.terminate("max_duration_exceeded", "ü: too long")
    for _ in range(2):
        shim.restart()
        assert task.outcome() == ("max_duration_exceeded", "ü: too long")
    assert task.remove().status_code == 200


@row("R4")
def test_reason_found_by_the_shim_survives_too(shim: Shim, images: Images) -> None:
    task = shim.submit(images.exits(6, "the words"))
    before = task.outcome()
    shim.restart()
    assert task.outcome() == before


@row("S14", "R4")
def test_end_without_a_reason_survives(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    task.terminate("", "")
    shim.restart()
    assert task.status == "terminated"
    task.terminate("terminated_by_server", "x")
    assert task.outcome()[1] in {"x", ""}


@row("R6", "S12")
def test_container_that_vanished_meanwhile_is_an_error(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle)
    shim.kill()
    container_of(task).remove(force=True)
    shim.start()
    assert task.outcome()[0] == "executor_error"
    assert task.remove().status_code == 200


@row("R19", "R38")
def test_removed_task_stays_removed(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    task.terminate()
    task.remove()
    shim.restart()
    assert task.get().status_code == 404
    assert shim.task_list() == {}


@row("R18", "D15")
def test_accepted_submit_is_known_after_a_kill_right_after(shim: Shim, images: Images) -> None:
    for number in range(4):
        task = shim.submit(images.idle, name=f"t{number}")
        shim.kill()
        shim.start()
        assert task.get().status_code == 200
        info = task.reach("running", "terminated").info()
        assert info["status"] == "running" or info["termination_reason"] in OWN_REASONS


# -- starts cut short -------------------------------------------------------------------------


@row("R16", "R15")
@pytest.mark.parametrize("step", ["pulling", "creating"])
def test_task_caught_before_its_container_is_still_known(
    step: str, shim: Shim, images: Images, wire: Wire, engine: docker.DockerClient
) -> None:
    engine.images.get(images.idle).tag("conformance/pulled", "latest")
    go_on = threading.Event()
    with (
        scripted(wire, "pulled") as stream,
        wire.rule("POST", "^/containers/create", _held_for_good(go_on)),
    ):
        task = shim.submit("conformance/pulled:latest")
        if step == "creating":
            stream.succeed()
        else:
            stream.say(layer("one", "Downloading", current=1, total=2))
        task.reach(step)
        shim.kill()
    shim.start()
    reason, message = task.outcome()
    assert reason == "executor_error"
    assert step in message
    shim.restart()
    assert task.outcome() == (reason, message)
    assert task.remove().status_code == 200
    shim.restart()
    assert task.get().status_code == 404
    go_on.set()


@row("R7")
def test_old_container_that_never_started_is_an_error(
    new_shim: MakeShim, images: Images, engine: docker.DockerClient, wire: Wire
) -> None:
    shim = new_shim(start=False)
    task = shim.task(images.idle)
    made = engine.containers.create(
        images.idle, ["true"], name=task.container_name, labels=labels_of(task.id)
    )
    # Made by an older shim an hour ago, as far as this one can tell.
    with (
        wire.rule("GET", LIST, lambda request: _older(wire, request)),
        wire.rule("GET", r"^/containers/[^/]+/json", lambda request: _older(wire, request)),
    ):
        shim.start()
        assert task.outcome()[0] == "executor_error"
    made.reload()
    assert made.status == "created"
    assert task.remove().status_code == 200


@row("R8")
def test_container_created_just_now_is_started(
    shim: Shim, images: Images, wire: Wire, container_of: ContainerOf
) -> None:
    go_on = threading.Event()
    wire.forget()
    with wire.rule("POST", START, _held_for_good(go_on)):
        task = shim.submit(images.idle)
        eventually(lambda: wire.seen("POST", START), within=10, saying="its start was asked for")
        shim.kill()
    with wire.rule("POST", "^/containers/create", lambda _: refusal(500, "no second one")):
        shim.start()
        task.reach("running")
    assert container_of(task).status == "running"
    go_on.set()


@row("R9")
def test_terminated_task_whose_container_runs_is_stopped(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle)
    container = container_of(task)
    task.terminate("terminated_by_user", "by a user")
    record = task.record
    shim.kill()
    container.start()
    (task.dir / "task.json").write_text(json.dumps(record | {"cleaned_up": False}) + "\n")
    shim.start()
    eventually(lambda: container_of(task).status == "exited", within=5)
    assert task.outcome() == ("terminated_by_user", "by a user")
    assert task.remove().status_code == 200


# -- the engine away --------------------------------------------------------------------------


@row("R10")
def test_failing_list_changes_nothing(
    shim: Shim, images: Images, wire: Wire, container_of: ContainerOf
) -> None:
    task, ended = shim.run(images.idle), shim.run(images.idle, name="ended")
    with wire.rule("GET", LIST, lambda _: refusal(500, "not now")):
        container_of(ended).kill()
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            assert shim.task_list() == {task.id: "running", ended.id: "running"}
            time.sleep(0.1)  # nothing to wait for: it must not change
    assert ended.outcome()[0] == "container_exited_with_error"
    assert task.status == "running"


@row("R10", "L30")
def test_engine_away_at_the_start_loses_nothing(
    shim: Shim, images: Images, setting: Setting
) -> None:
    task = shim.run(images.idle)
    shim.kill()
    shim.variables["DOCKER_HOST"] = "unix:///nowhere.sock"
    done = run_to_end(setting, shim.home, shim.command_line()[1:], shim.variables)
    del shim.variables["DOCKER_HOST"]
    assert done.returncode == 1
    shim.start()
    assert task.status == "running"


@row("R33")
def test_finished_container_that_cannot_be_inspected_is_undecided(
    shim: Shim, images: Images, wire: Wire, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle)
    path = rf"^/containers/({container_of(task).id}|{task.container_name})/json"
    with wire.rule("GET", path, lambda _: refusal(500, "not now")):
        tell(container_of(task), 0)
        container_of(task).wait(timeout=10)
        eventually(lambda: wire.seen("GET", path), within=10, saying="it was asked about")
        assert task.status == "running"
    assert task.outcome() == ("done_by_runner", "")


@row("R32")
def test_running_tasks_cost_one_list_and_no_inspect(
    shim: Shim, images: Images, wire: Wire
) -> None:
    tasks = [shim.run(images.idle, name=f"t{number}") for number in range(8)]
    wire.forget()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        time.sleep(0.2)  # requests are counted over a fixed time
    assert len(wire.seen("GET", LIST)) <= 4
    assert wire.seen("GET", r"^/containers/[^/]+/json") == []
    assert set(shim.task_list()) == {task.id for task in tasks}


# -- records and dirs -------------------------------------------------------------------------


@row("R20")
@pytest.mark.parametrize("code", [0, 3])
def test_released_task_without_a_reason_gets_it_from_the_code(
    code: int, shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle)
    shim.kill()
    file = task.dir / "task.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cleaned_up": True}) + "\n")
    tell(container_of(task), code)
    container_of(task).wait(timeout=10)
    shim.start()
    expected = "container_exited_with_error" if code else "done_by_runner"
    assert task.outcome()[0] == expected


@row("R22", "R38")
def test_second_dir_with_the_same_id_is_left(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    shim.kill()
    twin = task.dir.with_name("zzz-twin")
    twin.mkdir()
    (twin / "task.json").write_text((task.dir / "task.json").read_text())
    shim.start()
    assert shim.task_list() == {task.id: "running"}
    task.terminate()
    task.remove()
    assert (twin / "task.json").exists()
    (twin / "task.json").unlink()
    twin.rmdir()
    shim.restart()


@row("R23", "R24")
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"version": 1, "id": "x', id="cut"),
        pytest.param(b'{"version": 1, "id": 5, "config": []}', id="types"),
        pytest.param(b"{} trailing", id="trailing"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"\xff\xfe\x00", id="bytes"),
    ],
)
def test_damaged_record_hurts_nobody(
    content: bytes, shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task, neighbour = shim.run(images.idle), shim.run(images.idle, name="neighbour")
    shim.kill()
    (task.dir / "task.json").write_bytes(content)
    shim.start()
    assert shim.task_list() == {task.id: "running", neighbour.id: "running"}
    (aside,) = task.dir.glob(".task.json.damaged-*")
    assert aside.read_bytes() == content
    tell(container_of(task), 0)
    assert task.outcome() == ("done_by_runner", "")
    assert task.remove().status_code == 200


@row("R23")
@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_record_of_another_version_hurts_nobody(
    version: Any, shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task, neighbour = shim.run(images.idle), shim.run(images.idle, name="neighbour")
    shim.kill()
    file = task.dir / "task.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": version}) + "\n")
    shim.start()
    assert shim.task_list() == {task.id: "running", neighbour.id: "running"}
    tell(container_of(task), 0)
    assert task.outcome()[0] == "done_by_runner"


@row("R23")
@pytest.mark.parametrize("kind", ["folder", "socket", "link", "unreadable"])
def test_something_else_in_the_records_place_hurts_nobody(
    kind: str, shim: Shim, images: Images
) -> None:
    task, neighbour = shim.run(images.idle), shim.run(images.idle, name="neighbour")
    shim.kill()
    file = task.dir / "task.json"
    kept = file.read_bytes()
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{os.open(task.dir, os.O_PATH)}/task.json")
    elif kind == "link":
        file.symlink_to("/etc/passwd")
    else:
        file.write_bytes(kept)
        file.chmod(0)
    shim.start()
    assert shim.task_list() == {task.id: "running", neighbour.id: "running"}
    assert task.terminate().status_code == 200
    assert task.remove().status_code == 200


@row("R25")
def test_record_for_a_newer_reader_is_left_as_it_is(shim: Shim, images: Images) -> None:
    shim.kill()
    folder = shim.home / "runners" / "from-tomorrow"
    folder.mkdir(parents=True)
    record = {"version": 1, "id": "tomorrow", "config": {"id": "tomorrow"}, "min_reader": 1000}
    text = json.dumps(record) + "\n"
    (folder / "task.json").write_text(text)
    shim.start()
    shim.restart()
    assert (folder / "task.json").read_text() == text
    (folder / "task.json").unlink()
    folder.rmdir()
    shim.restart()


@row("R26")
def test_unknown_keys_survive_a_rewrite(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    shim.kill()
    file = task.dir / "task.json"
    more = {"of_tomorrow": {"deep": [1, "ü"]}, "another": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | more) + "\n")
    shim.start()
    task.terminate("terminated_by_user", "x")
    record = task.record
    assert record["termination_reason"] == "terminated_by_user"
    assert {key: record[key] for key in more} == more


@row("R17")
def test_dir_without_record_and_container_is_left_alone(shim: Shim) -> None:
    shim.kill()
    folder = shim.home / "runners" / "somebodys-0-0-deadbeef"
    folder.mkdir(parents=True)
    (folder / "pull.log").write_text("log")
    shim.start()
    assert shim.task_list() == {}
    assert (folder / "pull.log").read_text() == "log"
    (folder / "pull.log").unlink()
    folder.rmdir()


# -- who else is there ------------------------------------------------------------------------


@row("R27")
def test_second_shim_on_a_home_is_refused(shim: Shim, images: Images, setting: Setting) -> None:
    task = shim.run(images.idle)
    arguments = [f"--shim-home={shim.home}", f"--shim-http-port={free_port()}"]
    done = run_to_end(setting, shim.home, arguments, within=10)
    assert done.returncode == 1
    assert done.stderr.strip()
    assert task.status == "running"


@row("R28")
def test_containers_of_another_home_are_left_alone(
    shim: Shim, new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle)
    other = new_shim()
    assert other.task_list() == {}
    other.stop()
    assert container_of(task).status == "running"
    assert task.status == "running"


@row("R28", "D18")
def test_container_without_a_home_is_adopted(
    new_shim: MakeShim, images: Images, old_task: Any
) -> None:
    shim = new_shim(start=False)
    old = old_task(shim, images.idle)
    shim.start()
    assert shim.task_list() == {old.task.id: "running"}


@row("R31", "L35")
def test_nothing_is_touched_before_the_port_is_its_own(
    shim: Shim, images: Images, setting: Setting, container_of: ContainerOf
) -> None:
    ended = shim.run(images.idle)
    shim.kill()
    tell(container_of(ended), 0)
    container_of(ended).wait(timeout=10)
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (shim.home / "runners").rglob("*")
        if path.is_file()
    }
    with socket.create_server(("127.0.0.1", shim.port)):
        done = run_to_end(setting, shim.home, shim.command_line()[1:])
    assert done.returncode == 1
    after = {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (shim.home / "runners").rglob("*")
        if path.is_file()
    }
    assert after == before
    shim.start()
    assert ended.outcome() == ("done_by_runner", "")


# -- time -------------------------------------------------------------------------------------


@row("R29")
@pytest.mark.parametrize("code", [0, 3])
def test_code_0_across_a_reboot_is_no_success(
    code: int, shim: Shim, images: Images, instance: Instance, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle)
    shim.kill()
    tell(container_of(task), code)
    container_of(task).wait(timeout=10)
    boot = Path("/proc/sys/kernel/random/boot_id")
    other = instance.root / "boot-id"
    other.write_text("11111111-2222-3333-4444-555555555555\n")
    command("mount", "--bind", other, boot)
    try:
        shim.start()  # on a boot that is not the record's, and that the container's end is in
        reason, message = task.outcome()
    finally:
        command("umount", boot)
    if code == 0:
        assert reason == "executor_error"
        assert "reboot" in message
    else:
        assert reason in {"executor_error", "container_exited_with_error"}


@row("R30")
def test_grace_goes_on_across_a_restart(
    shim: Shim, images: Images, wire: Wire, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle)
    container = container_of(task)
    wire.forget()
    begun = time.monotonic()
    stopping = threading.Thread(target=_terminate_quietly, args=(task, 6))
    stopping.start()
    eventually(lambda: wire.seen("POST", STOP), within=5, saying="its stop was asked for")
    shim.kill()
    stopping.join(10)
    shim.start()
    while time.monotonic() - begun < 5:
        container.reload()
        assert container.status == "running"
        time.sleep(0.1)  # nothing to wait for: it must go on
    eventually(lambda: container_of(task).status == "exited", within=5)
    task.end()


# -- census -----------------------------------------------------------------------------------


@row("R37", "R38", "R15")
def test_after_a_mixed_life_only_what_is_known_is_left(
    new_shim: MakeShim, images: Images, engine: docker.DockerClient, container_of: ContainerOf
) -> None:
    shim = new_shim()
    runs = shim.run(images.idle, name="runs")
    ended = shim.submit(images.exits(0), name="ended")
    ended.end()
    failed = shim.submit(images.idle, name="failed", memory=1)
    failed.end()
    stopped = shim.run(images.idle, name="stopped")
    stopped.terminate()
    gone = shim.run(images.idle, name="gone")
    gone.terminate()
    gone.remove()
    shim.restart()
    assert set(shim.task_list()) == {task.id for task in (runs, ended, failed, stopped)}
    dirs = {path.name for path in (shim.home / "runners").iterdir() if path.name[0] != "."}
    assert dirs == {task.container_name for task in (runs, ended, failed, stopped)}
    label = "ai.dstack.shim.is-task=true"
    running = engine.containers.list(filters={"label": label})
    assert [container.id for container in running] == [container_of(runs).id]
    for task in (runs, ended, failed, stopped):
        task.terminate()
        assert task.remove().status_code == 200
    assert engine.containers.list(all=True, filters={"label": label}) == []
    assert list((shim.home / "runners").iterdir()) == []


def _task_list_once_up(shim: Shim) -> dict[str, str] | None:
    try:
        return shim.task_list()
    except httpx.TransportError:
        return None


def _held_for_good(go_on: threading.Event) -> Callable[[Request], Reply]:
    """A request that is not answered while its shim lives, and never reaches the engine."""

    def hold(request: Request) -> Reply:
        go_on.wait(60)
        return refusal(500, "held for good")

    return hold


def _older(wire: Wire, request: Request) -> Reply:
    """The engine's answer with every container's creation an hour earlier."""
    status, body = wire.ask(request)
    answer = json.loads(body)
    for container in answer if isinstance(answer, list) else [answer]:
        created = container.get("Created")
        if isinstance(created, int):
            container["Created"] = created - 3600
        elif isinstance(created, str):
            moment = datetime.fromisoformat(f"{created[:19]}+00:00") - timedelta(hours=1)
            container["Created"] = moment.strftime("%Y-%m-%dT%H:%M:%S.000000001Z")
    return Reply(status, json.dumps(answer).encode())


def _terminate_quietly(task: Task, timeout: int) -> None:
    try:
        task.terminate("terminated_by_user", timeout=timeout)
    except httpx.TransportError:
        return
