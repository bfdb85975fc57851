"""D: what a shim keeps on disk, and which older layouts it finds there."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.conformance.conftest import MakeShim
from tests.conformance.containers import ContainerOf, mount_of
from tests.conformance.images import Images, tell
from tests.conformance.instance import Instance, command
from tests.conformance.old_layouts import OldTask
from tests.conformance.rows import row
from tests.conformance.secrets import NO_LOGIN, ODD, WRONG, Watch, has_secret
from tests.conformance.shim import Shim
from tests.eventually import eventually

KNOWN_KEYS = {
    *("version", "id", "config", "termination_reason", "termination_message", "cleaned_up")
}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@row("D1", "L1")
def test_home_is_below_the_users_by_default(new_shim: MakeShim, images: Images) -> None:
    shim = new_shim(start=False)
    assert shim.home.name == ".dstack"
    shim.without_argument("--shim-home")
    shim.start()
    task = shim.run(images.idle)
    assert task.dir.is_dir()
    assert (shim.home / "shim.log").is_file()


@row("D2", "L36")
def test_log_is_appended_to(new_shim: MakeShim, images: Images) -> None:
    shim = new_shim(start=False)
    log = shim.home / "shim.log"
    log.write_text("from an earlier life\n")
    shim.start()
    shim.submit(images.exits(0)).end()
    first = log.read_text()
    assert first.startswith("from an earlier life\n")
    assert len(first) > len("from an earlier life\n")
    shim.restart()
    assert log.read_text().startswith(first)


@row("L36")
def test_log_goes_to_standard_error_too(new_shim: MakeShim) -> None:
    shim = new_shim()
    shim.stop()
    logged = (shim.home / "shim.log").read_text().splitlines()
    printed = shim.errors.read_text().splitlines()
    assert logged
    assert set(logged) <= set(printed)


@row("D3", "D4", "C13")
def test_task_dir_is_private_and_the_jobs_part_is_not(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle)
    assert task.dir == shim.home / "runners" / task.info()["container_name"]
    assert mode(task.dir) == 0o700
    assert mode(task.dir / "runner") == 0o755
    assert mount_of(container_of(task), "/tmp/runner")["Source"] == str(task.dir / "runner")


@row("D5")
def test_remove_deletes_the_dir(shim: Shim, images: Images) -> None:
    task = shim.run(images.job("mkdir -p /tmp/runner/a/b; echo x >/tmp/runner/a/b/c; sleep 1000"))
    eventually((task.dir / "runner" / "a" / "b" / "c").exists, within=5)
    task.terminate()
    assert task.dir.is_dir()
    task.remove()
    assert not task.dir.exists()
    assert list((shim.home / "runners").iterdir()) == []


@row("D5")
def test_remove_follows_no_link_out_of_the_dir(
    shim: Shim, images: Images, instance: Instance
) -> None:
    outside = instance.root / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "precious").write_text("keep")
    task = shim.run(images.job(f"ln -s {outside} /tmp/runner/link; sleep 1000"))
    eventually((task.dir / "runner" / "link").is_symlink, within=5)
    task.terminate()
    task.remove()
    assert not task.dir.exists()
    assert (outside / "precious").read_text() == "keep"


@row("D6")
def test_dir_that_cannot_be_deleted_is_put_aside(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    stuck = task.dir / "runner" / "stuck"
    stuck.write_text("x")
    try:
        command("chattr", "+i", stuck)
    except RuntimeError:
        pytest.skip("this file system has no immutable files")
    task.terminate()
    answer = task.remove()
    left = list((shim.home / "runners").iterdir())
    for place in left:
        command("chattr", "-R", "-i", place)
    assert answer.status_code == 200
    assert task.get().status_code == 404
    (trash,) = left
    assert trash.name.startswith(f".trash-{task.container_name}-")
    assert trash.name.rpartition("-")[2].isdigit()


@row("D7", "R17")
def test_what_is_no_task_dir_is_not_touched(
    new_shim: MakeShim, images: Images, instance: Instance
) -> None:
    shim = new_shim(start=False)
    runners = shim.home / "runners"
    record = {"version": 1, "id": "ghost", "config": {"id": "ghost", "name": "n"}, **_NOT_ENDED}
    elsewhere = instance.root / "elsewhere"
    for folder in (runners / ".hidden", elsewhere):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.json").write_text(json.dumps(record) + "\n")
    (runners / "link").symlink_to(elsewhere)
    (runners / "file").write_text("not a dir")
    (runners / "bare").mkdir()
    (runners / "bare" / "data").write_text("x")
    before = _tree(runners)
    shim.start()
    assert shim.task_list() == {}
    task = shim.run(images.idle)
    task.terminate()
    task.remove()
    shim.restart()
    assert _tree(runners) == before
    assert json.loads((elsewhere / "task.json").read_text()) == record


@row("D8")
def test_everything_else_in_runners_has_a_dot_name(shim: Shim, images: Images) -> None:
    tasks = [shim.run(images.idle, name=name) for name in ("one", "two")]
    tasks[0].terminate()
    names = {place.name for place in (shim.home / "runners").iterdir()}
    assert {name for name in names if not name.startswith(".")} == {
        task.container_name for task in tasks
    }


@row("D9", "P5")
def test_credentials_are_nowhere(
    new_shim: MakeShim, images: Images, container_of: ContainerOf, engine: docker.DockerClient
) -> None:
    shim = new_shim("--shim-log-level=trace")
    engine.images.get(images.idle).tag("conformance/secret", "1")
    task = shim.run("conformance/secret:1", **ODD.fields)
    failing = shim.submit("127.0.0.1:1/none:1", name="fails", **WRONG.fields)
    failing.end()
    shim.restart()
    kept = [path for path in shim.home.parent.rglob("*") if path.is_file()]
    texts = [path.read_bytes() for path in [*kept, shim.errors]]
    texts.append(json.dumps(container_of(task).attrs).encode())
    texts.append(json.dumps([task.info(), failing.info()]).encode())
    texts += _process_arguments()
    assert any(path.name == "task.json" for path in kept)
    assert not [text for text in texts if has_secret(text)]


@row("D9", "P5")
@pytest.mark.last(2)
def test_credentials_of_the_whole_run_are_nowhere(watch: Watch, shim: Shim) -> None:
    """Every task of every case had a login; this looks at what has been seen beside them all."""
    watch.look()
    assert watch.found == set()
    assert watch.looks > 1
    assert watch.requests > 0


@row("D10", "D11")
def test_record_is_one_json_object_and_a_newline(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    file = task.dir / "task.json"
    assert mode(file) == 0o600
    text = file.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    record = json.loads(text)
    assert set(record) >= KNOWN_KEYS
    assert record["version"] == 1
    assert type(record["version"]) is int
    assert record["id"] == task.id
    assert (record["termination_reason"], record["termination_message"]) == ("", "")
    assert record["cleaned_up"] is False


@row("D12", "A46")
def test_config_is_the_body_with_defaults_and_without_credentials(
    shim: Shim, images: Images
) -> None:
    body: dict[str, Any] = {
        **ODD.fields,
        "container_user": "",
        "network_mode": "",
        "cpu": 0.5,
        "memory": 64 * 1024 * 1024,
        "container_ssh_keys": ["ssh-ed25519 AAAA ü 'x'"],
    }
    task = shim.run(images.idle, **body)
    config = task.record["config"]
    expected = task.body | {
        **NO_LOGIN,
        "container_user": "root",
        "network_mode": "host",
    }
    assert {key: config[key] for key in expected} == expected
    assert (config["gpu"], config["shm_size"], config["privileged"]) == (0, 0, False)
    for empty in ("volumes", "volume_mounts", "instance_mounts", "gpu_devices", "host_ssh_keys"):
        assert not config[empty]


@row("D13")
@pytest.mark.parametrize("end", ["terminate", "exit", "fail"])
def test_record_says_what_the_api_says_at_the_end(end: str, shim: Shim, images: Images) -> None:
    if end == "terminate":
        task = shim.run(images.idle)
        task.terminate("terminated_by_user", "ü\n'x'")
    elif end == "exit":
        task = shim.submit(images.exits(3, "words"))
    else:
        task = shim.submit(images.idle, memory=1)
    reason, message = task.outcome()
    assert eventually(lambda: task.record["cleaned_up"] is True, within=5)
    record = task.record
    assert (record["termination_reason"], record["termination_message"]) == (reason, message)


@row("D14")
def test_further_keys_are_not_the_known_ones_in_other_letters(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    keys = list(task.record)
    assert len({key.lower() for key in keys}) == len(keys)


@row("D15", "R18")
def test_record_is_on_disk_when_submit_answers(new_shim: MakeShim, images: Images) -> None:
    shim = new_shim()
    for number in range(5):
        task = shim.submit(images.idle, name=f"t{number}")
        assert task.record["id"] == task.id
        task.reach("running")


@row("D15")
def test_submit_without_room_for_its_record_is_500(
    new_shim: MakeShim, images: Images, engine: docker.DockerClient
) -> None:
    shim = new_shim(start=False)
    runners = shim.home / "runners"
    runners.mkdir()
    shim.start()
    shim.run(images.idle, name="before").terminate()
    command("mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=1", "tmpfs", runners)
    try:
        task = shim.task(images.idle, name="no-room")
        assert shim.post("/api/tasks", task.body).status_code == 500
        assert task.get().status_code == 404
        assert list(runners.iterdir()) == []
        label = f"ai.dstack.shim.task-id={task.id}"
        assert engine.containers.list(all=True, filters={"label": label}) == []
    finally:
        command("umount", runners)
    task.submit().reach("running")


@row("D16")
def test_leftover_of_a_cut_write_does_no_harm(new_shim: MakeShim, images: Images) -> None:
    shim = new_shim()
    task = shim.run(images.idle)
    shim.kill()
    (task.dir / "task.json.tmp").write_text('{"version": 1, "id": "cu')
    shim.start()
    assert task.status == "running"
    task.terminate()
    assert task.remove().status_code == 200
    assert not task.dir.exists()


@row("D17", "R21")
def test_record_with_other_letters_and_nearly_no_config_is_read(
    new_shim: MakeShim, images: Images
) -> None:
    shim = new_shim()
    task = shim.run(images.idle)
    task.terminate("terminated_by_user", "by a user")
    shim.kill()
    record = {
        "VERSION": 1,
        "Id": task.id,
        "CONFIG": {"Id": task.id, "NAME": task.body["name"]},
        "Termination_Reason": "max_duration_exceeded",
        "termination_MESSAGE": "too long",
        "cleaned_Up": True,
    }
    (task.dir / "task.json").write_text(json.dumps(record) + "\n")
    shim.start()
    assert task.outcome() == ("max_duration_exceeded", "too long")


@row("D18", "R1", "R3")
@pytest.mark.parametrize("code", [0, 5])
def test_task_of_an_old_release_is_adopted_and_finishes(
    code: int, new_shim: MakeShim, images: Images, old_task: Any
) -> None:
    shim = new_shim(start=False)
    old: OldTask = old_task(shim, images.idle)
    shim.start()
    assert shim.task_list() == {old.task.id: "running"}
    assert old.task.info()["container_id"] == old.container.id
    assert old.task.info()["container_name"] == old.task.container_name
    tell(old.container, code)
    expected = "container_exited_with_error" if code else "done_by_runner"
    assert old.task.outcome()[0] == expected
    assert old.task.remove().status_code == 200
    assert not old.task.dir.exists()


@row("D19", "D18", "R38")
def test_all_layouts_lie_side_by_side(
    new_shim: MakeShim, images: Images, old_task: Any, container_of: ContainerOf
) -> None:
    shim = new_shim()
    new = shim.run(images.idle, name="new")
    shim.kill()
    oldest = old_task(shim, images.idle, name="oldest")
    middle = old_task(shim, images.idle, name="middle", record=_NOT_ENDED)
    shim.start()
    tasks = (new, oldest.task, middle.task)
    assert shim.task_list() == {task.id: "running" for task in tasks}
    for container in (container_of(new), oldest.container, middle.container):
        tell(container, 0)
    assert {task.outcome()[0] for task in tasks} == {"done_by_runner"}
    assert {task.remove().status_code for task in tasks} == {200}
    assert list((shim.home / "runners").iterdir()) == []


@row("D20")
@pytest.mark.parametrize("folder", ["/etc/ssh", "../../../../etc"])
def test_record_a_job_could_write_points_nowhere_else(
    folder: str, new_shim: MakeShim, images: Images, old_task: Any, instance: Instance
) -> None:
    instance.forget_user_files("alice")
    forged = {
        "host_ssh_user": "alice",
        "host_ssh_keys": ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA x"],
        "instance_mounts": [{"instance_path": str(instance.root / "forged"), "path": "/p"}],
        "name": folder,
    }  # fmt: skip
    shim = new_shim(start=False)
    before = _tree(Path("/etc"))
    old: OldTask = old_task(shim, images.idle, record=_NOT_ENDED, config=forged)
    shim.start()
    tell(old.container, 0)
    assert old.task.outcome()[0] == "done_by_runner"
    assert old.task.remove().status_code == 200
    assert not (instance.user("alice") / ".ssh").exists()
    assert not (instance.root / "forged").exists()
    assert _tree(Path("/etc")) == before


@row("D20", "V17")
def test_record_a_job_could_write_unmounts_nothing(
    new_shim: MakeShim, images: Images, old_task: Any
) -> None:
    victim = Path("/mnt/disks/dstack-volumes/victim")
    victim.mkdir(parents=True, exist_ok=True)
    command("mount", "-t", "tmpfs", "tmpfs", victim)
    volume = {"backend": "gcp", "name": "victim", "volume_id": "1", "init_fs": False}
    shim = new_shim(start=False)
    old: OldTask = old_task(
        shim,
        images.idle,
        record=_NOT_ENDED,
        config={"volumes": [volume, volume | {"name": "../.."}]},
    )
    shim.start()
    tell(old.container, 0)
    old.task.end()
    old.task.remove()
    assert os.path.ismount(victim)
    assert os.path.ismount("/mnt")


_NOT_ENDED = {"termination_reason": "", "termination_message": "", "cleaned_up": False}


def _tree(folder: Path) -> list[tuple[str, int, int]]:
    """Names, modes and sizes of everything below a folder."""
    found = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(str(path), status.st_mode, status.st_size) for path, status in found]


def _process_arguments() -> list[bytes]:
    texts = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            texts.append(file.read_bytes())
        except OSError:  # ended meanwhile
            continue
    return texts
