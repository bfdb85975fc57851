"""The commands for people on a real host: with a shim, after it, and without an engine."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import resource
import signal
import socket
import socketserver
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker
import pytest
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.record import Intent, TaskRecord
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.console.text import shown
from dstack_shim.engine.protocol import LABEL_HOME, LABEL_IS_TASK, LABEL_TASK_ID
from dstack_shim.log import event_log
from dstack_shim.store import Store
from tests.eventually import eventually
from tests.lab.host import Host
from tests.lab.images import BASE, RUNS_ON, Images
from tests.lab.registry import Registry, SlowWay
from tests.lab.shim import ShimProcess, executable

RUNNING, TERMINATED = TaskStatus.RUNNING, TaskStatus.TERMINATED
NO_ENGINE = {"DOCKER_HOST": "unix:///nowhere.sock"}
MANY = 200
LIMIT = 0.4
"""Seconds of processor time that a command may take, in which nobody else is counted."""
TRIES = 20


class Console:
    """Calls commands about one shim's home."""

    def __init__(self, shim: ShimProcess, environ: Mapping[str, str]) -> None:
        self._flags = [f"--shim-home={shim.home}", f"--shim-http-port={shim.port}"]
        self.environ = {**os.environ, **environ, "LC_ALL": "C.UTF-8"}

    def words(self, *words: str) -> list[str]:
        return [*executable(), words[0], *self._flags, *words[1:]]

    def call(self, *words: str, **environ: str) -> tuple[int, str, str]:
        """Exit code, answer, and what was said about it."""
        done = subprocess.run(
            self.words(*words),
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def json(self, *words: str, **environ: str) -> Any:
        """The answer for programs."""
        code, out, err = self.call(*words, "--json", **environ)
        assert (code, err) == (0, "")
        return json.loads(out)

    def on_terminal(self, *words: str, columns: int = 80) -> str:
        """What a terminal of so many columns is sent."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environ = {**self.environ, "TERM": "xterm"}
        environ.pop("COLUMNS", None)
        with subprocess.Popen(
            self.words(*words), env=environ, stdin=slave, stdout=slave, stderr=slave
        ) as process:
            os.close(slave)
            sent = b""
            with suppress(OSError):  # EIO: the program has closed its end
                while data := os.read(master, 65536):
                    sent += data
            assert process.wait(30) == 0
        os.close(master)
        return sent.decode()


def ids(answer: Any) -> dict[str, str]:
    return {task["id"]: task["status"] for task in answer["tasks"]}


@pytest.fixture
def shim(instance: Host) -> ShimProcess:
    instance.gpus("GPU-1", "GPU-2")
    return instance.start_shim()


@pytest.fixture
def console(shim: ShimProcess, instance: Host) -> Console:
    return Console(shim, instance.engine.environ)


def test_beside_a_shim(shim: ShimProcess, console: Console, images: Images) -> None:
    shim.submit("runs", images.job(f"echo hello; {RUNS_ON}"), gpu=1, network_mode="bridge")
    shim.submit("fails", images.job("echo last words; exit 7"))
    info = shim.wait_for("runs", RUNNING)
    shim.wait_for("fails", TERMINATED)
    listed = {task["id"]: task for task in console.json("ps")["tasks"]}
    assert list(listed) == ["runs", "fails"]
    assert info.ports is not None
    assert [(port["host"], port["container"]) for port in listed["runs"]["ports"]] == [
        (port.host, port.container) for port in info.ports
    ]
    assert listed["runs"]["gpus"] == list(info.gpus_ids)
    assert listed["fails"]["termination_reason"] == "container_exited_with_error"
    assert listed["fails"]["termination_message"] == "last words"
    details = console.json("show", "fai")
    assert details["container"]["exit_code"] == 7
    assert details["released"] is True
    assert console.call("logs", "runs") == (0, "hello\n", "")
    assert console.call("logs", "nobody")[0] == 4
    _, out, _ = console.call("events", "fails", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert events[0]["event"] == "task.submitted"
    assert "task.ended" in {event["event"] for event in events}
    status = console.json("status")
    assert status["shim"]["features"][0] == "persisted-state"
    assert status["process"] == shim.pid
    assert status["tasks"] == {"running": 1, "terminated": 1}
    assert status["engine"]["version"]


def test_after_a_shim(
    shim: ShimProcess, console: Console, images: Images, client: docker.APIClient
) -> None:
    shim.submit("runs", images.job(f"echo hello; {RUNS_ON}"))
    shim.submit("ends", images.job("until [ -e /tmp/go ]; do sleep 0.05; done; echo bye; exit 3"))
    boxes = {task: shim.wait_for(task, RUNNING).container_id for task in ("runs", "ends")}
    shim.kill()
    client.exec_start(client.exec_create(boxes["ends"], ["touch", "/tmp/go"])["Id"])
    client.wait(boxes["ends"])
    code, out, err = console.call("ps", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["problems"] == [f"no shim answers on port {shim.port}"]
    hints = {task["id"]: (task["status"], task["hint"]) for task in answer["tasks"]}
    assert hints == {
        "runs": ("running", None),
        "ends": ("running", "its container is exited"),
    }
    assert console.json("show", "ends")["container"]["exit_code"] == 3
    assert console.call("logs", "ends")[1] == "bye\n"
    code, out, _ = console.call("status")
    assert (code, out.splitlines()[0]) == (3, "shim    no answer")
    shim.start()
    shim.wait_for("ends", TERMINATED)
    assert ids(console.json("ps")) == {"runs": "running", "ends": "terminated"}


def test_without_an_engine(shim: ShimProcess, console: Console, images: Images) -> None:
    shim.submit("runs", images.job(RUNS_ON))
    shim.submit("fails", images.job("echo last words; exit 7"))
    shim.wait_for("runs", RUNNING)
    shim.wait_for("fails", TERMINATED)
    for _ in ("beside the shim", "without it"):
        code, out, err = console.call("ps", **NO_ENGINE)
        assert code == 0
        assert "container_exited_with_error: last words" in out
        assert "no answer from the Docker Engine" in err
        assert ids(console.json("ps", **NO_ENGINE)) == {"runs": "running", "fails": "terminated"}
        assert "not known" in console.call("show", "runs", **NO_ENGINE)[1]
        code, out, err = console.call("logs", "fails", **NO_ENGINE)
        assert (code, out) == (1, "last words\n")
        assert console.call("events", "fails", **NO_ENGINE)[0] == 0
        assert "no answer" in console.call("status", **NO_ENGINE)[1]
        if shim.is_running:
            shim.kill()


def test_a_shim_of_another_home_is_not_taken_for_this_one(
    shim: ShimProcess, console: Console, images: Images, tmp_path: Path
) -> None:
    shim.submit("runs", images.job(RUNS_ON))
    shim.wait_for("runs", RUNNING)
    (tmp_path / "other").mkdir()
    code, out, err = console.call("ps", f"--shim-home={tmp_path}/other")
    assert code == 0
    assert len(out.splitlines()) == 1
    assert f"the shim on port {shim.port} is one of another home than {tmp_path}/other" in err
    assert "1 more found that are no task of this shim" in err
    assert console.call("status", f"--shim-home={tmp_path}/other")[0] == 3


class Relay(socketserver.ThreadingTCPServer):
    """A port behind which an engine's socket answers, as with an engine on another machine."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Way)
        self.path = str(path)


class _Way(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Relay)
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(self.server.path)
            back = threading.Thread(target=_pass_on, args=(engine, self.request))
            back.start()
            _pass_on(self.request, engine)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_an_engine_that_is_not_reached_by_its_socket(
    shim: ShimProcess, console: Console, images: Images, instance: Host
) -> None:
    shim.submit("fails", images.job("echo last words; exit 7"))
    shim.wait_for("fails", TERMINATED)
    with Relay(instance.engine.socket) as relay:
        thread = threading.Thread(target=relay.serve_forever)
        thread.start()
        elsewhere = {"DOCKER_HOST": f"tcp://127.0.0.1:{relay.server_address[1]}"}
        assert console.json("ps", **elsewhere)["engine"] is True
        assert console.json("show", "fails", **elsewhere)["container"]["exit_code"] == 7
        assert console.call("logs", "fails", **elsewhere) == (0, "last words\n", "")
        assert console.json("status", **elsewhere)["engine"]["version"]
        relay.shutdown()
        thread.join()


EVIL = r"printf 'a\033]0;owned\007b\033[2J\r\nc\302\233d\342\200\256e\n\033[31mred\033[0m\n'"


def test_what_a_task_writes_never_reaches_a_terminal_raw(
    shim: ShimProcess, console: Console, images: Images
) -> None:
    shim.submit("evil", images.job(f"{EVIL}; exit 1"))
    shim.wait_for("evil", TERMINATED)
    seen = console.on_terminal("logs", "evil").splitlines()
    assert seen == [r"a\x1b]0;owned\x07b\x1b[2J", r"c\x9bd\u202ee", "red"]
    for words in (["ps"], ["show", "evil"], ["events"]):
        for line in console.on_terminal(*words).splitlines():
            plain = line
            for code in ("0", "1", "2", "31", "32", "33"):
                plain = plain.replace(f"\x1b[{code}m", "")
            assert shown(plain) == plain
    exit_code, raw, _ = console.call("logs", "evil", "--raw")
    assert exit_code == 0
    assert raw.startswith("a\x1b]0;owned\x07b\x1b[2J")


def test_a_pull_is_a_bar_on_a_terminal(
    shim: ShimProcess,
    console: Console,
    images: Images,
    client: docker.APIClient,
    open_registry: Registry | None,
) -> None:
    if open_registry is None:
        pytest.skip("this machine has no docker-registry")
    local = images.plain("to-push/bar:1", padding=4_000_000)
    open_registry.push(client, local, "bar:1")
    client.remove_image(local)
    images.forget(local)
    way = SlowWay(5000, 5002, bytes_per_second=200_000)
    way.open()
    try:
        shim.submit("pulls", f"{way.host}/bar:1")
        eventually(
            lambda: "\u2501" in console.on_terminal("ps"), within=30, saying="a bar is drawn"
        )
        (task,) = console.json("ps")["tasks"]
        assert task["status"] == "pulling"
        assert 0 < task["pull"]["downloaded_bytes"] < task["pull"]["total_bytes"]
        assert "% of " in console.call("ps")[1]
        shim.client.terminate("pulls")
    finally:
        way.close()


def test_output_is_followed_to_its_end(
    shim: ShimProcess, console: Console, images: Images, client: docker.APIClient
) -> None:
    shim.submit(
        "talks", images.job("echo one; until [ -e /tmp/go ]; do sleep 0.05; done; echo two")
    )
    box = shim.wait_for("talks", RUNNING).container_id
    reader = subprocess.Popen(
        console.words("logs", "-f", "talks"),
        env=console.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    with reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "one\n"
        client.exec_start(client.exec_create(box, ["touch", "/tmp/go"])["Id"])
        assert reader.stdout.read() == "two\n"
        assert reader.wait(30) == 0


def test_events_are_followed_until_somebody_interrupts(
    shim: ShimProcess, console: Console, images: Images
) -> None:
    reader = subprocess.Popen(
        console.words("events", "-f", "-n", "0", "later"),
        env=console.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    with reader:
        assert reader.stdout is not None
        shim.submit("other", images.job("exit 0"))
        eventually(lambda: _has_open(reader.pid, shim.log_file), saying="the log is followed")
        shim.submit("later", images.job("exit 0"))
        assert "later     task.submitted" in reader.stdout.readline()
        reader.send_signal(signal.SIGINT)
        assert reader.wait(30) == 130


def _has_open(pid: int, file: Path) -> bool:
    with suppress(FileNotFoundError):
        links = Path("/proc", str(pid), "fd").iterdir()
        return any(link.exists() and link.samefile(file) for link in links)
    return False


def test_a_reader_that_goes_away_is_no_fault(
    shim: ShimProcess, console: Console, images: Images
) -> None:
    shim.submit("much", images.job("i=0; while [ $i -lt 5000 ]; do echo $i; i=$((i+1)); done"))
    shim.wait_for("much", TERMINATED)
    reader = subprocess.Popen(
        console.words("logs", "-n", "all", "much"),
        env=console.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        assert reader.stdout.readline() == b"0\n"
        reader.stdout.close()
        assert reader.wait(30) == 141
        assert reader.stderr.read() == b""


@pytest.fixture
def crowded(instance: Host, images: Images, client: docker.APIClient) -> ShimProcess:
    """A shim, not started, on a home with many tasks, each with its container."""
    shim = instance.shim()
    store = Store(shim.home, event_log())
    store.open()
    image = images.plain(BASE)
    now = time.time()
    for number in range(MANY):
        task_id = f"{number:08x}-75fc-4d64-9fd6-6f1e7a4a38f2"
        name = f"wonderful-duck-{number}-0-0"
        box = container_name(name, task_id)
        labels = {LABEL_IS_TASK: "true", LABEL_TASK_ID: task_id, LABEL_HOME: str(shim.home)}
        client.create_container(image, name=box, labels=labels, command=["true"])
        store.create(
            box,
            TaskRecord(
                task_id,
                TaskConfig(id=task_id, name=name, image_name=image),
                termination_reason="container_exited_with_error",
                termination_message="Traceback\nlast words\nValueError: שלום",
                cleaned_up=True,
                intent=Intent("running", now - 7200),
                ended_at=now - 60,
            ),
        )
    return shim


Answers = Callable[..., list[str]]


@pytest.mark.slow
def test_with_200_tasks_each_is_quick_and_fits_80_columns(
    crowded: ShimProcess, instance: Host
) -> None:
    """Slow for making 200 containers: a table that is right and quick with two of them may be
    neither with many.
    """
    console = Console(crowded, {**instance.engine.environ, "COLUMNS": "80"})
    task = "00000007"
    commands = [["ps"], ["show", task], ["events"], ["status"], ["logs", task]]
    crowded.start()
    for situation in ({}, {"LC_ALL": "C", "NO_COLOR": "1"}, NO_ENGINE):
        for words in commands:
            _, out, _ = console.call(*words, **situation)
            lines = out.splitlines()
            assert max(map(len, lines), default=0) <= 80, words
            assert words != ["ps"] or len(lines) == MANY + 1
            assert "LC_ALL" not in situation or out.isascii()
    for is_up in (True, False):
        if not is_up:
            crowded.kill()
        for words in commands:
            took = _quickest(console, words)
            assert took <= LIMIT, f"{words} took {took:.2f} s"


def _quickest(console: Console, words: list[str]) -> float:
    """Of several tries: on a machine that is busy with others, processor time grows, too."""
    quickest = 60.0
    for _ in range(TRIES):
        quickest = min(quickest, _seconds(console, words))
        if quickest <= LIMIT:
            break
    return quickest


def _seconds(console: Console, words: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    console.call(*words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
