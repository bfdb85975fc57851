"""Keys of tasks in the files of users, through a real shim that is killed in between."""

from __future__ import annotations

import pytest
from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.census import Census
from tests.lab.host import Host, public_key
from tests.lab.images import RUNS_ON, Images
from tests.lab.shim import ShimProcess

MARKER = b" # added by dstack-shim\n"
SERVERS = f"{public_key(100, 'of the server')} # added by dstack\n".encode()
RUNNING = TaskStatus.RUNNING

HARMLESS = public_key(1, "harmless")
BLOB = HARMLESS.split()[1]
EMOJI = public_key(8, 'it\'s $(id) `id` "quoted" 🚀')


class Keys:
    """A shim on a host with one user, and a census to take when the dust has settled."""

    def __init__(self, instance: Host, images: Images) -> None:
        self.host = instance
        self.image = images.job(RUNS_ON)
        self.home = instance.user("alice")
        self.file = self.home / ".ssh" / "authorized_keys"

    def begin(self, content: bytes | None) -> ShimProcess:
        if content is not None:
            self.host.write_keys("alice", content)
        self.shim = self.host.start_shim()
        self.census: Census = self.host.census(self.shim)
        return self.shim

    def run(self, task_id: str, *keys: str) -> None:
        self.shim.submit(task_id, self.image, host_ssh_user="alice", host_ssh_keys=keys)
        self.shim.wait_for(task_id, RUNNING)

    def end(self, task_id: str) -> None:
        self.shim.client.terminate(task_id)

    def check(self) -> None:
        assert self.census.take() == []


@pytest.fixture
def keys(instance: Host, images: Images) -> Keys:
    return Keys(instance, images)


def line(key: str) -> bytes:
    return key.encode() + MARKER


def test_keys_shared_by_tasks_stay_for_the_last_of_them_and_other_lines_for_ever(
    keys: Keys,
) -> None:
    by_hand = f"{public_key(1, 'by hand')}\n".encode()
    with_options = f'from="10.0.0.1",no-pty {public_key(2, "by hand")}\n'.encode()
    before = b"# comment\n" + by_hand + with_options + SERVERS
    shim = keys.begin(before)
    keys.run("t1", HARMLESS, public_key(2, "second"))
    keys.run("t2", public_key(1, "another comment"), public_key(3))
    first = line(HARMLESS) + line(public_key(2, "second"))
    assert keys.file.read_bytes() == before + first + line(public_key(3))
    keys.check()
    shim.kill()  # whose they are is known again after a crash
    shim.start()
    keys.end("t1")
    ours = keys.file.read_bytes().removeprefix(before).splitlines()
    assert [text.split()[1] for text in ours] == [
        public_key(1).split()[1].encode(),
        public_key(3).split()[1].encode(),
    ]
    keys.end("t2")
    assert keys.file.read_bytes() == before
    keys.check()


def test_a_file_is_afterwards_what_it_was_whatever_it_is(instance: Host, images: Images) -> None:
    files = {
        "crlf": b"# one\r\n" + SERVERS + b"\r\n\r\n  # two\r\n",
        "cut": b"# no newline at the end",
        "binary": b"\xff\xfe no text at all \x00\n",
        "empty": b"",
    }
    for user, content in files.items():
        instance.user(user)
        instance.write_keys(user, content)
    shim = instance.start_shim()
    for user in files:
        shim.submit(user, images.job(RUNS_ON), host_ssh_user=user, host_ssh_keys=(HARMLESS,))
    whole = files | {"cut": files["cut"] + b"\n"}
    for user, content in whole.items():
        shim.wait_for(user, RUNNING)
        assert instance.keys_of(user) == content + line(HARMLESS)
        shim.client.terminate(user)
    assert {user: instance.keys_of(user) for user in files} == whole


def test_what_is_not_one_plain_key_is_skipped_and_the_others_are_added(keys: Keys) -> None:
    bad = (
        f'command="evil" {public_key(4)}',
        f"no-pty {public_key(4)}",
        f"{public_key(5)}\n{public_key(6)}",
        f"{public_key(5)}\r{public_key(6)}",
        f"ssh-rsa {BLOB} of another type",
        f"ssh-ed25519 {BLOB[:-8]}",
        "ssh-ed25519",
        "",
        "no key at all",
        f"@cert-authority * {public_key(4)}",
    )
    shim = keys.begin(None)
    keys.run("t1", *bad, HARMLESS, EMOJI)
    assert keys.file.read_bytes() == line(HARMLESS) + line(EMOJI)
    assert shim.log().count("host_keys.skipped") == len(bad)
    assert not [key for key in (*bad, HARMLESS) if len(key) > 20 and key in shim.log()]
    keys.end("t1")
    assert keys.file.read_bytes() == b""
