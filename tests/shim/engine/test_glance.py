"""One look at an engine through its socket, whatever it answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstack_shim.engine.glance import Glance, local_socket
from dstack_shim.engine.protocol import LABEL_TASK_ID, ContainerState
from dstack_shim.errors import ContainerNotFound, EngineError, EngineUnreachable

BOX = {
    "Id": "c1",
    "Names": ["/job-1"],
    "State": "running",
    "Created": 5,
    "Labels": {LABEL_TASK_ID: "t1"},
}


class Server:
    """Answers each request on a Unix socket with the same bytes."""

    def __init__(self, path: Path) -> None:
        self.answer = b""
        self.asked: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def says(self, body: object, *, status: int = 200, cut: int = 0) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content) + cut}\r\n\r\n"
        self.answer = head.encode() + content

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client:
                self.asked.append(client.recv(65536).split(b"\r\n")[0].decode())
                client.sendall(self.answer)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "s")
    yield server
    server.close()


@pytest.fixture
def glance(server: Server, tmp_path: Path) -> Glance:
    return Glance(str(tmp_path / "s"), 5.0)


def test_it_lists_what_can_be_read(server: Server, glance: Glance) -> None:
    server.says([BOX, {"Id": "c2"}, None])
    (container,) = glance.list_task_containers()
    assert (container.id, container.task_id, container.state) == (
        "c1",
        "t1",
        ContainerState.RUNNING,
    )
    (asked,) = server.asked
    assert asked.startswith("GET /containers/json?all=1&filters=%7B%22label%22")


def test_it_tells_who_is_there(server: Server, glance: Glance) -> None:
    server.says({"Version": "20.10", "ApiVersion": "1.41", "DockerRootDir": "/d"})
    info = glance.ping()
    assert (info.version, info.api_version, info.root_dir) == ("20.10", "1.41", "/d")


@pytest.mark.parametrize("answer", [None, {}, "text", 5])
def test_a_list_that_is_none_is_no_empty_list(
    server: Server, glance: Glance, answer: object
) -> None:
    server.says(answer)
    with pytest.raises(EngineUnreachable, match="is no list"):
        glance.list_task_containers()


def test_a_refusal_has_the_engine_s_words(server: Server, glance: Glance) -> None:
    server.says({"message": "not today"}, status=500)
    with pytest.raises(EngineError, match="not today"):
        glance.list_task_containers()


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_what_is_no_answer_is_none(server: Server, glance: Glance, answer: bytes) -> None:
    server.answer = answer
    with pytest.raises(EngineUnreachable):
        glance.list_task_containers()


def test_an_answer_cut_short_is_none(server: Server, glance: Glance) -> None:
    server.says([BOX], cut=100)
    with pytest.raises(EngineUnreachable):
        glance.list_task_containers()


def test_a_container_in_all_detail(server: Server, glance: Glance) -> None:
    server.says({"Id": "c1", "State": {"Status": "exited", "ExitCode": 7}})
    details = glance.inspect("c1")
    assert (details.exit_code, details.container.state) == (7, ContainerState.EXITED)
    server.says({"Id": "c1", "State": {"Status": "exited"}})
    with pytest.raises(EngineError, match=r"container c1: no State\.ExitCode"):
        glance.inspect("c1")


def test_a_container_that_is_gone(server: Server, glance: Glance) -> None:
    server.says({"message": "No such container: c1"}, status=404)
    with pytest.raises(ContainerNotFound, match="No such container"):
        glance.inspect("c1")
    with pytest.raises(ContainerNotFound, match="No such container"):
        list(glance.stream("/containers/c1/logs", waits=False))


@pytest.mark.parametrize("waits", [False, True])
def test_an_answer_as_it_comes(server: Server, glance: Glance, waits: bool) -> None:
    chunks = b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
    server.answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    assert b"".join(glance.stream("/", waits=waits)) == b"hello world"
    server.answer = server.answer[:-20]
    with pytest.raises(EngineUnreachable):
        list(glance.stream("/", waits=waits))


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngineUnreachable, match="none: No such file or directory"):
        Glance(str(tmp_path / "none"), 5.0).list_task_containers()


def test_an_engine_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(EngineUnreachable, match="timed out"):
            Glance(str(tmp_path / "s"), 0.01).list_task_containers()


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("", "/var/run/docker.sock"),
        ("unix:///run/d.sock", "/run/d.sock"),
        ("tcp://10.0.0.1:2376", None),
        ("ssh://host", None),
    ],
)
def test_only_an_engine_on_this_host_is_looked_at(address: str, path: str | None) -> None:
    assert local_socket({"DOCKER_HOST": address}) == path
