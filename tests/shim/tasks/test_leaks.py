"""What is held for nobody."""

from __future__ import annotations

import pytest
from dstack_shim_contracts.api import TaskConfig, VolumeInfo
from dstack_shim_contracts.record import TaskRecord

from dstack_shim.resources.ssh_keys import parse_key
from dstack_shim.tasks.leaks import Held, Leak, leaks
from tests.fuzz.targets import KEY

TEXT = KEY.decode()
FINGERPRINT = parse_key(TEXT).fingerprint
TASK = TaskRecord(
    id="t",
    config=TaskConfig(
        id="t",
        volumes=(VolumeInfo("aws", "data", "vol-1", False, None),),
        host_ssh_user="ann",
        host_ssh_keys=("no key at all", TEXT),
    ),
)
ALL = Held({"t": ("gpu0", "gpu1")}, ["data"], {"ann": [FINGERPRINT]})


def test_what_a_task_holds_is_no_leak() -> None:
    assert leaks([TASK], ALL) == ()


@pytest.mark.parametrize("released", [True, False])
def test_without_a_task_everything_is(released: bool) -> None:
    done = TaskRecord(id="t", config=TASK.config, cleaned_up=True)
    assert leaks([done] if released else [], ALL) == (
        Leak("gpu", "gpu0"),
        Leak("gpu", "gpu1"),
        Leak("volume", "data"),
        Leak("host_key", f"{FINGERPRINT} of ann"),
    )


def test_a_key_of_another_user_is() -> None:
    held = Held({}, [], {"bob": [FINGERPRINT]})
    assert leaks([TASK], held) == (Leak("host_key", f"{FINGERPRINT} of bob"),)
