"""H: a task's GPU metrics, with a stand-in for NVIDIA's exporter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance import gpus
from tests.conformance.conftest import MakeShim
from tests.conformance.gpus import UUIDS
from tests.conformance.images import Images
from tests.conformance.instance import Instance
from tests.conformance.rows import row
from tests.conformance.shim import Shim, free_port
from tests.eventually import eventually

METRICS = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
# a comment of no use

DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{0}"}} 10
DCGM_FI_DEV_GPU_UTIL{{gpu="1",UUID="{1}"}} 20
DCGM_FI_DEV_GPU_UTIL{{gpu="2",UUID="{2}"}} 30
# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{{gpu="2",UUID="{2}"}} 5
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{gpu="0",UUID="{0}"}} 7
""".format(*UUIDS)

# Keeps its arguments and its process, and serves a folder with one file.
EXPORTER = """
[ "$1" != -v ] || {{ echo "DCGM Exporter version 3.3.9"; exit 0; }}
echo "$*" >{folder}/arguments
echo $$ >{folder}/process
while [ $# -gt 0 ]; do
  [ "$1" != -a ] || port=${{2##*:}}
  [ "$1" != -f ] || cp "$2" {folder}/counters
  shift
done
exec busybox httpd -f -p "127.0.0.1:$port" -h {folder}/served
"""


@pytest.fixture
def folder(instance: Instance) -> Iterator[Path]:
    """Where the exporter keeps things, on a host with three cards."""
    made = instance.root / f"exporter-{free_port()}"
    (made / "served").mkdir(parents=True)
    (made / "served" / "metrics").write_text(METRICS)
    with (
        gpus.nvidia(instance, count=3),
        instance.tools_for_a_while(dcgm_exporter=EXPORTER.format(folder=made)),
    ):
        yield made


@pytest.fixture
def host(new_shim: MakeShim, folder: Path) -> Shim:
    return new_shim(f"--dcgm-exporter-http-port={free_port()}", "--dcgm-exporter-interval=300")


def content(file: Path) -> str:
    """What the exporter wrote there, once it has."""
    return eventually(lambda: file.exists() and file.read_text(), within=5) or ""


def metrics_of(shim: Shim, id_: str) -> str:
    """What it answers once the exporter is up."""

    def readable() -> bool:
        answers.append(shim.get(f"/metrics/tasks/{id_}"))
        return answers[-1].status_code != 502

    answers: list[httpx.Response] = []
    eventually(readable, within=5)
    assert answers[-1].status_code == 200
    return answers[-1].text


@row("H23", "L11", "L12")
@pytest.mark.parametrize("how", ["flags", "variables", "defaults"])
def test_exporter_is_started_with_port_and_interval(
    how: str, new_shim: MakeShim, folder: Path
) -> None:
    port = 10997 if how == "defaults" else free_port()
    interval = 5000 if how == "defaults" else 700
    if how == "flags":
        new_shim(f"--dcgm-exporter-http-port={port}", f"--dcgm-exporter-interval={interval}")
    elif how == "variables":
        new_shim(
            variables={
                "DSTACK_DCGM_EXPORTER_HTTP_PORT": str(port),
                "DSTACK_DCGM_EXPORTER_INTERVAL": str(interval),
            }
        )
    else:
        new_shim()
    arguments = content(folder / "arguments").split()
    assert arguments[0] == "-f"
    assert arguments[2:] == ["-a", f"localhost:{port}", "-c", str(interval)]
    counters = content(folder / "counters")
    assert "DCGM_FI_DEV_GPU_UTIL" in counters


@row("H23")
def test_exporter_ends_with_the_shim(host: Shim, folder: Path) -> None:
    process = int(content(folder / "process"))
    host.stop()
    eventually(lambda: not Path(f"/proc/{process}").exists(), within=8, saying="it has ended")


@row("H24")
def test_metrics_are_those_of_the_tasks_gpus(host: Shim, images: Images) -> None:
    first = host.run(images.idle, name="first", gpu=1)
    rest = host.run(images.idle, name="rest", gpu=2)
    for task in (first, rest):
        expected: list[str] = []
        ids = task.info()["gpus_ids"]
        for block in METRICS.replace("# a comment of no use\n\n", "").split("# HELP ")[1:]:
            help_, type_, *lines = f"# HELP {block}".splitlines()
            mine = [line for line in lines if any(id_ in line for id_ in ids)]
            expected += [help_, type_, *mine] if mine else []
        assert metrics_of(host, task.id).splitlines() == expected


@row("H25")
def test_task_without_gpus_has_no_metrics(host: Shim, images: Images) -> None:
    assert metrics_of(host, host.run(images.idle, gpu=0).id) == ""


@row("A56")
def test_unknown_task_has_no_metrics_either(host: Shim) -> None:
    assert host.get("/metrics/tasks/nobody").status_code == 404


@row("H26")
def test_answers_are_kept_for_the_interval(
    new_shim: MakeShim, folder: Path, images: Images
) -> None:
    shim = new_shim(f"--dcgm-exporter-http-port={free_port()}", "--dcgm-exporter-interval=2500")
    task = shim.run(images.idle, gpu=3)
    first = metrics_of(shim, task.id)
    (folder / "served" / "metrics").write_text(METRICS.replace("} 10", "} 99"))
    assert metrics_of(shim, task.id) == first
    eventually(lambda: "} 99" in metrics_of(shim, task.id), within=6, every=0.2)


@row("A57")
def test_unreadable_exporter_is_502(host: Shim, images: Images, folder: Path) -> None:
    task = host.run(images.idle, gpu=1)
    metrics_of(host, task.id)
    (folder / "served" / "metrics").unlink()
    eventually(
        lambda: host.get(f"/metrics/tasks/{task.id}").status_code == 502, within=5, every=0.1
    )


@row("A62")
def test_the_shim_tells_of_itself(shim: Shim, images: Images) -> None:
    shim.run(images.idle)
    answer = shim.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/plain")
    tasks = dict(
        re.findall(r'^dstack_shim_tasks\{status="(\w+)"\} (\d+)$', answer.text, re.MULTILINE)
    )
    assert tasks.pop("running") == "1"
    assert set(tasks) == {"pending", "preparing", "pulling", "creating", "terminated"}
    assert set(tasks.values()) == {"0"}
