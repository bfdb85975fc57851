"""What takes its time; see ``patience.py``. Each limit is the shim's own, none is shortened."""

from __future__ import annotations

import pytest
from dstack_shim_contracts.statuses import TaskStatus

from tests.engine.patience import Patience
from tests.lab.host import run

pytestmark = pytest.mark.last


@pytest.fixture(autouse=True)
def _needs_a_registry(patience: Patience | None) -> None:
    if patience is None:
        pytest.skip("this machine has no docker-registry")


def test_a_blkid_without_end_is_given_up_and_nothing_is_formatted(patience: Patience) -> None:
    info = patience.ended("hung")
    assert info.termination_reason == "executor_error"
    assert "volume hung" in info.termination_message
    assert "blkid took longer than 30 s" in info.termination_message
    kind = run("sh", "-c", f"/usr/sbin/blkid -p -o value -s TYPE {patience.disk} || true")
    assert kind == ""


def test_an_aws_disk_that_never_appears_says_what_was_tried(patience: Patience) -> None:
    info = patience.ended("lost")
    assert info.termination_reason == "executor_error"
    assert "no device after 30 s" in info.termination_message
    assert "'vol0123' (lsblk exited with 1: no sysfs here)" in info.termination_message
    assert "/dev/xvdq" in info.termination_message


def test_a_disk_that_appears_after_five_seconds_is_used(patience: Patience) -> None:
    info = patience.ended("late")
    assert (info.termination_reason, info.termination_message) == ("done_by_runner", "")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pull_that_is_silent_for_90_seconds_goes_on(patience: Patience) -> None:
    """The silence itself is the case; an HTTP client's usual minute would break the pull."""
    patience.wait_out()
    info = patience.shim.client.task("silent")
    assert info.status is TaskStatus.PULLING
    patience.speak()
    assert patience.ended("silent").termination_reason == "done_by_runner"
