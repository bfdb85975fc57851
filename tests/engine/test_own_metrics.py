"""What the shim tells of itself, against a host where that is so."""

from __future__ import annotations

import re
import urllib.request

from dstack_shim_contracts.api import VolumeMount
from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.host import Host, public_key, run, volume
from tests.lab.images import RUNS_ON, Images
from tests.lab.shim import ShimProcess


def metrics(shim: ShimProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{shim.port}/metrics", timeout=9) as answer:
        text = answer.read().decode()
    return {
        name.removeprefix("dstack_shim_"): float(value)
        for name, value in re.findall(r"^(dstack_shim_\S+) (\S+)$", text, re.MULTILINE)
    }


def leaked(shim: ShimProcess) -> dict[str, float]:
    names = ("gpu", "volume", "host_key")
    told = metrics(shim)
    return {name: told[f'leaked_resources{{kind="{name}"}}'] for name in names}


def test_what_is_held_for_nobody_is_counted_and_nothing_else(
    instance: Host, images: Images
) -> None:
    instance.disk("data")
    instance.disk("other", file_system=True)
    instance.user("worker")
    shim = instance.start_shim()
    shim.submit(
        "t",
        images.job(RUNS_ON),
        volumes=(volume("data", init_fs=True),),
        volume_mounts=(VolumeMount("data", "/data"),),
        host_ssh_user="worker",
        host_ssh_keys=(public_key(1),),
    )
    shim.wait_for("t", TaskStatus.RUNNING)
    assert metrics(shim)['tasks{status="running"}'] == 1
    assert leaked(shim) == {"gpu": 0, "volume": 0, "host_key": 0}
    point = "/mnt/disks/dstack-volumes/nobodys"
    run("mkdir", "-p", point)
    run("mount", "/dev/disk/by-id/google-other", point)
    theirs = f"{public_key(2)} # added by dstack-shim\n".encode()
    instance.write_keys("worker", instance.keys_of("worker") + theirs)
    assert leaked(shim) == {"gpu": 0, "volume": 1, "host_key": 1}


def test_damaged_records_and_restores_are_told(instance: Host, images: Images) -> None:
    shim = instance.start_shim()
    shim.submit("t", images.job(RUNS_ON))
    shim.wait_for("t", TaskStatus.RUNNING)
    shim.kill()
    (record,) = shim.home.glob("runners/*/task.json")
    record.write_bytes(record.read_bytes()[:-9])
    shim.start()
    told = metrics(shim)
    assert told["quarantined_records"] == 1
    assert told['events_total{level="error",event="record.damaged"}'] == 1
    assert 0 < told["restore_seconds"] < 30
    assert told["step_seconds_count"] >= 1
