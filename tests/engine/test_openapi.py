"""Whatever the OpenAPI document allows or forbids: a live shim answers within its schema."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from dstack_shim_contracts.client import ShimClient
from dstack_shim_contracts.errors import ShimResponseError
from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.host import Host
from tests.lab.images import Images, exits
from tests.lab.shim import ShimProcess

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "contracts" / "openapi.json"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "allow_header_conformance",
    "unsupported_method",
    # Not ensure_resource_availability: the sweeper is faster. Not positive_data_acceptance: a schema cannot say that integers refuse 1.0, nor which
    # components and images there are.
)
SETTINGS = """
hooks = "tests.engine.openapi_hooks"
[checks.negative_data_rejection]
expected-statuses = [400, 404, 405, 409, 413, 415]
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_request_gets_a_5xx_or_an_answer_outside_the_schema(
    instance: Host, images: Images, tmp_path: Path, full_counts: bool
) -> None:
    """Whole requests through the real server, core and engine: a few hundred, or 5,000."""
    shim = instance.start_shim()
    census = instance.census(shim)
    few = ("--max-examples=12", "--generation-deterministic")
    with sweeping(shim):
        output = run_schemathesis(
            tmp_path,
            f"--url=http://127.0.0.1:{shim.port}",
            *(("--max-examples=900",) if full_counts else few),
            image=images.job(exits(0)),
        )
    generated = re.search(r"([\d,]+) generated", output)
    assert generated is not None, output
    assert int(generated[1].replace(",", "")) >= (5000 if full_counts else 300)
    for task in shim.client.tasks():
        shim.client.terminate(task.id)
        shim.client.remove(task.id)
    assert shim.statuses() == {}
    assert census.take() == []
    assert " trace=" not in shim.log()  # a fault of ours


@contextmanager
def sweeping(shim: ShimProcess) -> Iterator[None]:
    """Tasks go soon, so that their ids can be submitted again; and requests meet."""
    over = threading.Event()
    with closing(ShimClient(shim.port)) as client, ThreadPoolExecutor(1) as pool:
        swept = pool.submit(sweep, client, over)
        try:
            yield
        finally:
            over.set()
        swept.result()


def sweep(client: ShimClient, over: threading.Event) -> None:
    while not over.wait(0.3):
        for task in client.tasks():
            try:
                if task.status is TaskStatus.RUNNING:
                    client.terminate(task.id)
                elif task.status is TaskStatus.TERMINATED:
                    client.remove(task.id)
            except ShimResponseError as error:
                if error.status != 404:  # the requests under test were first
                    raise


def run_schemathesis(folder: Path, *options: str, image: str) -> str:
    """What it printed; it found nothing to complain about."""
    settings = folder / "schemathesis.toml"
    settings.write_text(SETTINGS)
    words = [sys.executable, "-m", "schemathesis.cli", f"--config-file={settings}", "run"]
    words += [str(DOCUMENT), "--no-color", f"--checks={','.join(CHECKS)}", *options]
    done = subprocess.run(
        words,
        cwd=folder,  # where it leaves what it found
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LAB_IMAGE": image,
            "LAB_FOLDER": str(folder / "instance"),
        },
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
