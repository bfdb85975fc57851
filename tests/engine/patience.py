"""What takes its time: begun with the first test of the run, looked at after the last one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dstack_shim_contracts.api import TaskInfo, VolumeInfo
from dstack_shim_contracts.statuses import TaskStatus

from tests.lab.engine import PrivateEngine
from tests.lab.host import BY_ID, Host, volume
from tests.lab.images import RUNS_ON, Images, exits
from tests.lab.registry import Registry, SlowWay

PORT = 11098
SLOW_PORT = 5006
SILENCE = 95.0  # s
LATE = 5.0  # s


class Patience:
    """A shim on an engine that nobody else touches, with tasks that wait for something.

    silent  a pull without a word, until :meth:`speak`
    hung    a blank disk whose ``blkid`` never ends
    lost    a disk of AWS that is not there, on a host whose ``lsblk`` fails
    late    a disk that appears after 5 s
    """

    def __init__(self, host: Host, images: Images, way: SlowWay, image: str) -> None:
        self.disk = host.disk("hung")
        self.way = way
        host.disk("late", file_system=True, attached=False)
        hung = os.path.realpath(BY_ID / "google-hung")
        host.tool("blkid", f'case $6 in {hung}) exec sleep 3600; esac; exec /usr/sbin/blkid "$@"')
        host.tool("lsblk", "echo 'no sysfs here' >&2; exit 1")
        self.shim = host.shim(port=PORT, has_own_mounts=True)
        self.shim.start()
        self._began = time.monotonic()
        lost = VolumeInfo("aws", "lost", "vol-0123", init_fs=True, device_name="/dev/sdq")
        self.shim.submit("silent", image)
        self.shim.submit("hung", images.job(RUNS_ON), volumes=(volume("hung", init_fs=True),))
        self.shim.submit("lost", images.job(RUNS_ON), volumes=(lost,))
        self.shim.submit("late", images.job(exits(0)), volumes=(volume("late"),))
        self._attach = threading.Timer(LATE, host.attach, ["late"])
        self._attach.start()

    def close(self) -> None:
        """Leave nothing waiting."""
        self._attach.join()
        self.way.bytes_per_second = 1 << 30

    def ended(self, task_id: str) -> TaskInfo:
        """The task, once it is over."""
        return self.shim.wait_for(task_id, TaskStatus.TERMINATED, within=60)

    def wait_out(self) -> None:
        """Return when the pull has been silent long enough."""
        threading.Event().wait(max(0.0, self._began + SILENCE - time.monotonic()))

    def speak(self) -> None:
        """Let the rest of the image pass."""
        self.way.bytes_per_second = 1 << 30


@contextmanager
def begun(folder: Path, registry: Registry) -> Iterator[Patience]:
    """Everything under way, until the block ends."""
    engine = PrivateEngine(shares_network=True)
    engine.start()
    way = SlowWay(int(registry.host.rpartition(":")[2]), SLOW_PORT, bytes_per_second=0)
    way.open()
    client = engine.client()
    images = Images(client)
    local = images.plain("to-push/silent:1", environment={"LAB_JOB": exits(0)}, padding=1_000_000)
    registry.push(client, local, "silent:1")
    client.remove_image(local)
    host = Host(folder, engine)
    patience = Patience(host, images, way, f"{way.host}/silent:1")
    try:
        yield patience
    finally:
        patience.close()
        host.close()
        client.close()
        engine.close()
        way.close()
