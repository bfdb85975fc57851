from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dstack_shim.errors import ResourceError
from dstack_shim.resources.host_keys import HostKeys
from dstack_shim.resources.ssh_keys import marked, merge, parse_key
from tests.shim.resources.stage import Log, Wish, at_once, key, line, others, passwd, wish

ONE, TWO, THREE = key(1, "one"), key(2, "two"), key(3)


class Host:
    """Two users, and their keys."""

    def __init__(self, root: Path) -> None:
        self.homes = {"ubuntu": root / "ubuntu", "root": root / "root"}
        for home in self.homes.values():
            home.mkdir()
        self.log = Log()
        self.keys = HostKeys(at_once, self.log.events, lookup=passwd(**self.homes))

    def file(self, user: str = "ubuntu") -> Path:
        return self.homes[user] / ".ssh" / "authorized_keys"

    def lines(self, user: str = "ubuntu") -> list[bytes]:
        return self.file(user).read_bytes().splitlines()

    def write(self, content: bytes, user: str = "ubuntu") -> None:
        self.file(user).parent.mkdir(exist_ok=True)
        self.file(user).write_bytes(content)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def test_keys_come_and_go_with_their_task(host: Host) -> None:
    host.write(b"theirs\r\n")
    task = wish("t1", keys=[ONE, TWO])
    await host.keys.acquire(task, others())
    assert host.lines() == [b"theirs", line(ONE), line(TWO)]
    assert await host.keys.census(["ubuntu", "root", "nobody"]) == {
        "ubuntu": (parse_key(ONE).fingerprint, parse_key(TWO).fingerprint)
    }
    await host.keys.release(task, others())
    assert host.file().read_bytes() == b"theirs\r\n"
    await host.keys.release(task, others())
    assert await host.keys.census(["ubuntu"]) == {}


async def test_a_key_shared_by_two_tasks_stays_until_the_second_ends(host: Host) -> None:
    first, second = wish("t1", keys=[ONE, TWO]), wish("t2", keys=[key(1, "the same"), THREE])
    await host.keys.acquire(first, others())
    await host.keys.acquire(second, others(first))
    assert host.lines() == [line(ONE), line(TWO), line(THREE)]
    await host.keys.release(first, others(second))
    assert host.lines() == [line(key(1, "the same")), line(THREE)]
    await host.keys.release(second, others())
    assert host.lines() == []


async def test_tasks_of_different_users_do_not_meet(host: Host) -> None:
    mine, roots = wish("t1", keys=[ONE]), wish("t2", keys=[TWO], user="root")
    await host.keys.acquire(mine, others())
    await host.keys.acquire(roots, others(mine))
    assert (host.lines(), host.lines("root")) == ([line(ONE)], [line(TWO)])
    await host.keys.release(mine, others(roots))
    assert (host.lines(), host.lines("root")) == ([], [line(TWO)])


async def test_two_tasks_released_at_once_leave_nothing_to_each_other(host: Host) -> None:
    first, second = wish("t1", keys=[ONE]), wish("t2", keys=[ONE])
    await host.keys.acquire(first, others())
    await host.keys.acquire(second, others(first))
    # Neither is written down as released yet, so each still sees the other.
    await asyncio.gather(
        host.keys.release(first, others(second)), host.keys.release(second, others(first))
    )
    assert host.lines() == []


async def test_an_id_that_was_removed_and_submitted_anew_counts_again(host: Host) -> None:
    first, second = wish("t1", keys=[ONE]), wish("t2", keys=[TWO])
    await host.keys.acquire(first, others())
    await host.keys.release(first, others())
    await host.keys.acquire(first, others())
    await host.keys.acquire(second, others(first))
    assert host.lines() == [line(ONE), line(TWO)]


async def test_release_after_a_crash_needs_only_the_record(host: Host, tmp_path: Path) -> None:
    task = wish("t1", keys=[ONE])
    await host.keys.acquire(task, others())
    again = HostKeys(at_once, host.log.events, lookup=passwd(**host.homes))
    await again.release(task, others())
    assert host.lines() == []


async def test_a_task_without_keys_touches_nothing(host: Host) -> None:
    task = wish("t1")
    await host.keys.acquire(task, others())
    await host.keys.release(task, others())
    assert not host.file().parent.exists()


async def test_bad_keys_are_skipped_and_logged_by_their_place(host: Host) -> None:
    bad = ['command="echo s3cret" ' + ONE, TWO + "\n" + THREE]
    task = wish("t1", keys=[bad[0], ONE, bad[1]])
    await host.keys.acquire(task, others())
    assert host.lines() == [line(ONE)]
    assert "host_keys.skipped task=t1 position=0" in host.log
    assert "host_keys.skipped task=t1 position=2" in host.log
    assert "s3cret" not in host.log
    assert ONE.split()[1] not in host.log


async def test_every_key_added_or_removed_is_logged_by_fingerprint(host: Host) -> None:
    task = wish("t1", keys=[ONE])
    await host.keys.acquire(task, others())
    await host.keys.release(task, others())
    print_ = parse_key(ONE).fingerprint
    assert host.log.lines == [
        f"host_keys.added task=t1 user=ubuntu key={print_}",
        f"host_keys.removed task=t1 user=ubuntu key={print_}",
    ]


@pytest.mark.parametrize("user", ["nobody", "", "a\0b"])
async def test_a_missing_user_fails_the_task_but_not_its_release(host: Host, user: str) -> None:
    task = wish("t1", keys=[ONE], user=user)

    def look_up(name: str) -> Any:
        if "\0" in name:
            raise ValueError("embedded null byte")
        raise KeyError(name)

    keys = HostKeys(at_once, host.log.events, lookup=look_up)
    with pytest.raises(ResourceError, match=r"is no user of this host"):
        await keys.acquire(task, others())
    await keys.release(task, others())
    assert "host_keys.no_user task=t1" in host.log


async def test_the_system_is_asked_for_users(host: Host) -> None:
    keys = HostKeys(at_once, host.log.events)
    with pytest.raises(ResourceError, match=r"'no such user' is no user"):
        await keys.acquire(wish("t1", keys=[ONE], user="no such user"), others())
    with pytest.raises(ResourceError, match=r"is no user"):
        await keys.acquire(wish("t1", keys=[ONE], user="\ud800"), others())


async def test_a_lookup_that_fails_is_an_error_both_ways(host: Host) -> None:
    def look_up(_: str) -> Any:
        raise OSError(5, "Input/output error")

    keys = HostKeys(at_once, host.log.events, lookup=look_up)
    for operation in (keys.acquire, keys.release):
        with pytest.raises(ResourceError, match=r"cannot be looked up"):
            await operation(wish("t1", keys=[ONE]), others())


async def test_a_user_who_puts_a_symlink_in_the_way_is_told(host: Host, tmp_path: Path) -> None:
    task = wish("t1", keys=[ONE])
    await host.keys.acquire(task, others())
    host.file().rename(tmp_path / "mine")
    host.file().symlink_to(tmp_path / "mine")
    with pytest.raises(ResourceError, match=r"a symbolic link"):
        await host.keys.release(task, others())
    host.file().unlink()
    (tmp_path / "mine").rename(host.file())
    await host.keys.release(task, others())
    assert host.lines() == []


async def test_of_a_record_the_job_could_write_only_keys_on_our_lines_are_believed(
    host: Host,
) -> None:
    """The layout of 0.21.3: a forged record must not let a new key in, for root least of all."""
    host.write(f"{TWO}\n".encode() + line(ONE) + b"\n", user="root")
    forged = wish("t1", keys=[THREE, TWO, key(1, "forged comment"), "no key"], user="root")
    assert await host.keys.confirmed(forged) == (key(1, "forged comment"),)
    assert await host.keys.confirmed(wish("t1", keys=[ONE], user="ubuntu")) == ()
    assert await host.keys.confirmed(wish("t1", keys=[ONE], user="nobody")) == ()


async def test_a_release_waits_for_an_acquire_of_the_same_user(host: Host) -> None:
    """Else the older of two replacements could come last."""
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(call: Callable[..., Any], /, *args: object) -> Any:
        if len(args) == 2 and not started.is_set():
            started.set()
            await go_on.wait()
        return call(*args)

    keys = HostKeys(slowly, host.log.events, lookup=passwd(**host.homes))
    first, second = wish("t1", keys=[ONE]), wish("t2", keys=[TWO])
    taking = asyncio.create_task(keys.acquire(first, others(second)))
    await started.wait()
    giving = asyncio.create_task(keys.release(second, others(first)))
    go_on.set()
    await asyncio.gather(taking, giving)
    assert host.lines() == [line(ONE)]


POOL = [key(1, "a"), key(1, "b"), key(2), key(3, "c"), "not a key"]
TASKS = st.lists(st.lists(st.sampled_from(POOL), min_size=1, max_size=3), min_size=1, max_size=4)
FOREIGN = st.sampled_from([b"", b"x\r\n\n", b"# added by dstack-shim\n", f"{POOL[0]}\n".encode()])


@given(tasks=TASKS, data=st.data(), foreign=FOREIGN)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
def test_our_lines_are_always_the_union_of_the_standing_tasks(
    tmp_path: Path, tasks: list[list[str]], data: st.DataObject, foreign: bytes
) -> None:
    root = tmp_path / os.urandom(8).hex()
    root.mkdir()
    host = Host(root)
    host.write(foreign)
    claims = [wish(f"t{number}", keys=keys) for number, keys in enumerate(tasks)]
    steps = data.draw(st.permutations([*claims, *claims]))

    async def live() -> None:
        standing: list[Wish] = []
        seen: set[str] = set()
        for claim in steps:
            if claim.id in seen:
                standing.remove(claim)
                await host.keys.release(claim, others(*standing))
            else:
                seen.add(claim.id)
                await host.keys.acquire(claim, others(*standing))
                standing.append(claim)
            wanted = {
                parse_key(text).fingerprint
                for each in standing
                for text in each.config.host_ssh_keys
                if text != "not a key"
            }
            content = host.file().read_bytes()
            assert set(marked(content)) == wanted
            assert merge(content, []).content == foreign

    asyncio.run(live())
