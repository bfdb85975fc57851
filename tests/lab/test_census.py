"""The census finds what it is there to find: each invariant is broken once by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.census import Census

KEY = "ssh-ed25519 AAAA me"
TASK = {
    "id": "t1",
    "status": "running",
    "termination_reason": "",
    "termination_message": "",
    "container_name": "job-1",
    "gpus_ids": ["GPU-1"],
}


class Engine:
    """As much of the SDK's client as a census asks."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def containers(self, **_: Any) -> list[dict[str, Any]]:
        return self.items

    def inspect_container(self, _: str) -> dict[str, Any]:
        return {"Config": {"Labels": {"a": "pass-w0rd"}}}

    def add(self, task_id: str, state: str = "running", **labels: str) -> None:
        told = {"ai.dstack.shim.is-task": "true", "ai.dstack.shim.task-id": task_id}
        self.items.append({"Id": "c" * 64, "State": state, "Labels": {**told, **labels}})


class Host:
    """A home with one running task, in order."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.engine = Engine()
        self.engine.add("t1")
        self.tasks: dict[str, dict[str, Any]] = {"t1": dict(TASK)}
        self.keys = home / "authorized_keys"
        self.keys.write_text(f"other line\n{KEY} # added by dstack-shim\n")
        self.write("job-1", "t1")
        (home / "runners" / "old").mkdir()
        client: Any = self.engine
        self.census = Census(home, client, self.ask, key_files={"root": self.keys})
        self.census.accepted("t1")

    def ask(self, path: str) -> Any:
        if path == "/api/tasks":
            return {"tasks": [{"id": task_id} for task_id in self.tasks]}
        return dict(self.tasks[path.rpartition("/")[2]])

    def write(self, name: str, task_id: str, **parts: Any) -> None:
        record = {
            "id": task_id,
            "cleaned_up": False,
            "termination_reason": "",
            "config": {"host_ssh_user": "root", "host_ssh_keys": [KEY], "volumes": None},
            **parts,
        }
        directory = self.home / "runners" / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "task.json").write_text(json.dumps(record))

    def task(self, task_id: str = "t1", **parts: Any) -> None:
        self.tasks[task_id] = {**TASK, "id": task_id, **parts}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_host_in_order_has_no_violation(host: Host) -> None:
    assert host.census.take() == []
    assert host.census.take() == []


def test_1_a_gpu_under_two_tasks(host: Host) -> None:
    host.task("t2", container_name="job-2")
    host.write("job-2", "t2")
    assert host.census.take() == ["1: GPU-1 is held by 2 tasks"]


def test_2_a_volume_that_is_not_mounted(host: Host) -> None:
    config = {"host_ssh_user": "", "volumes": [{"name": "data"}]}
    host.keys.write_text("other line\n")
    host.write("job-1", "t1", config=config)
    assert host.census.take() == ["2: volume data is not mounted"]


def test_3_a_key_of_nobody(host: Host) -> None:
    host.write("job-1", "t1", config={"host_ssh_user": "root", "host_ssh_keys": []})
    assert [line[:2] for line in host.census.take()] == ["3:"]


def test_3_a_missing_key(host: Host) -> None:
    host.keys.write_text("other line\n")
    assert "lacks the key" in host.census.take()[0]


def test_3_a_changed_line_of_somebody_else(host: Host) -> None:
    host.keys.write_text(f"other line\r\n{KEY} # added by dstack-shim\n")
    assert host.census.take() == [f"3: other lines of {host.keys} were changed"]


def test_4_a_container_of_a_task_that_does_not_run(host: Host) -> None:
    host.task(status="terminated", termination_reason="done_by_runner")
    assert "its task t1 is terminated" in host.census.take()[0]


def test_4_two_containers_of_one_task(host: Host) -> None:
    host.engine.add("t1", "exited")
    assert host.census.take() == ["4: task t1 has 2 containers"]


def test_4_containers_of_another_home_are_not_ours(host: Host) -> None:
    host.engine.add("t9", **{"ai.dstack.shim.home": "/another"})
    assert host.census.take() == []


def test_5_a_directory_of_no_task(host: Host) -> None:
    host.write("job-9", "t9", cleaned_up=True)
    assert host.census.take() == ["5: directory job-9 belongs to no task"]


def test_5_a_directory_that_was_not_ours(host: Host) -> None:
    (host.home / "runners" / "old").rmdir()
    assert host.census.take() == ["5: directory old was not ours to remove"]


def test_6_an_accepted_task_that_is_unknown(host: Host) -> None:
    host.census.accepted("t2")
    assert host.census.take() == ["6: task t2 is unknown"]
    host.census.removed("t2")
    assert host.census.take() == []


def test_6_a_task_that_goes_back(host: Host) -> None:
    assert host.census.take() == []
    host.task(status="pulling")
    assert "6: task t1 went from running to pulling" in host.census.take()


def test_6_an_end_that_changes(host: Host) -> None:
    host.engine.items.clear()
    host.task(status="terminated", termination_reason="terminated_by_user")
    assert host.census.take() == []
    host.task(status="terminated", termination_reason="done_by_runner")
    assert "6: task t1 changed its end" in host.census.take()[0]


def test_7_a_secret_in_a_file_or_a_label(host: Host) -> None:
    (host.home / "shim.log").write_text("password=pass-w0rd")
    found = host.census.secrets("pass-w0rd", "never-seen")
    assert len(found) == 2
    assert "shim.log" in found[0]
    assert "container" in found[1]
