"""A Docker Engine of one's own inside the sandbox: started in under a second, killed at will."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import docker

from tests.eventually import eventually
from tests.lab import sandbox

PROGRAMS = Path(__file__).parent / "bin"
DAEMON = "DSTACK_LAB_DOCKERD"
"""Names another daemon than the machine's own, to run the engine tests against its release."""
_CAP_SYS_RESOURCE = 24


class PrivateEngine:
    """One dockerd with everything it needs in one directory, on the sandbox's tmpfs.

    ``live_restore`` is the daemon's option: containers outlive it. A second engine beside
    another needs ``shares_network`` (a bridge of its own, no firewall rules, so its containers
    reach only each other). ``arguments`` are handed to dockerd.
    """

    def __init__(
        self,
        *,
        live_restore: bool = False,
        shares_network: bool = False,
        has_nvidia: bool = True,
        arguments: Sequence[str] = (),
    ) -> None:
        if not sandbox.inside():
            raise RuntimeError("an engine is only started in the sandbox")
        # Short: the path of a unix socket has at most 107 characters, containerd adds 60.
        self.directory = Path(tempfile.mkdtemp(prefix="e", dir="/run/lab"))
        self.socket = self.directory / "s"
        self.address = f"unix://{self.socket}"
        self.log = self.directory / "dockerd.log"
        self._exec_root = self.directory / "x"
        # Below the sandbox's own group, which is removed with it.
        self._cgroup = f"{os.environ[sandbox.MARK]}/{self.directory.name}"
        self._live_restore = live_restore
        self._has_nvidia = has_nvidia
        self._arguments = tuple(arguments)
        self._bridge = self._make_bridge() if shares_network else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environ(self) -> dict[str, str]:
        """What a shim or a client is told to find it."""
        return {"DOCKER_HOST": self.address}

    @property
    def pid(self) -> int:
        """The daemon's process id, while it runs."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> docker.APIClient:
        """A new low-level client of the SDK, for what only tests do."""
        return docker.APIClient(self.address, version="auto", timeout=60)

    def start(self, *, within: float = 30.0) -> None:
        """Start the daemon and return once it answers."""
        # The previous one's: a number that meanwhile is another process looks alive.
        for leftover in (self.directory / "pid", self.socket):
            leftover.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        eventually(self._answers, within=within, every=0.01, saying="dockerd answers")

    def kill(self) -> None:
        """SIGKILL the daemon; containers run on."""
        self._end(signal.SIGKILL)

    def term(self) -> None:
        """SIGTERM the daemon and wait for it; it stops the containers unless live-restore."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """TERM and start again."""
        self.term()
        self.start()

    def power_off(self) -> None:
        """Kill the daemon, its containerd and every container at once, as a power cut does.

        Like a reboot it empties the run-time state; :meth:`start` is the machine coming back.
        """
        victims = {*self._own_processes(), *self._container_processes()}
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        eventually(
            lambda: not any(_is_running(pid) for pid in victims), saying="all killed are gone"
        )
        shutil.rmtree(self._exec_root, ignore_errors=True)

    def close(self) -> None:
        """Power off for good."""
        if self._process is not None and self._process.poll() is None:
            self.power_off()
        shutil.rmtree(self.directory, ignore_errors=True)

    def has_container_processes(self) -> bool:
        """Whether any process of any of its containers runs."""
        return any(True for _ in self._container_processes())

    def say_no_modeset(self, is_missing: bool = True) -> None:
        """Make NVIDIA containers that ask for the display part fail to start."""
        marker = self.directory / "no-modeset"
        marker.touch() if is_missing else marker.unlink(missing_ok=True)

    def _command(self) -> list[str]:
        runtime = "runc" if _may_raise_limits() else str(PROGRAMS / "runtime")
        command = [os.environ.get(DAEMON, "dockerd"), "--data-root", str(self.directory / "d")]
        command += ["--exec-root", str(self._exec_root), "--host", self.address]
        command += ["--pidfile", str(self.directory / "pid"), "--log-level", "warn"]
        command += ["--add-runtime", f"lab={runtime}", "--default-runtime", "lab"]
        command += ["--add-runtime", f"habana={runtime}"]
        command += ["--cgroup-parent", f"/{self._cgroup}"]
        if self._live_restore:
            command.append("--live-restore")
        if self._bridge:
            command += ["--bridge", self._bridge, "--iptables=false", "--ip-masq=false"]
        return [*command, *self._arguments]

    def _environment(self) -> dict[str, str]:
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        if self._has_nvidia:
            path = f"{PROGRAMS}:{path}"
        return {**os.environ, "PATH": path, "DSTACK_LAB_ENGINE": str(self.directory)}

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            tail = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"dockerd ended with {self._process.returncode}:\n{tail}")
        connection = _UnixConnection(self.socket)
        try:
            connection.request("GET", "/_ping")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(timeout=60)

    def _own_processes(self) -> Iterator[int]:
        needle = str(self.directory).encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes()
                if needle in words:
                    yield int(entry.name)

    def _container_processes(self) -> Iterator[int]:
        groups = Path("/sys/fs/cgroup").glob(f"**/{self._cgroup}/**/cgroup.procs")
        for group in groups:
            with suppress(OSError):
                yield from map(int, group.read_text(encoding="ascii").split())

    def _make_bridge(self) -> str:
        name = f"br{self.directory.name}"[:15]
        number = sum(name.encode()) % 200 + 20
        for words in (
            ("link", "add", name, "type", "bridge"),
            ("addr", "add", f"172.31.{number}.1/24", "dev", name),
            ("link", "set", name, "up"),
        ):
            subprocess.run(["ip", *words], check=True, timeout=10)
        return name


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=5)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _may_raise_limits() -> bool:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (bounding,) = (line for line in status.splitlines() if line.startswith("CapBnd:"))
    return bool(int(bounding.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
