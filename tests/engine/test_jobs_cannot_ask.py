"""A job with the host's network meets the API of the shim that runs it."""

from __future__ import annotations

import pytest
from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.host import Host
from tests.lab.images import RUNS_ON, Images
from tests.lab.shim import PORT

ASKS = (
    f"ask() {{ timeout 20 wget -qO- $2 http://127.0.0.1:{PORT}/$1 2>&1 | tr -d '\\n'; echo; }};"
    " ask api/healthcheck; ask api/tasks; ask metrics/tasks/neighbour;"
    " ask api/tasks/neighbour/terminate --post-data={}; exit 9"
)


def test_a_job_cannot_use_the_api(instance: Host, images: Images) -> None:
    shim = instance.start_shim()
    shim.submit("neighbour", images.job(RUNS_ON))
    shim.submit("curious", images.job(ASKS))
    told = shim.wait_for("curious", TaskStatus.TERMINATED).termination_message.splitlines()
    assert '"service":"dstack-shim"' in told[0]
    assert ["403" in line for line in told[1:]] == [True, True, True], told
    assert shim.client.task("neighbour").status is TaskStatus.RUNNING
    assert shim.log().count("requests from inside a container") == 3


@pytest.mark.parametrize("privileged", [False, True])
def test_jobs_can_be_let_in(instance: Host, images: Images, privileged: bool) -> None:
    shim = instance.start_shim("--answer-jobs")
    shim.submit("curious", images.job(ASKS), privileged=privileged)
    told = shim.wait_for("curious", TaskStatus.TERMINATED).termination_message.splitlines()
    assert '"tasks":[' in told[1]
