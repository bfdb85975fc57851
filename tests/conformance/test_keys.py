"""Y: keys in the authorized_keys of a host's user."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import MakeShim
from tests.conformance.containers import ContainerOf
from tests.conformance.images import Images, tell
from tests.conformance.instance import Instance
from tests.conformance.rows import row
from tests.conformance.shim import Shim, Task

MARKER = "# added by dstack-shim"


def key(number: int, comment: str = "") -> str:
    """A well-formed ed25519 key, another one for each number."""
    kind = b"ssh-ed25519"
    point = hashlib.sha256(str(number).encode()).digest()
    blob = struct.pack(">I", len(kind)) + kind + struct.pack(">I", len(point)) + point
    words = ["ssh-ed25519", base64.b64encode(blob).decode(), *comment.split()]
    return " ".join(words)


def fingerprint(text: str) -> str:
    digest = hashlib.sha256(base64.b64decode(text.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def marked(text: str) -> str:
    return f"{text} {MARKER}\n"


def fields(*keys: str, user: str = "alice") -> dict[str, Any]:
    return {"host_ssh_user": user, "host_ssh_keys": list(keys)}


@pytest.fixture
def file(instance: Instance) -> Path:
    """The file of a user who has one, with two lines of her own."""
    instance.forget_user_files("alice")
    folder = instance.user("alice") / ".ssh"
    folder.mkdir(mode=0o700)
    made = folder / "authorized_keys"
    made.write_text(OWN)
    made.chmod(0o600)
    for path in (folder, made):
        os.chown(path, *instance.ids("alice"))
    return made


OWN = f"# my keys\n{key(900, 'alice@laptop')}\n"


# -- while a task lives -----------------------------------------------------------------------


@row("Y1", "Y2", "Y5", "R36")
@pytest.mark.parametrize("end", ["terminate", "exit"])
def test_key_is_there_while_its_task_lives(
    end: str, shim: Shim, images: Images, file: Path, container_of: ContainerOf
) -> None:
    task = shim.run(images.idle, **fields(key(1, "bob@desk")))
    assert file.read_text() == OWN + marked(key(1, "bob@desk"))
    if end == "terminate":
        task.terminate()
    else:
        tell(container_of(task), 0)
        task.end()
        task.terminate()
    assert file.read_text() == OWN


@row("Y1", "S9")
def test_key_of_a_failed_start_is_taken_back(shim: Shim, images: Images, file: Path) -> None:
    task = shim.submit("127.0.0.1:1/none:1", **fields(key(1)))
    assert task.outcome()[0] == "creating_container_error"
    task.terminate()
    assert file.read_text() == OWN


@row("Y2")
@pytest.mark.parametrize(
    ("given", "line"),
    [
        (key(1), key(1)),
        (f"  {key(1)}  two   words\t", f"{key(1)} two words"),
        (f"{key(1, 'ü@host')}\n", key(1, "ü@host")),
    ],
    ids=["bare", "spaces", "newline"],
)
def test_line_is_the_key_with_single_spaces_and_the_marker(
    given: str, line: str, shim: Shim, images: Images, file: Path
) -> None:
    task = shim.run(images.idle, **fields(given))
    assert file.read_text() == OWN + marked(line)
    task.terminate()
    assert file.read_text() == OWN


@row("Y2", "Y3")
@pytest.mark.parametrize("ending", ["", " ", "\t", " \r"])
def test_stale_lines_of_the_shim_go(ending: str, shim: Shim, images: Images, file: Path) -> None:
    file.write_text(f"{OWN}{key(7, 'stale')} {MARKER}{ending}\n", newline="")
    task = shim.run(images.idle, **fields(key(1)))
    assert file.read_text() == OWN + marked(key(1))
    task.terminate()


@row("Y2", "Y3")
@pytest.mark.parametrize(
    "line",
    [
        f"{key(1)} # added by dstack",
        f"{key(1)} # added by dstack-shim # but edited",
        f"{key(1)} #added by dstack-shim",
        f"{key(1)}# added by dstack-shim",
        f'command="x" {key(1)}',
        f"# {key(1)}",
    ],
)
def test_lines_of_others_stay_even_with_the_same_key(
    line: str, shim: Shim, images: Images, file: Path
) -> None:
    before = f"{OWN}{line}\n\n"
    file.write_text(before)
    task = shim.run(images.idle, **fields(key(1)))
    text = file.read_text()
    assert text.startswith(before.rstrip("\n"))
    assert marked(key(1)) in text
    task.terminate()
    assert file.read_text() == before


@row("Y4", "Y5")
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(f"{key(900)}\r\n# two\r\n".encode(), id="crlf"),
        pytest.param(b"\xff\xfe not text \x00\n", id="bytes"),
        pytest.param(b"\n\n  \n", id="empty-lines"),
        pytest.param(b"", id="empty"),
        pytest.param(b"x" * 100_000 + b"\n", id="long-line"),
    ],
)
def test_every_other_byte_stays(before: bytes, shim: Shim, images: Images, file: Path) -> None:
    file.write_bytes(before)
    task = shim.run(images.idle, **fields(key(1)))
    assert file.read_bytes() == before + marked(key(1)).encode()
    task.terminate()
    assert file.read_bytes() == before


@row("Y5", "Y4")
def test_missing_final_newline_is_added(shim: Shim, images: Images, file: Path) -> None:
    file.write_text(OWN.rstrip("\n"))
    task = shim.run(images.idle, **fields(key(1)))
    assert file.read_text() == OWN + marked(key(1))
    task.terminate()
    assert file.read_text() in {OWN, OWN.rstrip("\n")}


@row("Y6", "R36")
@pytest.mark.parametrize("first_ends", [True, False])
def test_key_of_two_tasks_stays_until_the_last_has_ended(
    first_ends: bool, shim: Shim, images: Images, file: Path
) -> None:
    first = shim.run(images.idle, name="first", **fields(key(1)))
    second = shim.run(images.idle, name="second", **fields(key(1), key(2)))
    assert sorted(file.read_text().removeprefix(OWN).splitlines()) == sorted(
        marked(key(number)).strip() for number in (1, 2)
    )
    (first if first_ends else second).terminate()
    left = {key(1), key(2)} if first_ends else {key(1)}
    assert set(file.read_text().removeprefix(OWN).splitlines()) == {
        marked(one).strip() for one in left
    }
    (second if first_ends else first).terminate()
    assert file.read_text() == OWN


@row("Y7")
def test_first_comment_stays(shim: Shim, images: Images, file: Path) -> None:
    shim.run(images.idle, name="first", **fields(key(1, "the first")))
    shim.run(images.idle, name="second", **fields(key(1, "the second")))
    assert file.read_text() == OWN + marked(key(1, "the first"))


@row("Y6", "Y1")
def test_many_tasks_at_once_lose_no_key(shim: Shim, images: Images, file: Path) -> None:
    tasks = [
        shim.task(images.idle, name=f"t{number}", **fields(key(number), key(100)))
        for number in range(6)
    ]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(Task.submit, tasks))
    for task in tasks:
        task.reach("running", within=20)
    wanted = {marked(key(number)).strip() for number in (*range(6), 100)}
    assert set(file.read_text().removeprefix(OWN).splitlines()) == wanted
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda task: task.terminate(), tasks))
    assert file.read_text() == OWN


# -- which keys -------------------------------------------------------------------------------


@row("Y8", "Y9")
@pytest.mark.parametrize(
    "bad",
    [
        'command="rm -rf /" ' + key(3),
        "no-pty " + key(3),
        "ssh-ed25519 not-base64!",
        "ssh-ed25519 AAAA",
        "ssh-rsa " + key(3).split()[1],  # the type is not the blob's own
        "not a key at all",
        "",
        "# " + key(3),
        key(3) + "\n" + key(4),
        key(3) + "\r" + key(4),
        key(3) + "\n" + 'command="x" ' + key(4),
    ],
)
def test_bad_key_is_skipped_and_the_others_are_added(
    bad: str, shim: Shim, images: Images, file: Path
) -> None:
    task = shim.run(images.idle, **fields(key(1), bad, key(2)))
    added = file.read_text().removeprefix(OWN)
    assert added == marked(key(1)) + marked(key(2))
    task.terminate()
    assert file.read_text() == OWN


@row("Y8")
def test_bad_key_is_logged(shim: Shim, images: Images, file: Path) -> None:
    log = shim.home / "shim.log"
    before = len(log.read_text())
    shim.run(images.idle, **fields("no key at all", key(1)))
    assert re.search(r"(?i)key", log.read_text()[before:])


@row("Y14")
def test_each_key_added_or_removed_is_logged(shim: Shim, images: Images, file: Path) -> None:
    log = shim.home / "shim.log"
    before = len(log.read_text())
    task = shim.run(images.idle, **fields(key(1)))
    task.terminate()
    lines = [line for line in log.read_text()[before:].splitlines() if fingerprint(key(1)) in line]
    assert len(lines) >= 2


# -- files and users --------------------------------------------------------------------------


@row("Y10")
@pytest.mark.parametrize("has_folder", [False, True])
def test_missing_file_is_created_for_the_user(
    has_folder: bool, shim: Shim, images: Images, instance: Instance
) -> None:
    instance.forget_user_files("bob")
    folder = instance.user("bob") / ".ssh"
    if has_folder:
        folder.mkdir(mode=0o700)
        os.chown(folder, *instance.ids("bob"))
    task = shim.run(images.idle, **fields(key(1), user="bob"))
    file = folder / "authorized_keys"
    assert file.read_text() == marked(key(1))
    for path, mode in ((folder, 0o700), (file, 0o600)):
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == mode
        assert (status.st_uid, status.st_gid) == instance.ids("bob")
    task.terminate()
    assert file.read_text() == ""


@row("Y11", "S11")
def test_unknown_user_fails_the_task(shim: Shim, images: Images) -> None:
    reason, message = shim.submit(images.idle, **fields(key(1), user="nobody-here")).outcome()
    assert reason == "executor_error"
    assert "nobody-here" in message


@row("Y11")
def test_file_that_cannot_be_a_file_fails_the_task(
    shim: Shim, images: Images, instance: Instance
) -> None:
    instance.forget_user_files("carol")
    (instance.user("carol") / ".ssh" / "authorized_keys").mkdir(parents=True)
    reason, message = shim.submit(images.idle, **fields(key(1), user="carol")).outcome()
    assert reason == "executor_error"
    assert "authorized_keys" in message


@row("Y12")
@pytest.mark.parametrize("mode", [0o640, 0o600, 0o644])
def test_owner_and_mode_survive(
    mode: int, shim: Shim, images: Images, file: Path, instance: Instance
) -> None:
    file.chmod(mode)
    os.chown(file, instance.ids("alice")[0], instance.ids("bob")[1])
    task = shim.run(images.idle, **fields(key(1)))
    task.terminate()
    status = file.stat()
    assert stat.S_IMODE(status.st_mode) == mode
    assert (status.st_uid, status.st_gid) == (instance.ids("alice")[0], instance.ids("bob")[1])


@row("Y12")
def test_file_is_replaced_and_nothing_else_is_left(shim: Shim, images: Images, file: Path) -> None:
    with file.open() as opened:
        task = shim.run(images.idle, **fields(key(1)))
        assert opened.read() == OWN  # a reader of the old file has it whole
    assert [path.name for path in file.parent.iterdir()] == ["authorized_keys"]
    task.terminate()
    assert [path.name for path in file.parent.iterdir()] == ["authorized_keys"]


@row("Y13")
@pytest.mark.parametrize(
    "name",
    ["authorized_keys.tmp", ".authorized_keys.tmp", "authorized_keys.bak", "authorized_keys~"],
)
def test_link_where_a_temporary_file_might_be_is_not_followed(
    name: str, shim: Shim, images: Images, file: Path, instance: Instance
) -> None:
    victim = instance.root / "victim"
    victim.write_text("keep me")
    (file.parent / name).symlink_to(victim)
    task = shim.run(images.idle, **fields(key(1)))
    task.terminate()
    assert victim.read_text() == "keep me"
    assert stat.S_IMODE(victim.stat().st_mode) == stat.S_IMODE(victim.lstat().st_mode)


@row("Y13", "Y11")
def test_link_in_the_files_place_leads_nowhere(
    shim: Shim, images: Images, file: Path, instance: Instance
) -> None:
    victim = instance.root / "root-file"
    victim.write_text("keep me")
    victim.chmod(0o600)
    file.unlink()
    file.symlink_to(victim)
    shim.submit(images.idle, **fields(key(1))).reach("running", "terminated").terminate()
    assert victim.read_text() == "keep me"
    assert victim.stat().st_uid == 0


@row("Y15")
def test_no_keys_touch_nothing(shim: Shim, images: Images, file: Path) -> None:
    file.write_text(f"{OWN}{key(7)} {MARKER}\n")
    before = (file.read_bytes(), file.stat().st_ino, file.stat().st_mtime_ns)
    task = shim.run(images.idle, **fields())
    task.terminate()
    assert (file.read_bytes(), file.stat().st_ino, file.stat().st_mtime_ns) == before


@row("Y15", "Y11")
def test_user_does_not_matter_without_keys(shim: Shim, images: Images) -> None:
    shim.run(images.idle, **fields(user="nobody-here"))


# -- restart ----------------------------------------------------------------------------------


@row("R36", "Y1", "R4")
def test_keys_outlive_a_restart_and_go_with_the_task(
    new_shim: MakeShim, images: Images, file: Path
) -> None:
    shim = new_shim()
    task = shim.run(images.idle, **fields(key(1)))
    shim.restart()
    assert file.read_text() == OWN + marked(key(1))
    task.terminate()
    assert file.read_text() == OWN


@row("R36", "R15")
def test_keys_of_a_task_that_ended_meanwhile_go(
    new_shim: MakeShim, images: Images, file: Path, container_of: ContainerOf
) -> None:
    shim = new_shim()
    task = shim.run(images.idle, **fields(key(1)))
    other = shim.run(images.idle, name="other", **fields(key(2)))
    shim.kill()
    container_of(task).remove(force=True)
    shim.start()
    task.end()
    assert file.read_text() == OWN + marked(key(2))
    other.terminate()
    assert file.read_text() == OWN
