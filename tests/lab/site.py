"""A host whose shim lies at a path of its own and is started again when it ends, as hosts have it.

site = Site(folder, engine, content)          # the shim's file
site.start()
site.install(other)                           # as a server does
site.client.shutdown()
site.wait_for_version("0.22.5.post1")
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dstack_shim_contracts.api import (
    SHIM,
    Component,
    ComponentInstallRequest,
    ComponentStatus,
    HealthcheckResponse,
    LastUpgrade,
    TaskConfig,
)
from dstack_shim_contracts.client import ShimClient
from dstack_shim_contracts.errors import ShimUnreachable
from dstack_shim_contracts.statuses import TaskStatus

from tests.eventually import eventually
from tests.lab.engine import PrivateEngine
from tests.lab.images import RUNS_ON, Images
from tests.lab.shim import PORT
from tests.lab.supervisor import Supervisor
from tests.shim.file_server import FileServer, Reply

PATIENCE = 60.0  # s: a machine that runs everything else too


class Site:
    """One such host; ``files`` is where installs come from, ``prefix`` is put before the command."""

    def __init__(
        self,
        folder: Path,
        engine: PrivateEngine,
        content: bytes,
        files: FileServer,
        *,
        environ: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
        pause: float = 0.05,
        prefix: Sequence[str] = (),
    ) -> None:
        self.home = folder / "home"
        self.path = folder / "bin" / SHIM
        self.home.mkdir(exist_ok=True)
        self.path.parent.mkdir(exist_ok=True)
        self.put(content)
        self.files = files
        self.client = ShimClient(PORT, timeout=PATIENCE)
        command = [
            *prefix,
            str(self.path),
            f"--shim-home={self.home}",
            f"--shim-http-port={PORT}",
            *flags,
        ]
        self.supervisor = Supervisor(
            command,
            environ={**os.environ, **engine.environ, **(environ or {})},
            log=folder / "supervisor.log",
            pause=pause,
        )
        self._count = 0

    def put(self, content: bytes) -> None:
        """Put a shim at the path by hand, as a deployment does: mode 0711, readable by root."""
        new = self.path.with_name("deployed")
        new.write_bytes(content)
        new.chmod(0o711)
        new.rename(self.path)

    def start(self) -> None:
        """Begin; returns when the shim answers."""
        self.supervisor.start()
        self.wait_until_it_answers()

    def close(self) -> None:
        """Leave nothing running."""
        self.client.close()
        if self.supervisor.pid is not None or self.supervisor.runs:
            self.supervisor.stop()

    @property
    def pid(self) -> int:
        """The running shim."""
        pid = self.supervisor.pid
        assert pid is not None
        return pid

    @property
    def waiting(self) -> Path:
        """Where a proved file waits."""
        return self.path.with_name(f".{SHIM}.next")

    @property
    def previous(self) -> Path:
        """Where the file before this one is kept."""
        return self.path.with_name(f".{SHIM}.previous")

    def log(self) -> str:
        """All it logged."""
        return (self.home / "shim.log").read_text()

    def state(self) -> dict[str, Any]:
        """What it remembers of upgrades."""
        with suppress(FileNotFoundError):
            state: dict[str, Any] = json.loads((self.home / "upgrade.json").read_bytes())
            return state
        return {}

    # What it answers.

    def wait_until_it_answers(self) -> HealthcheckResponse:
        """Wait for any answer."""
        return self._wait(lambda _: True, "it answers")

    def wait_for_version(self, version: str) -> HealthcheckResponse:
        """Wait until that version serves and its predecessor is settled."""

        def there(answer: HealthcheckResponse) -> bool:
            last = _last(answer)
            return answer.version == version and (last is None or last.outcome != "trying")

        return self._wait(there, f"{version} serves")

    def wait_for_outcome(self, outcome: str) -> LastUpgrade:
        """Wait until the last upgrade ended so."""

        def ended(answer: HealthcheckResponse) -> bool:
            last = _last(answer)
            return last is not None and last.outcome == outcome

        last = _last(self._wait(ended, f"the upgrade is {outcome}"))
        assert last is not None
        return last

    def component(self) -> Component:
        """The shim's own entry."""
        return next(one for one in self.client.components().components if one.name == SHIM)

    def begin_install(self, content: bytes | Reply) -> str:
        """Ask for an install; returns the path it is fetched from."""
        self._count += 1
        name = f"/shim-{self._count}"
        self.files.replies[name] = content if isinstance(content, Reply) else Reply(content)
        self.client.install_component(ComponentInstallRequest(SHIM, self.files.url(name)))
        return name

    def install(self, content: bytes | Reply) -> Component:
        """Install, and wait for how that goes."""
        self.begin_install(content)
        return self.wait_for_install()

    def wait_for_install(self) -> Component:
        """The entry once nothing is being installed."""

        def over() -> Component | None:
            with suppress(ShimUnreachable):
                entry = self.component()
                return entry if entry.status is not ComponentStatus.INSTALLING else None
            return None

        entry = eventually(over, within=PATIENCE, saying="the install is over")
        assert entry is not None
        return entry

    def upgrade(self, content: bytes) -> None:
        """Install, and ask for the shutdown that makes it the next one."""
        self.install(content)
        self.client.shutdown()

    # Tasks.

    def run_task(self, task_id: str, images: Images) -> str:
        """Run a task that goes on; returns its container."""
        image = images.job(RUNS_ON)
        self.client.submit(TaskConfig(id=task_id, name=f"{task_id}-0-0", image_name=image))

        def running() -> bool:
            return self.client.task(task_id).status is TaskStatus.RUNNING

        eventually(running, within=PATIENCE, saying=f"{task_id} runs")
        return self.client.task(task_id).container_id

    def _wait(self, holds: Any, saying: str) -> HealthcheckResponse:
        def answer() -> HealthcheckResponse | None:
            try:
                found = self.client.healthcheck()
            except ShimUnreachable:
                return None
            return found if holds(found) else None

        found = eventually(answer, within=PATIENCE, saying=saying)
        assert found is not None
        return found


def digest(content: bytes) -> str:
    """Its SHA-256."""
    return hashlib.sha256(content).hexdigest()


def _last(answer: HealthcheckResponse) -> LastUpgrade | None:
    return answer.implementation.last_upgrade if answer.implementation else None
