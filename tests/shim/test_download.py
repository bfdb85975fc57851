"""Downloads over a real loopback HTTP server, with the faults of real servers."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import random
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dstack_shim import download
from dstack_shim.download import Fetched, fetch, shown
from dstack_shim.errors import ComponentError
from tests.eventually import eventually
from tests.shim.file_server import FileServer, Reply, serving

CONTENT = random.Random(7).randbytes(300_000)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with serving() as server:
        yield server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new"
    path.touch(mode=0o600)
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def test_content_is_written_with_its_digest_and_made_executable(
    files: FileServer, path: Path
) -> None:
    files.replies["/f"] = Reply(CONTENT, headers={"ETag": '"1"', "Last-Modified": "yesterday"})

    fetched = await fetch(files.url("/f"), path)

    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert fetched is not None
    assert (fetched.sha256, fetched.size) == (sha256(CONTENT), len(CONTENT))
    assert (fetched.etag, fetched.last_modified, fetched.length) == ('"1"', "yesterday", "300000")


@pytest.mark.parametrize("reply", [Reply(CONTENT, chunked=True), Reply(CONTENT, until_close=True)])
async def test_content_without_announced_length_is_taken(
    files: FileServer, path: Path, reply: Reply
) -> None:
    files.replies["/f"] = reply

    fetched = await fetch(files.url("/f"), path)

    assert path.read_bytes() == CONTENT
    assert fetched is not None
    assert fetched.length == ""


@pytest.mark.parametrize("content", [CONTENT, b"", b"x" * 5_000_000])
@pytest.mark.parametrize("name", ["gzip", "x-gzip", "GZIP"])
async def test_gzip_encoding_is_undone(
    files: FileServer, path: Path, content: bytes, name: str
) -> None:
    files.replies["/f"] = Reply(gzip.compress(content), headers={"Content-Encoding": name})

    fetched = await fetch(files.url("/f"), path)

    assert path.read_bytes() == content
    assert fetched is not None
    assert fetched.sha256 == sha256(content)
    assert files.requests[0][1]["accept-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (gzip.compress(CONTENT)[:-20], "cut short"),
        (b"no gzip at all", "damaged gzip"),
        (b"", "cut short"),
    ],
)
async def test_broken_gzip_content_is_refused(
    files: FileServer, path: Path, body: bytes, why: str
) -> None:
    files.replies["/f"] = Reply(body, headers={"Content-Encoding": "gzip"})

    with pytest.raises(ComponentError, match=why):
        await fetch(files.url("/f"), path)


async def test_encoding_we_did_not_ask_for_is_refused(files: FileServer, path: Path) -> None:
    files.replies["/f"] = Reply(b"?", headers={"Content-Encoding": "br"})

    with pytest.raises(ComponentError, match="unexpected content encoding"):
        await fetch(files.url("/f"), path)


@pytest.mark.parametrize("status", [201, 206, 304, 403, 404, 500, 503])
async def test_any_answer_but_200_is_refused_and_its_body_not_stored(
    files: FileServer, path: Path, status: int
) -> None:
    files.replies["/f"] = Reply(b"" if status == 304 else b"<html>AccessDenied</html>", status)

    with pytest.raises(ComponentError, match=rf"http://127\.0\.0\.1:\d+/f: .* answered {status}"):
        await fetch(files.url("/f"), path)

    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "reply",
    [Reply(CONTENT, cut=100_000), Reply(CONTENT, cut=0), Reply(CONTENT, cut=9, chunked=True)],
)
async def test_body_shorter_than_announced_is_refused(
    files: FileServer, path: Path, reply: Reply
) -> None:
    files.replies["/f"] = reply

    with pytest.raises(ComponentError, match=r"before the body was complete|ended after"):
        await fetch(files.url("/f"), path)


async def test_redirects_are_followed_but_not_for_ever(files: FileServer, path: Path) -> None:
    files.replies["/old"] = Reply(status=302, headers={"Location": files.url("/f")})
    files.replies["/f"] = Reply(CONTENT)
    files.replies["/loop"] = Reply(status=302, headers={"Location": files.url("/loop")})

    assert await fetch(files.url("/old"), path)
    with pytest.raises(ComponentError, match="too many redirects"):
        await fetch(files.url("/loop"), path)


async def test_refused_connection_is_named_without_the_signature_in_the_url(path: Path) -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    with pytest.raises(ComponentError) as raised:
        await fetch(f"http://user:pass@127.0.0.1:{port}/shim?X-Signature=secret", path)

    assert str(raised.value) == f"http://127.0.0.1:{port}/shim: Connection refused"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "expected a http or https URL"),
        ("ftp://host/file", "expected a http or https URL"),
        ("just words", "expected a http or https URL"),
        ("http://", "not a valid URL"),
        ("http://[::1", "not a valid URL"),
        (f"http://{'a' * 70}.example/", "not a valid URL"),
        ("http://nowhere.invalid/f", "http://nowhere.invalid/f: "),
    ],
)
async def test_url_that_leads_nowhere_is_a_readable_error(path: Path, url: str, why: str) -> None:
    with pytest.raises(ComponentError, match=why):
        await fetch(url, path)


async def test_server_that_does_not_speak_http_is_a_readable_error(path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def talk() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=talk, daemon=True).start()
        with pytest.raises(ComponentError, match=r"^http://127\.0\.0\.1:\d+/f: "):
            await fetch(f"http://127.0.0.1:{server.getsockname()[1]}/f", path)


async def test_download_that_does_not_end_in_time_is_given_up(
    files: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    files.replies["/f"] = Reply(CONTENT, hold=threading.Event())

    with pytest.raises(ComponentError, match=r"/f: not fetched within 0\.3 s"):
        await fetch(files.url("/f"), path)


async def test_body_that_comes_by_drops_keeps_no_thread_and_no_connection(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    hung_up, over = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                try:
                    while not over.wait(0.05):
                        connection.sendall(b"#")
                except OSError:
                    hung_up.set()

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(ComponentError, match=r"/f: not fetched within 0\.3 s"):
            await fetch(f"http://127.0.0.1:{server.getsockname()[1]}/f", path)
        assert await asyncio.to_thread(hung_up.wait, 10)
        over.set()
    eventually(lambda: not any(t.name == "download" for t in threading.enumerate()))


async def test_cancelled_caller_does_not_wait_and_the_thread_ends(
    files: FileServer, path: Path
) -> None:
    hold = threading.Event()
    files.replies["/f"] = Reply(CONTENT, hold=hold)
    task = asyncio.ensure_future(fetch(files.url("/f"), path))
    await asyncio.to_thread(files.reached.wait, 20)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    path.unlink()
    hold.set()

    eventually(lambda: not any(t.name == "download" for t in threading.enumerate()))
    assert not path.exists()


async def test_endless_content_is_refused(
    files: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_SIZE", 1_000_000)
    bomb = gzip.compress(b"\0" * 50_000_000)
    files.replies["/f"] = Reply(bomb, headers={"Content-Encoding": "gzip"})

    with pytest.raises(ComponentError, match="over 1000000 bytes"):
        await fetch(files.url("/f"), path)

    assert path.stat().st_size <= 2_100_000


async def test_full_disk_is_named(files: FileServer) -> None:
    files.replies["/f"] = Reply(CONTENT)

    with pytest.raises(ComponentError, match="could not be written down: No space left"):
        await fetch(files.url("/f"), Path("/dev/full"))


async def test_passwords_of_netrc_are_not_sent(
    files: FileServer, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    files.replies["/f"] = Reply(CONTENT)

    await fetch(files.url("/f"), path)

    assert "authorization" not in files.requests[0][1]


async def test_proxy_of_the_service_is_used(
    files: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", files.url(""))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    files.replies["http://somewhere.invalid/f"] = Reply(CONTENT)

    assert await fetch("http://somewhere.invalid/f", path)


# --- what was fetched before


async def first(files: FileServer, path: Path, reply: Reply) -> Fetched:
    files.replies["/f"] = reply
    fetched = await fetch(files.url("/f"), path)
    assert fetched is not None
    files.sent.clear()
    path.write_bytes(b"")
    return fetched


@pytest.mark.parametrize("header", ["ETag", "Last-Modified"])
async def test_known_content_is_not_sent_again_by_a_server_that_takes_conditions(
    files: FileServer, path: Path, header: str
) -> None:
    known = await first(files, path, Reply(CONTENT, headers={header: "the same"}))

    assert await fetch(files.url("/f"), path, known=known) is None

    assert files.sent == {}


@pytest.mark.parametrize("header", ["ETag", "Last-Modified"])
async def test_known_content_is_told_by_validators_where_conditions_are_ignored(
    files: FileServer, path: Path, header: str
) -> None:
    headers = {header: "the same", "X-Ignores-Conditions": "1"}
    known = await first(files, path, Reply(CONTENT, headers=headers))

    assert await fetch(files.url("/f"), path, known=known) is None

    assert path.read_bytes() == b""


async def test_known_content_is_told_by_length_and_beginning_where_there_are_no_validators(
    files: FileServer, path: Path
) -> None:
    known = await first(files, path, Reply(CONTENT))

    assert await fetch(files.url("/f"), path, known=known) is None


async def test_small_known_content_is_told_by_all_of_it(files: FileServer, path: Path) -> None:
    known = await first(files, path, Reply(b"small"))
    assert await fetch(files.url("/f"), path, known=known) is None

    files.replies["/f"] = Reply(b"SMALL")
    assert await fetch(files.url("/f"), path, known=known)


async def test_without_validators_content_is_fetched_again_after_a_while(
    files: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = await first(files, path, Reply(CONTENT))
    monkeypatch.setattr(download, "RECENT", 0.0)

    assert await fetch(files.url("/f"), path, known=known)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ETag": '"1"'}, {"ETag": '"2"'}),
        ({"ETag": '"1"'}, {}),
        ({"Last-Modified": "a"}, {"Last-Modified": "b"}),
        ({}, {}),
    ],
)
async def test_new_content_at_a_known_url_is_fetched(
    files: FileServer, path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    known = await first(files, path, Reply(CONTENT, headers=before))
    changed = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    files.replies["/f"] = Reply(changed, headers=after)

    fetched = await fetch(files.url("/f"), path, known=known)

    assert fetched is not None
    assert path.read_bytes() == changed


# --- small rules


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://host/a/b?sig=1#x", "https://host/a/b"),
        ("https://u:p@host:8443/a", "https://host:8443/a"),
        ("http://[::1", "the URL"),
        ("http://host:99999/", "the URL"),
    ],
)
def test_shown_url_has_neither_credentials_nor_query(url: str, text: str) -> None:
    assert shown(url) == text


def test_roots_of_trust_are_those_of_the_environment_then_of_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/somewhere")
    assert download._trust() is True
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    monkeypatch.setattr(download, "_CA_FILES", (str(tmp_path / "none"),))
    assert download._trust() is True
    roots = tmp_path / "roots.pem"
    roots.touch()
    monkeypatch.setattr(download, "_CA_FILES", (str(tmp_path / "none"), os.fspath(roots)))
    assert download._trust() == str(roots)
