"""A disk whose power is cut: what was not flushed is not there when it comes back.

The disk is an ext4 file system on an image. What the image holds at an instant is what a power
cut at that instant leaves: the rest is in the memory of the kernel. Flushed only by who asks for
it: the kernel's own flushes are put off (``commit``), as is its care for those who rename without
a flush (``noauto_da_alloc``), which other file systems do not have.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import attrs

from tests.crash.kill_points import Outcome, Trials
from tests.crash.server import Gone, Job, Server
from tests.crash.stage import FOREIGN, NEWCOMER, OUR_KEY, OWNER, PATIENCE, Stage
from tests.crash.strace import Strace, threads_of
from tests.eventually import eventually
from tests.lab.census import VOLUMES, mounted_volumes
from tests.lab.host import MIB, run

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OUR_LINE = OUR_KEY.encode() + b" # added by dstack-shim\n"


class Disk:
    """An image and where it is mounted."""

    def __init__(self, folder: Path) -> None:
        self._image = folder / "power.img"
        self.point = folder / "power"
        self.point.mkdir()
        with self._image.open("wb") as file:
            file.truncate(16 * MIB)
        run("mkfs.ext4", "-q", "-F", str(self._image))
        self._mount()
        self.point.chmod(0o755)

    def flush(self) -> None:
        """Make all that is there now certain."""
        run("sync", "--file-system", str(self.point))

    def save(self) -> Path:
        """A copy of the image as it is now."""
        copy = self._image.with_suffix(".copy")
        shutil.copyfile(self._image, copy)
        return copy

    def come_back_as(self, copy: Path) -> None:
        """Put that copy in the place of the disk."""
        self.close()
        copy.replace(self._image)
        self._mount()

    def close(self) -> None:
        """Unmount it."""
        run("umount", str(self.point))

    def _mount(self) -> None:
        options = "loop,commit=300,noauto_da_alloc"
        run("mount", "-t", "ext4", "-o", options, str(self._image), str(self.point))


@attrs.define
class Boot:
    """The kernel's id of this boot, as far as this sandbox can see."""

    file: Path

    def begin(self) -> None:
        """Another boot."""
        is_mounted = self.file.exists()
        self.file.write_text(f"{uuid.uuid4()}\n")
        if not is_mounted:
            run("mount", "--bind", str(self.file), str(_BOOT_ID))

    def close(self) -> None:
        """The true one again."""
        with suppress(OSError):
            self.file.unlink()
            run("umount", str(_BOOT_ID))


class PowerCuts:
    """Cuts the power of a stage whose homes are on ``disk`` when something was acknowledged."""

    def __init__(self, stage: Stage, disk: Disk, boot: Boot) -> None:
        self._stage = stage
        self._disk = disk
        self._boot = boot
        self._trials = Trials(stage)
        self._count = 0

    def cut(self, kind: str) -> Outcome:
        """Live until that is acknowledged, cut the power, come back, and see the task through."""
        began = time.monotonic()
        self._count += 1
        user = (NEWCOMER, OWNER)[self._count // len(KINDS) % 2]
        moment, job = KINDS[kind]
        server = self._trials.new_server(user, job)
        self._disk.flush()
        copy = moment(self, server)
        self._lose_power(copy)
        server.problems += self._not_kept(kind, server, user)
        return self._trials.see_through(server, f"{kind} of a key of {user}", "", began)

    # The moments: each returns a copy of the disk, and the shim has gone.

    def at_submit(self, server: Server) -> Path:
        return self._at_answer(server, "submit")

    def at_terminate(self, server: Server) -> Path:
        server.begin()
        return self._at_answer(server, "terminate")

    def at_remove(self, server: Server) -> Path:
        server.begin()
        server.ask("terminate")
        return self._at_answer(server, "remove")

    def at_release(self, server: Server) -> Path:
        return self._at_event(server, "task.released")

    def at_key_added(self, server: Server) -> Path:
        with self._nothing_mounted():
            return self._at_event(server, "host_keys.added")

    def at_key_removed(self, server: Server) -> Path:
        return self._at_event(server, "host_keys.removed")

    def _at_answer(self, server: Server, what: str) -> Path:
        """When the shim is about to send the first bytes of its answer."""
        main, worker, *_ = threads_of(self._stage.shim.pid)
        stop = "sendto:signal=STOP:when=1"
        with (
            self._held_back(worker) if what == "submit" else nullcontext(),
            Strace((main,), ("sendto",), self._trials.output, stop) as strace,
        ):
            asking = threading.Thread(target=_in_vain, args=(server, what))
            asking.start()
            copy = self._save_when_stopped()
            (answer,) = strace.calls()
            self._stage.shim.kill()
            asking.join()
        assert "HTTP/1.1 200 OK" in answer.text
        server.acknowledged(what)
        return copy

    def _held_back(self, worker: int) -> Strace:
        """The worker waits before it writes a second record.

        The start that follows a submit flushes too, and with it what the submit should have.
        """
        output = self._trials.output.with_suffix(".worker")
        return Strace((worker,), ("unlinkat",), output, "unlinkat:delay_enter=500000:when=2")

    def _at_event(self, server: Server, event: str) -> Path:
        """When the shim has said in its log that it is done."""
        wanted = f" {event} task={server.task_id} ".encode()
        with self._stage.shim.log_file.open("rb") as log:
            log.seek(0, os.SEEK_END)
            said = bytearray()

            def is_said() -> bool:
                said.extend(log.read())
                return wanted in said.replace(b"\n", b" ")

            server.ask("submit")
            eventually(is_said, within=PATIENCE, every=0.001, saying=event)
        os.kill(self._stage.shim.pid, signal.SIGSTOP)
        copy = self._save_when_stopped()
        self._stage.shim.kill()
        return copy

    @contextmanager
    def _nothing_mounted(self) -> Iterator[None]:
        """What follows a key has to wait: on a busy machine it would run before the power goes."""
        mount, go_on = self._stage.host.tools / "mount", self._stage.folder / "go-on"
        self._stage.host.tool("mount", f"until [ -e {go_on} ]; do sleep 0.02; done; exit 1")
        try:
            yield
        finally:
            mount.unlink()
            go_on.touch()
            waiting = str(mount).encode()
            eventually(lambda: not _runs(waiting), within=PATIENCE, saying="no mount waits")
            go_on.unlink()

    def _save_when_stopped(self) -> Path:
        eventually(self._is_stopped, within=PATIENCE, every=0.001, saying="the shim is stopped")
        return self._disk.save()

    def _is_stopped(self) -> bool:
        return all(
            _state(self._stage.shim.pid, thread) in "Tt"
            for thread in threads_of(self._stage.shim.pid)
        )

    def _lose_power(self, copy: Path) -> None:
        for container in self._stage.client.containers():
            self._stage.client.kill(container["Id"])
            self._stage.client.wait(container["Id"])
        for name in reversed(mounted_volumes()):
            run("umount", VOLUMES + name)
        self._boot.begin()
        self._disk.come_back_as(copy)

    def _not_kept(self, kind: str, server: Server, user: str) -> list[str]:
        """What the disk lacks of what was acknowledged, before a shim repairs it."""
        record = self._stage.record(server.task_id)
        keys = self._stage.host.keys_of(user)
        lost = []
        if not self._stage.host.keys_of(OWNER).startswith(FOREIGN):
            lost.append("the keys of others are not what they were")
        if (kind == "remove") is bool(record):
            lost.append(f"the record is {record}")
        if kind in ("terminate", "release") and not (
            record.get("cleaned_up") and record.get("termination_reason")
        ):
            lost.append(f"not released in {record}")
        if kind == "key added" and _OUR_LINE not in keys:
            lost.append(f"the key is not in {keys!r}")
        if kind in ("key removed", "release", "terminate", "remove") and _OUR_LINE in keys:
            lost.append("the key is there again")
        return lost


Moment = Callable[[PowerCuts, Server], Path]
KINDS: dict[str, tuple[Moment, Job]] = {
    "submit": (PowerCuts.at_submit, Job.RUNS_ON),
    "terminate": (PowerCuts.at_terminate, Job.RUNS_ON),
    "remove": (PowerCuts.at_remove, Job.RUNS_ON),
    "release": (PowerCuts.at_release, Job.ENDS),
    "key added": (PowerCuts.at_key_added, Job.RUNS_ON),
    "key removed": (PowerCuts.at_key_removed, Job.ENDS),
}
"""What is acknowledged → how to come to that, and what the job does."""


def _in_vain(server: Server, what: str) -> None:
    with suppress(Gone):
        server.ask(what)


def _runs(word: bytes) -> bool:
    """Whether a process runs that was given this word."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word in file.read_bytes().split(b"\0"):
                return True
    return False


def _state(pid: int, thread: int) -> str:
    """The state of a thread as one letter (proc(5)); "T" for one that has ended by now."""
    try:
        stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace")
    except OSError:
        return "T"
    return stat.rpartition(")")[2].split()[0]
