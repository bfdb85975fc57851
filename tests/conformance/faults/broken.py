"""A shim with one fault: the real one behind proxies that change one thing.

    python -m tests.conformance.faults.broken FAULT EXECUTABLE [the shim's arguments]

In front of it stands an HTTP proxy, behind it one before the engine's socket; files and the
environment can be changed on the way. With the fault ``none`` nothing is changed, so what a case
finds with a fault and not without it is the fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.conformance.engine import Wire
from tests.conformance.faults.faults import FAULTS, Answer, Call, Fault
from tests.eventually import eventually

_PR_SET_PDEATHSIG = 1
_NOT_HANDED_ON = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "date",
    "server",
}


def main(name: str, executable: str, *arguments: str) -> int:
    """Run the shim with this fault until it ends; its exit code."""
    fault = FAULTS[name]()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    port = _option(arguments, "--shim-http-port")
    home = _option(arguments, "--shim-home")
    if port is None or home is None:
        return fault.exit_code(_run(executable, list(arguments), environment))
    fault.home = Path(home)
    fault.prepare(environment)
    inner = _free_port()
    given = fault.arguments([*arguments, f"--shim-http-port={inner}"])
    with contextlib.ExitStack() as stack:
        if fault.meddles_with_engine and environment["DOCKER_HOST"].startswith("unix://"):
            stack.enter_context(_engine_proxy(fault, environment))
        return fault.exit_code(_serve(fault, [executable, *given], environment, int(port), inner))


def _serve(
    fault: Fault, command: list[str], environment: dict[str, str], port: int, inner: int
) -> int:
    process = subprocess.Popen(command, env=environment, preexec_fn=_die_with_parent)  # noqa: PLW1509 - no threads yet
    fault.process = process.pid

    def hand_on(sign: int, _frame: object) -> None:
        fault.signalled()
        process.send_signal(sign)

    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, hand_on)
    threading.Thread(target=_proxy, args=(fault, process, port, inner), daemon=True).start()
    return process.wait()


def _proxy(fault: Fault, process: subprocess.Popen[bytes], port: int, inner: int) -> None:
    """Listen once the real one does, so that nobody sees a shim that is not there yet."""
    eventually(lambda: process.poll() is not None or _listens(inner), within=60)
    if process.poll() is None:
        server = ThreadingHTTPServer(("localhost", port), _handler(fault, inner))
        server.daemon_threads = True
        server.serve_forever()


def _handler(fault: Fault, inner: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            call = Call(self.command, self.path, dict(self.headers), self.rfile.read(length))
            answer = fault.call(call) or fault.answer(call, _ask(inner, call))
            self._send(answer, with_body=call.method != "HEAD")

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any  # noqa: N815 - names of the base class

        def _send(self, answer: Answer, *, with_body: bool) -> None:
            self.send_response_only(answer.status)
            for key, value in answer.headers.items():
                self.send_header(key, value)
            self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            if with_body:
                self.wfile.write(answer.body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


def _ask(inner: int, call: Call) -> Answer:
    connection = http.client.HTTPConnection("localhost", inner, timeout=120)
    headers = {key: value for key, value in call.headers.items() if key.lower() != "connection"}
    with contextlib.closing(connection):
        connection.request(call.method, call.path, call.body or None, headers)
        got = connection.getresponse()
        body = got.read()
        kept = {key: value for key, value in got.getheaders() if key.lower() not in _NOT_HANDED_ON}
        return Answer(got.status, kept, body)


@contextlib.contextmanager
def _engine_proxy(fault: Fault, environment: dict[str, str]) -> Iterator[None]:
    folder = Path(tempfile.mkdtemp(prefix="f", dir="/run/lab"))
    upstream = Path(environment["DOCKER_HOST"].removeprefix("unix://"))
    wire = Wire(folder / "s", upstream, change=fault.engine_bytes)
    environment["DOCKER_HOST"] = wire.url
    with contextlib.ExitStack() as stack:
        for method in ("GET", "POST", "DELETE"):
            stack.enter_context(wire.rule(method, "", fault.engine_request))
        yield
    wire.close()


def _run(executable: str, arguments: list[str], environment: dict[str, str]) -> int:
    return subprocess.run(
        [executable, *arguments], env=environment, timeout=60, check=False
    ).returncode


def _option(arguments: tuple[str, ...], name: str) -> str | None:
    for word in arguments:
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _die_with_parent() -> None:
    """A case that kills the shim kills this process: the real one must go with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
