"""C: a container's name, labels, command and mounts."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from pathlib import Path

import docker
import pytest

from tests.conformance.conftest import MakeShim
from tests.conformance.containers import ContainerOf, mount_of, runner_arguments
from tests.conformance.images import Images
from tests.conformance.instance import VOLUMES, Instance
from tests.conformance.rows import row
from tests.conformance.shim import Shim
from tests.eventually import eventually
from tests.lab.images import write_runner


@pytest.fixture
def folder(instance: Instance) -> Path:
    """A folder of the host for instance mounts."""
    made = instance.root / f"mounts-{time.monotonic_ns()}"
    made.mkdir()
    return made


# -- name, labels, command --------------------------------------------------------------------


@row("C1")
@pytest.mark.parametrize("name", ["job-0-0", "a1", "With_All.of-them", "x" * 150])
def test_name_is_the_tasks_with_a_digest(
    name: str, shim: Shim, images: Images, engine: docker.DockerClient
) -> None:
    task = shim.submit(images.idle, name=name)
    digest = hashlib.sha256(f"{name}/{task.id}".encode()).hexdigest()
    expected = f"{name}-{digest[:8]}"
    assert task.info()["container_name"] == expected
    task.reach("running")
    assert engine.containers.get(expected).id == task.info()["container_id"]


@row("C2")
def test_image_is_the_submitted_string(
    shim: Shim, images: Images, engine: docker.DockerClient, container_of: ContainerOf
) -> None:
    engine.images.get(images.idle).tag("host.example:5000/team/job", "v1")
    task = shim.run("host.example:5000/team/job:v1")
    assert container_of(task).attrs["Config"]["Image"] == "host.example:5000/team/job:v1"


@row("C3")
def test_labels_name_the_task(shim: Shim, images: Images, container_of: ContainerOf) -> None:
    task = shim.run(images.idle, id="an id with ü")
    labels = container_of(task).labels
    assert labels["ai.dstack.shim.is-task"] == "true"
    assert labels["ai.dstack.shim.task-id"] == "an id with ü"


@row("C4")
def test_command_is_one_string_for_a_shell(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    made = container_of(shim.run(images.idle)).attrs["Config"]
    assert made["Entrypoint"] == ["/bin/sh", "-c"]
    assert len(made["Cmd"]) == 1


@row("C5")
@pytest.mark.parametrize(
    ("tool", "asked"),
    [
        ("apt-get", ["update", "install -y openssh-server"]),
        ("yum", ["install -y openssh-server"]),
        ("apk", ["openssh-server"]),
    ],
)
def test_missing_sshd_is_installed_first(
    tool: str, asked: list[str], shim: Shim, images: Images
) -> None:
    script = f'#!/bin/sh\necho "{tool} $* [$LD_PRELOAD$LD_LIBRARY_PATH] $DEBIAN_FRONTEND" >>/log\n'
    base = images.job("cat /log; echo runner; exit 3", sshd=False)
    image = images.built(
        f"conformance/{tool}:1",
        base,
        f"COPY tool /usr/bin/{tool}",
        "ENV LD_PRELOAD=/none LD_LIBRARY_PATH=/none",
        tool=script,
    )
    _, message = shim.submit(image).outcome()
    *calls, last = message.splitlines()
    assert last == "runner"
    assert len(calls) == len(asked)
    for call, words in zip(calls, asked, strict=True):
        assert words in call
        assert "[]" in call  # both variables are unset for it
    if tool == "apt-get":
        assert calls[-1].endswith("noninteractive")


@row("C5")
def test_image_with_sshd_installs_nothing(shim: Shim, images: Images) -> None:
    image = images.built(
        "conformance/has-sshd:1",
        images.job("ls /log 2>&1; echo runner; exit 3"),
        "COPY tool /usr/bin/apt-get",
        tool="#!/bin/sh\ntouch /log\n",
    )
    _, message = shim.submit(image).outcome()
    assert "No such file" in message
    assert message.endswith("runner")


@row("C6")
def test_image_without_any_installer_says_so(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.submit(images.job("echo runner", sshd=False))
    reason, message = task.outcome()
    assert reason == "container_exited_with_error"
    assert "Lab Linux" in message
    assert "not supported" in message
    assert "runner" not in message
    assert container_of(task).attrs["State"]["ExitCode"] == 11


@row("C7", "C8", "L7", "L8", "L9")
@pytest.mark.parametrize("network", ["host", "bridge"])
def test_runner_is_started_with_the_shims_settings(
    network: str, shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle, network_mode=network)
    http, ssh = shim.runner_ports
    expected = [
        *("--log-level", "info", "start", "--temp-dir", "/tmp/runner"),
        *("--http-port", str(http), "--ssh-port", str(ssh)),
    ]
    if network == "host":
        expected += ["--http-address", "localhost"]
    assert runner_arguments(container_of(task)) == expected


@row("C7", "L9")
@pytest.mark.parametrize("level", ["5", "debug", "WARN"])
def test_runner_log_level_is_passed_as_given(
    level: str, new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    shim = new_shim(f"--runner-log-level={level}")
    arguments = runner_arguments(container_of(shim.run(images.idle)))
    assert arguments[arguments.index("--log-level") + 1] == level


@row("C9")
def test_container_keys_reach_the_runner_in_order(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    keys = ["ssh-ed25519 AAAAone a comment", "ssh-rsa AAAAtwo", "ssh-ed25519 AAAAthree me@host"]
    task = shim.run(images.idle, container_ssh_keys=keys)
    arguments = runner_arguments(container_of(task))
    places = [n for n, word in enumerate(arguments) if word == "--ssh-authorized-key"]
    assert [arguments[place + 1] for place in places] == keys


@row("C10")
@pytest.mark.parametrize(
    "key",
    [
        "ssh-ed25519 AAAA it's",
        'ssh-ed25519 AAAA "quoted" \\ back\\slash',
        "ssh-ed25519 AAAA $HOME `id` $(id) ${x}",
        "ssh-ed25519 AAAA two\nlines; exit 9",
        "ssh-ed25519 AAAA 🐧 && exit 9 #",
        "' ; exit 9 ; '",
        "",
    ],
)
def test_any_key_reaches_the_runner_as_sent(
    key: str, shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle, container_ssh_keys=[key, "ssh-rsa AAAAlast"])
    arguments = runner_arguments(container_of(task))
    first = arguments.index("--ssh-authorized-key")
    assert arguments[first:] == [
        *("--ssh-authorized-key", key, "--ssh-authorized-key", "ssh-rsa AAAAlast")
    ]


@row("C11", "L10")
def test_ssh_log_level_is_passed_if_set(
    new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    shim = new_shim("--runner-ssh-log-level=debug3")
    arguments = runner_arguments(container_of(shim.run(images.idle)))
    assert arguments[-2:] == ["--ssh-log-level", "debug3"]


@row("C12")
@pytest.mark.parametrize(
    ("version", "known"),
    [("0.20.10", False), ("0.20.18", False), ("0.20.19", True), ("0.21.0rc1", True)],
)
def test_flags_are_those_the_runner_knows(
    version: str,
    known: bool,
    new_shim: MakeShim,
    images: Images,
    instance: Instance,
    container_of: ContainerOf,
) -> None:
    runner = write_runner(instance.root / f"runner-{version}", version)
    shim = new_shim(f"--runner-binary-path={runner}", "--runner-ssh-log-level=info")
    arguments = runner_arguments(container_of(shim.run(images.idle)))
    assert ("--ssh-log-level" in arguments) is known
    assert "--http-address" in arguments


@row("C12")
@pytest.mark.parametrize("version", ["0.19.38", "0.20.9"])
def test_runner_too_old_is_refused_in_words(
    version: str, new_shim: MakeShim, images: Images, instance: Instance
) -> None:
    runner = write_runner(instance.root / f"runner-{version}", version)
    shim = new_shim(f"--runner-binary-path={runner}")
    reason, message = shim.submit(images.idle).outcome()
    assert reason in {"executor_error", "creating_container_error"}
    assert version in message


# -- mounts -----------------------------------------------------------------------------------


@row("C13", "C14")
def test_runner_and_its_folder_are_mounted(
    shim: Shim, images: Images, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle)
    container = container_of(task)
    runner = mount_of(container, "/usr/local/bin/dstack-runner")
    assert runner["Source"] == str(shim.setting.runner)
    folder = mount_of(container, "/tmp/runner")
    assert folder["RW"]
    assert Path(folder["Source"]).is_relative_to(task.dir)
    eventually((Path(folder["Source"]) / "argv").exists, within=5)  # the stand-in wrote it


@row("C16", "C18")
def test_instance_mount_is_bound(
    shim: Shim, images: Images, container_of: ContainerOf, folder: Path
) -> None:
    (folder / "data").write_text("from the host")
    mount = {"instance_path": str(folder), "path": "/in/side"}
    task = shim.run(images.idle, instance_mounts=[mount])
    container = container_of(task)
    found = mount_of(container, "/in/side")
    assert found["Source"] == str(folder)
    assert found["RW"]
    assert container.exec_run(["cat", "/in/side/data"]).output == b"from the host"
    # Asked for as mounts, not as binds: the engine makes a bind's missing source.
    assert not container.attrs["HostConfig"]["Binds"]


@row("C17")
def test_missing_instance_path_is_created_for_everybody(
    shim: Shim, images: Images, folder: Path, container_of: ContainerOf
) -> None:
    wanted = folder / "a" / "b" / "c"
    mount = {"instance_path": str(wanted), "path": "/in"}
    task = shim.run(images.idle, instance_mounts=[mount])
    assert container_of(task).exec_run(["touch", "/in/file"], user="worker").exit_code == 0
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o777
    assert stat.S_IMODE(wanted.parent.stat().st_mode) == 0o755
    assert stat.S_IMODE(wanted.parent.parent.stat().st_mode) == 0o755
    task.terminate()
    task.remove()
    assert wanted.is_dir()


@row("C17")
def test_existing_instance_path_is_left_alone(
    shim: Shim, images: Images, folder: Path, container_of: ContainerOf
) -> None:
    private, file = folder / "private", folder / "file"
    private.mkdir(mode=0o710)
    os.chown(private, 2001, 2001)
    file.write_text("text")
    file.chmod(0o640)
    mounts = [
        {"instance_path": str(private), "path": "/in"},
        {"instance_path": str(file), "path": "/a-file"},
    ]
    task = shim.run(images.idle, instance_mounts=mounts)
    assert (stat.S_IMODE(private.stat().st_mode), private.stat().st_uid) == (0o710, 2001)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert container_of(task).exec_run(["cat", "/a-file"]).output == b"text"


@row("C17", "S11")
def test_instance_path_below_a_file_fails_the_task(
    shim: Shim, images: Images, folder: Path
) -> None:
    (folder / "file").write_text("text")
    mount = {"instance_path": str(folder / "file" / "below"), "path": "/in"}
    reason, message = shim.submit(images.idle, instance_mounts=[mount]).outcome()
    assert reason == "executor_error"
    assert "file" in message


@row("C18")
def test_volume_mount_without_volume_fails_and_creates_nothing(shim: Shim, images: Images) -> None:
    task = shim.task(images.idle, volume_mounts=[{"name": "nowhere", "path": "/v"}])
    if shim.post("/api/tasks", task.body).status_code == 200:
        assert task.outcome()[0] in {"creating_container_error", "executor_error"}
    assert not (VOLUMES / "nowhere").exists()
