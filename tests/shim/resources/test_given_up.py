"""Taking that is given up, because its task is to end: soon, and with nothing half done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dstack_shim.cancelling import to_its_end
from dstack_shim.resources.host_keys import HostKeys
from tests.shim.resources.disks import Disks, volume
from tests.shim.resources.stage import Log, key, line, others, passwd, wish


class Gate:
    """Something that is entered, and passed once it opens."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.opened = asyncio.Event()

    async def pass_it(self) -> None:
        self.entered.set()
        await self.opened.wait()


@pytest.fixture
async def gate() -> Gate:
    return Gate()


async def cancelled(taking: asyncio.Future[Any]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await taking


async def test_looking_at_a_disk_ends_at_once(tmp_path: Path, gate: Gate) -> None:
    disks = Disks(tmp_path, sda="blank")
    disks.before["blkid"] = gate.pass_it
    taking = asyncio.ensure_future(
        disks.adapter().acquire(wish("t1", volumes=[volume("data")]), others())
    )
    await gate.entered.wait()
    taking.cancel()
    await cancelled(taking)
    assert disks.programs() == ["blkid"]
    assert disks.at("data") == []


@pytest.mark.parametrize("tool", ["mkfs.ext4", "mount"])
async def test_a_disk_is_formatted_and_mounted_to_the_end_and_then_given_back(
    tmp_path: Path, gate: Gate, tool: str
) -> None:
    disks = Disks(tmp_path, sda="blank")
    disks.before[tool] = gate.pass_it
    adapter, task = disks.adapter(), wish("t1", volumes=[volume("data")])
    taking = asyncio.ensure_future(adapter.acquire(task, others()))
    await gate.entered.wait()
    taking.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not taking.done()
    gate.opened.set()
    await cancelled(taking)
    assert disks.at("data") == ["sda"]
    await adapter.release(task, others())
    assert disks.at("data") == []
    await disks.adapter().acquire(wish("t2", volumes=[volume("data")]), others())
    assert disks.disks[str(disks.dev / "sda")].formatted == 1


async def test_keys_are_written_and_logged_to_the_end_and_then_removed(
    tmp_path: Path, gate: Gate
) -> None:
    def blocking(call: Callable[..., Any], /, *args: object) -> Awaitable[Any]:
        async def after_the_gate() -> Any:
            if args and callable(args[-1]):  # the file is changed, not looked up
                await gate.pass_it()
            return call(*args)

        return to_its_end(after_the_gate())

    log = Log()
    keys = HostKeys(blocking, log.events, lookup=passwd(ubuntu=tmp_path))
    task = wish("t1", keys=[key(1)])
    file = tmp_path / ".ssh" / "authorized_keys"
    taking = asyncio.ensure_future(keys.acquire(task, others()))
    await gate.entered.wait()
    taking.cancel()
    releasing = asyncio.ensure_future(keys.release(task, others()))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not taking.done()
    assert not releasing.done()  # it would remove nothing yet, and the key would stay for ever
    gate.opened.set()
    await cancelled(taking)
    await releasing
    assert line(key(1)) not in file.read_bytes()
    assert [word for word in ("host_keys.added", "host_keys.removed") if word in log] == [
        "host_keys.added",
        "host_keys.removed",
    ]
