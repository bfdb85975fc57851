"""All three layouts of dstack's own shim beside each other on a real engine, and back to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import docker
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.statuses import TaskStatus

from tests.contracts import stock_reader
from tests.lab import stock_layouts
from tests.lab.host import Host
from tests.lab.images import RUNS_ON, Images
from tests.lab.stock_layouts import LAYOUTS, Layout

RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED
JOB = "until [ -e /tmp/runner/go ]; do sleep 0.05; done; echo last words; exit 7"


def leave(home: Path, client: docker.APIClient, image: str, layout: Layout) -> tuple[str, Path]:
    """A running task as dstack's own shim leaves it: its id, and what ends its job."""
    task_id = f"of-{LAYOUTS.index(layout)}"
    config = stock_layouts.config(task_id, gpu=0, image_name=image)
    mounted = stock_layouts.make_task_dir(home, layout, config)
    binds = [f"{mounted}:/tmp/runner"]
    box = client.create_container(
        image,
        ["/bin/sh", "-c", JOB],
        name=container_name(config["name"], task_id),
        labels=stock_layouts.labels(task_id),
        host_config=client.create_host_config(binds=binds, network_mode="host"),
    )["Id"]
    client.start(box)
    return task_id, mounted / "go"


def hand_to_dstack_and_back(home: Path) -> dict[str, dict[str, Any]]:
    """dstack's own shim reads every record strictly and writes it again."""
    read = {}
    for record in (home / "runners").glob("*/task.json"):
        raw = record.read_bytes()
        read[record.parent.name] = stock_reader.read(raw)
        record.write_bytes(stock_reader.rewrite(raw))
    return read


def test_tasks_of_every_layout_go_over_to_us_and_back_while_they_run(
    instance: Host, images: Images, client: docker.APIClient
) -> None:
    shim = instance.shim()
    left = dict(leave(shim.home, client, images.plain(), layout) for layout in LAYOUTS)
    shim.start()
    shim.submit("ours", images.job(RUNS_ON))
    shim.wait_for("ours", RUNNING)
    before = {task_id: shim.client.task(task_id) for task_id in (*left, "ours")}
    assert {info.status for info in before.values()} == {RUNNING}
    for _ in range(2):
        shim.kill()
        assert hand_to_dstack_and_back(shim.home)
        shim.start()
        assert {task_id: shim.client.task(task_id) for task_id in before} == before
    for task_id, go in left.items():
        go.touch()
        info = shim.wait_for(task_id, TERMINATED)
        assert info.termination_reason == "container_exited_with_error"
        assert info.termination_message == "last words"
    ended = {task_id: shim.client.task(task_id) for task_id in before}
    shim.kill()
    records = hand_to_dstack_and_back(shim.home)
    assert {name: record["cleaned_up"] for name, record in records.items()} == {
        info.container_name: task_id != "ours" for task_id, info in ended.items()
    }
    shim.start()
    assert {task_id: shim.client.task(task_id) for task_id in before} == {
        task_id: attrs.evolve(info, gpus_ids=()) for task_id, info in ended.items()
    }
    shim.remove_all()
    assert list((shim.home / "runners").iterdir()) == []
    assert client.containers(all=True) == []
