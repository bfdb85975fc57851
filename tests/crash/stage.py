"""The host of the crash tests: one GPU, one disk, two users, and a shim that is killed on it.

Everything is there once, so that whatever is leaked shows at the latest when the next task wants
it. Between trials only what is not the shim's is put back; what a shim left behind stays and is
what the next one finds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker
from dstack_shim_contracts.api import InstanceMount, TaskConfig, VolumeMount
from dstack_shim_contracts.naming import container_name

from tests.lab.census import VOLUMES, Census, asker, mounted_volumes
from tests.lab.engine import PrivateEngine
from tests.lab.host import Host, public_key, volume
from tests.lab.images import Images
from tests.lab.shim import PORT, ShimProcess

VOLUME = "data"
NEWCOMER, OWNER = "alice", "bob"
"""Users: one without ``.ssh``, one with keys of their own."""
FOREIGN = (
    f"{public_key(90, 'theirs')}\r\n\n# a note\n{public_key(91)} # added by dstack\n".encode()
)
OUR_KEY = public_key(1, "of the job")
PATIENCE = 90.0  # s: a machine that runs everything else too


class Stage:
    """One host; ``executable`` is the single-file build. The shim's home and those of the users
    are in ``place``, or in ``folder`` with all the rest.
    """

    def __init__(
        self,
        folder: Path,
        engine: PrivateEngine,
        client: docker.APIClient,
        executable: Path,
        place: Path | None = None,
    ) -> None:
        self.folder = folder
        self.home = (place or folder) / "home"
        self.engine = engine
        self.client = client
        self.images = Images(client)
        self.host = Host(folder, engine)
        self._marks = folder / "marks"
        self._make_gpu()
        self.host.disk(VOLUME, file_system=True)
        self.users = {
            name: self.host.user(name, (place or folder) / name) for name in (NEWCOMER, OWNER)
        }
        self.home.mkdir(exist_ok=True)
        self.executable = executable
        self.shim = self.new_shim()
        self.reset()

    def close(self) -> None:
        """Leave nothing."""
        self.sweep()
        self.host.close()
        shutil.rmtree("/dev/accel", ignore_errors=True)

    # The shim.

    def new_shim(self, *before: str) -> ShimProcess:
        """A shim on the home; the words ``before`` start it (strace, say)."""
        tool = f"--shim-binary-path={self._version_teller()}"
        path = f"{self.host.tools}:{os.environ['PATH']}:/usr/sbin:/sbin"
        environ = {**self.engine.environ, "PATH": path, "DSTACK_SHIM_ONE_WORKER": "1"}
        command = (*before, str(self.executable))
        shim = ShimProcess(self.home, environ, tool, command=command, port=PORT)
        self.host.shims.append(shim)
        return shim

    def start(self) -> None:
        """Start the shim as hosts do, and wait until it answers."""
        self.shim.start(within=PATIENCE)

    # Tasks.

    def config(self, task_id: str, user: str, script: str) -> TaskConfig:
        """A task that wants everything there is and leaves a mark when it starts."""
        job = f"echo started >>/marks/starts; {script}"
        return TaskConfig(
            id=task_id,
            name=f"{task_id}-0-0",
            image_name=self.images.job(job),
            gpu=1,
            volumes=(volume(VOLUME),),
            volume_mounts=(VolumeMount(VOLUME, "/data"),),
            instance_mounts=(InstanceMount(str(self._marks / task_id), "/marks"),),
            host_ssh_user=user,
            host_ssh_keys=(OUR_KEY,),
        )

    def starts(self, task_id: str) -> int:
        """How often the task's job was started."""
        with suppress(FileNotFoundError):
            return len((self._marks / task_id / "starts").read_text().splitlines())
        return 0

    def tell(self, task_id: str) -> None:
        """Let a job end that waits for being told."""
        (self._marks / task_id / "go").touch()

    def record(self, task_id: str) -> Mapping[str, Any]:
        """The task's record as it is on disk, {} if there is none to be read."""
        name = container_name(f"{task_id}-0-0", task_id)
        with suppress(OSError, ValueError):
            record: dict[str, Any] = json.loads(
                (self.home / "runners" / name / "task.json").read_bytes()
            )
            return record
        return {}

    # What is on the host.

    def census(self) -> Census:
        """One that takes what lies there now as foreign."""
        files = {name: home / ".ssh" / "authorized_keys" for name, home in self.users.items()}
        return Census(self.home, self.client, asker(self.shim.port), key_files=files)

    def leftovers(self) -> list[str]:
        """What is on the host though no task is, in sentences."""
        runners = sorted(path.name for path in (self.home / "runners").iterdir())
        found = [f"runners/ holds {name}" for name in runners]
        found += [f"volume {name} is mounted" for name in mounted_volumes()]
        found += [
            f"container {item['Names']} is {item['State']}"
            for item in self.client.containers(all=True)
        ]
        for name, home in self.users.items():
            found += [
                f"{name} has a file {path.name}"
                for path in (home / ".ssh").glob("*")
                if path.name != "authorized_keys"
            ]
            if self.host.keys_of(name) != (FOREIGN if name == OWNER else b""):
                found.append(f"the keys of {name} are {self.host.keys_of(name)!r}")
        return found

    def reset(self) -> None:
        """Put back what tasks do not: users' files and directories that are made once."""
        shutil.rmtree(self._marks, ignore_errors=True)
        for home in self.users.values():
            shutil.rmtree(home / ".ssh", ignore_errors=True)
        self.host.write_keys(OWNER, FOREIGN)
        with suppress(OSError):
            Path(VOLUMES, VOLUME).rmdir()

    def sweep(self) -> None:
        """Take away by force whatever is there, after a trial that went wrong."""
        self.shim.close()
        for item in self.client.containers(all=True):
            self.client.remove_container(item["Id"], force=True, v=True)
        for name in reversed(mounted_volumes()):
            subprocess.run(["umount", "--lazy", VOLUMES + name], check=False, timeout=60)
        for path in self.home.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.shim = self.new_shim()
        self.reset()

    def _make_gpu(self) -> None:
        Path("/dev/accel").mkdir(exist_ok=True)
        self.host.tool("hl-smi", "echo 'HL-225, 98304, 0'")

    def _version_teller(self) -> Path:
        # The shim under test is asked for its version at each start: a tenth of it is spared.
        self.host.tool("dstack-shim", "echo dstack-shim version 0.22.5")
        return self.host.tools / "dstack-shim"
