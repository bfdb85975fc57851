"""Files as a user of the host may leave them; what needs other users is in the sandbox."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from dstack_shim.errors import ResourceError
from dstack_shim.resources import authorized_keys
from dstack_shim.resources.authorized_keys import MAX_BYTES, read, update
from dstack_shim.resources.ssh_keys import Merged, PublicKey, merge, parse_key
from tests.shim.resources.stage import key, me

ONE = parse_key(key(1, "one"))
needs_root = pytest.mark.sandbox


def want(*keys: PublicKey) -> Callable[[bytes], Merged]:
    return lambda old: merge(old, keys)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


@pytest.fixture
def file(home: Path) -> Path:
    (home / ".ssh").mkdir(mode=0o700)
    return home / ".ssh" / "authorized_keys"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def content(file: Path) -> bytes:
    """What is there, and nothing beside it."""
    assert [entry.name for entry in file.parent.iterdir()] == ["authorized_keys"]
    return file.read_bytes()


def test_a_missing_directory_and_file_are_made_for_the_user_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        update(me(home), want(ONE))
    finally:
        os.umask(before)
    file = home / ".ssh" / "authorized_keys"
    assert content(file) == ONE.line + b"\n"
    assert (mode(file.parent), mode(file)) == (0o700, 0o600)
    assert read(me(home)) == ONE.line + b"\n"


def test_a_missing_file_in_a_directory_that_is_there_is_made(file: Path) -> None:
    file.parent.chmod(0o755)
    update(me(file.parents[1]), want(ONE))
    assert content(file) == ONE.line + b"\n"
    assert (mode(file.parent), mode(file)) == (0o755, 0o600)


def test_with_nothing_wanted_nothing_is_made(home: Path) -> None:
    assert update(me(home), want()).content == b""
    assert read(me(home)) == b""
    assert not list(home.iterdir())


def test_the_mode_of_an_existing_file_survives(file: Path) -> None:
    file.write_bytes(b"theirs\r\nlast without newline")
    file.chmod(0o640)
    merged = update(me(file.parents[1]), want(ONE))
    assert content(file) == b"theirs\r\nlast without newline\n" + ONE.line + b"\n"
    assert merged.added == (ONE.fingerprint,)
    assert mode(file) == 0o640


def test_what_is_unchanged_is_not_written(file: Path) -> None:
    account = me(file.parents[1])
    update(account, want(ONE))
    before = file.stat()
    assert update(account, want(ONE)).added == ()
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_the_old_file_is_replaced_not_written_into(file: Path) -> None:
    file.write_bytes(b"theirs\n")
    with file.open("rb") as open_before:
        update(me(file.parents[1]), want(ONE))
        assert open_before.read() == b"theirs\n"
    assert content(file) == b"theirs\n" + ONE.line + b"\n"


def test_special_bits_are_not_carried_over(file: Path) -> None:
    file.write_bytes(b"")
    file.chmod(0o6755)
    update(me(file.parents[1]), want(ONE))
    assert mode(file) == 0o755


def test_extended_attributes_survive_except_those_bound_to_the_old_bytes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faked: not every file system that tests run on has them."""
    attributes = {"security.selinux": b"ctx", "security.ima": b"hash", "user.x": b"1"}
    given: dict[str, bytes] = {}
    monkeypatch.setattr(os, "listxattr", lambda _: list(attributes))
    monkeypatch.setattr(os, "getxattr", lambda _, name: attributes[name])
    monkeypatch.setattr(os, "setxattr", lambda _, name, value: given.update({name: value}))
    file.write_bytes(b"")
    update(me(file.parents[1]), want(ONE))
    assert given == {"security.selinux": b"ctx", "user.x": b"1"}


@pytest.mark.parametrize(("number", "fails"), [(errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_without_extended_attributes_is_fine(
    file: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails: bool
) -> None:
    def listxattr(_: int) -> list[str]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "listxattr", listxattr)
    file.write_bytes(b"theirs\n")
    if fails:
        with pytest.raises(ResourceError, match=r"Input/output error"):
            update(me(file.parents[1]), want(ONE))
    else:
        update(me(file.parents[1]), want(ONE))
    assert content(file).endswith(b"theirs\n" if fails else ONE.line + b"\n")


def test_a_symlink_in_place_of_the_file_is_not_followed(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "shadow"
    target.write_bytes(b"root:secret\n")
    file.symlink_to(target)
    for call in (lambda account: update(account, want(ONE)), read):
        with pytest.raises(ResourceError, match=r"authorized_keys: a symbolic link"):
            call(me(file.parents[1]))
    assert target.read_bytes() == b"root:secret\n"
    assert file.is_symlink()


def test_a_dangling_symlink_in_place_of_the_file_is_refused(file: Path, tmp_path: Path) -> None:
    file.symlink_to(tmp_path / "planted")
    with pytest.raises(ResourceError, match=r"a symbolic link"):
        update(me(file.parents[1]), want(ONE))
    assert not (tmp_path / "planted").exists()


def test_a_symlink_in_place_of_the_directory_is_not_followed(home: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (home / ".ssh").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResourceError, match=r"\.ssh: a symbolic link"):
        update(me(home), want(ONE))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_in_place_of_the_directory_is_refused(home: Path) -> None:
    (home / ".ssh").write_bytes(b"")
    with pytest.raises(ResourceError, match=r"\.ssh: .* of another kind"):
        update(me(home), want(ONE))


def test_a_home_that_is_a_symlink_is_the_administrators_choice(home: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(home)
    update(me(tmp_path / "link"), want(ONE))
    assert content(home / ".ssh" / "authorized_keys") == ONE.line + b"\n"


def test_a_home_that_cannot_be_opened_is_an_error_with_the_reason(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ResourceError, match="authorized_keys: Input/output error"):
        read(me(home))


def test_a_home_that_is_missing_is_not_made(tmp_path: Path) -> None:
    account = me(tmp_path / "nobody")
    with pytest.raises(ResourceError, match=r"nobody: the home of ubuntu does not exist"):
        update(account, want(ONE))
    assert update(account, want()).content == read(account) == b""
    assert not list(tmp_path.iterdir())


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as any_socket:
        any_socket.bind(str(path))


@pytest.mark.parametrize("make", [make_fifo, make_directory, make_socket])
def test_what_is_no_regular_file_is_refused_without_hanging(
    tmp_path_factory: pytest.TempPathFactory, make: Callable[[Path], None]
) -> None:
    home = tmp_path_factory.mktemp("h")  # short: a socket's path is limited
    (home / ".ssh").mkdir()
    make(home / ".ssh" / "authorized_keys")
    with pytest.raises(ResourceError, match=r"authorized_keys: (is not a regular|No such device)"):
        update(me(home), want(ONE))


def test_a_file_too_long_to_be_one_is_refused(file: Path) -> None:
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(ResourceError, match=r"longer than"):
        update(me(file.parents[1]), want(ONE))


def test_a_file_is_not_made_longer_than_what_could_be_read_again(file: Path) -> None:
    file.write_bytes(b"#" * (MAX_BYTES - 10))
    with pytest.raises(ResourceError, match=r"would be longer"):
        update(me(file.parents[1]), want(ONE))
    assert len(content(file)) == MAX_BYTES - 10


def test_a_line_appended_meanwhile_is_not_lost(file: Path) -> None:
    file.write_bytes(b"first\n")
    appended: list[bool] = []

    def change(old: bytes) -> Merged:
        if not appended:
            appended.append(True)
            with file.open("ab") as their_own:
                their_own.write(b"from a server\n")
        return merge(old, [ONE])

    update(me(file.parents[1]), change)
    assert content(file) == b"first\nfrom a server\n" + ONE.line + b"\n"


def test_a_file_made_meanwhile_is_not_lost(file: Path) -> None:
    def change(old: bytes) -> Merged:
        if not old:
            file.write_bytes(b"from a server\n")
        return merge(old, [ONE])

    update(me(file.parents[1]), change)
    assert content(file) == b"from a server\n" + ONE.line + b"\n"


def test_a_file_that_never_rests_is_an_error_and_left_alone(file: Path) -> None:
    written: list[bytes] = []

    def change(old: bytes) -> Merged:
        written.append(f"round {len(written)}\n".encode())
        file.write_bytes(b"".join(written))
        return merge(old, [ONE])

    with pytest.raises(ResourceError, match=r"somebody else keeps writing"):
        update(me(file.parents[1]), change)
    assert content(file) == b"".join(written)


@pytest.mark.parametrize("call", ["write", "fchmod", "fsync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_leaves_the_old_file_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    file.write_bytes(b"theirs\n")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ResourceError, match=rf"authorized_keys: {os.strerror(number)}"):
        update(me(file.parents[1]), want(ONE))
    monkeypatch.undo()
    assert content(file) == b"theirs\n"


def test_short_writes_are_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.write
    monkeypatch.setattr(os, "write", lambda to, data: really(to, bytes(data[:7])))
    update(me(file.parents[1]), want(ONE))
    assert content(file) == ONE.line + b"\n"


def test_the_file_is_flushed_before_it_gets_its_name_and_the_directory_after(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        calls.append("flush directory" if is_directory else "flush file")
        fsync(descriptor)

    def record_rename(source: str, target: str, **directories: int) -> None:
        calls.append("rename")
        rename(source, target, **directories)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    update(me(file.parents[1]), want(ONE))
    assert calls == ["flush file", "rename", "flush directory"]
    update(me(file.parents[1]), want(ONE))
    assert calls[3:] == ["flush directory"]


def test_temporary_files_of_dead_processes_and_our_own_are_removed(file: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(10)
    names = [
        f".authorized_keys.dstack-shim-{process}-{'ab' * 16}"
        for process in (gone.pid, os.getpid(), "x", os.getppid())
    ]
    for name in names[:3]:
        (file.parent / name).write_bytes(b"half a fi")
    (file.parent / ".authorized_keys.swp").write_bytes(b"an editor's")
    (file.parent / names[3]).write_bytes(b"of another shim at work")
    update(me(file.parents[1]), want(ONE))
    assert sorted(entry.name for entry in file.parent.iterdir()) == sorted(
        [names[3], ".authorized_keys.swp", "authorized_keys"]
    )


def test_a_directory_under_a_temporary_name_is_in_nobodys_way(file: Path) -> None:
    (file.parent / f".authorized_keys.dstack-shim-{os.getpid()}-x").mkdir()
    update(me(file.parents[1]), want(ONE))
    assert file.read_bytes() == ONE.line + b"\n"


def test_a_symlink_planted_under_the_temporary_name_is_not_followed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name cannot be guessed; if it could, nothing would be written through the link."""
    target = tmp_path / "shadow"
    target.write_bytes(b"root:secret\n")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    monkeypatch.setattr(authorized_keys, "_remove_leftovers", lambda _: None)
    (file.parent / f".authorized_keys.dstack-shim-{os.getpid()}-guessed").symlink_to(target)
    with pytest.raises(ResourceError, match=r"File exists"):
        update(me(file.parents[1]), want(ONE))
    assert target.read_bytes() == b"root:secret\n"


def test_a_directory_removed_while_it_is_made_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", lambda *_, **__: None)
    with pytest.raises(ResourceError, match=r"removed while it was being made"):
        update(me(home), want(ONE))


def test_a_directory_made_by_somebody_else_just_now_is_used(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.mkdir

    def twice(path: str, mode: int, *, dir_fd: int) -> None:
        really(path, mode, dir_fd=dir_fd)
        really(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", twice)
    update(me(home), want(ONE))
    assert content(home / ".ssh" / "authorized_keys") == ONE.line + b"\n"


@needs_root
def test_files_made_by_root_belong_to_the_user(home: Path) -> None:
    os.chown(home, 4711, 4712)
    account = evolve(me(home), uid=4711, gid=4712)
    update(account, want(ONE))
    for path in (home / ".ssh", home / ".ssh" / "authorized_keys"):
        assert (path.stat().st_uid, path.stat().st_gid) == (4711, 4712)


@needs_root
def test_a_file_of_another_user_keeps_owner_group_and_mode(file: Path) -> None:
    file.write_bytes(b"theirs\n")
    os.chown(file, 1234, 5678)
    file.chmod(0o640)
    os.chown(file.parent, 4711, 4711)
    os.chown(file.parents[1], 4711, 4711)
    update(evolve(me(file.parents[1]), uid=4711, gid=4711), want(ONE))
    status = file.stat()
    assert (status.st_uid, status.st_gid, mode(file)) == (1234, 5678, 0o640)
    assert content(file) == b"theirs\n" + ONE.line + b"\n"


@needs_root
@pytest.mark.parametrize("whose", ["home", ".ssh"])
def test_a_directory_of_a_third_user_is_refused(file: Path, whose: str) -> None:
    file.write_bytes(b"theirs\n")
    os.chown(file.parents[1] if whose == "home" else file.parent, 1234, 1234)
    account = evolve(me(file.parents[1]), uid=4711, gid=4711)
    with pytest.raises(ResourceError, match=rf"{whose}: belongs neither to ubuntu nor to root"):
        update(account, want(ONE))
    assert content(file) == b"theirs\n"


@needs_root
@pytest.mark.parametrize("keys", [(ONE,), ()])
def test_a_directory_left_to_root_by_a_crash_is_given_to_the_user(
    home: Path, keys: tuple[PublicKey, ...]
) -> None:
    (home / ".ssh").mkdir(mode=0o700)
    update(evolve(me(home), uid=4711, gid=4712), want(*keys))
    status = (home / ".ssh").stat()
    assert (status.st_uid, status.st_gid) == (4711, 4712)


@needs_root
def test_a_directory_that_root_keeps_on_purpose_stays_roots(file: Path) -> None:
    file.write_bytes(b"managed by the administrator\n")
    update(evolve(me(file.parents[1]), uid=4711, gid=4712), want(ONE))
    assert file.parent.stat().st_uid == 0
    assert file.stat().st_uid == 0


@needs_root
def test_real_attributes_of_a_real_file_system_survive(file: Path) -> None:
    file.write_bytes(b"theirs\n")
    names = {"user.note": b"hello", "security.selinux": b"system_u:object_r:ssh_home_t:s0\0"}
    try:
        for name, value in names.items():
            os.setxattr(file, name, value)
    except OSError as error:
        pytest.skip(f"no extended attributes on the file system of temporary files: {error}")
    update(me(file.parents[1]), want(ONE))
    assert {name: os.getxattr(file, name) for name in os.listxattr(file)} == names
