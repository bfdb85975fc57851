"""Everything the doctor looks at, gathered without changing anything."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs
from dstack_shim_contracts.record import TaskRecord
from dstack_shim_contracts.upgrade import UpgradeState

from dstack_shim.console.sources import Sources, look
from dstack_shim.doctor import Examination, Finding, Notes, at_once, examine
from dstack_shim.engine.protocol import Engine
from dstack_shim.errors import ResourceError, ShimError
from dstack_shim.host.commands import run as run_command
from dstack_shim.host.detection import detect_gpus
from dstack_shim.log import EventLog, event_log
from dstack_shim.resources.host_keys import HostKeys
from dstack_shim.resources.volumes import Volumes
from dstack_shim.settings import Settings
from dstack_shim.store import RECORD
from dstack_shim.upgrade_state import UpgradeFile

PASSWD = Path("/etc/passwd")
"""Users of this host itself: those of a directory service may be many, their homes elsewhere."""


@attrs.frozen
class Disk:
    """Room on the file system of one directory; shares are from 0 to 1."""

    what: str
    path: str
    free: int
    free_share: float
    free_files_share: float


@attrs.frozen(repr=False)
class Facts:
    """What was found. ``sources`` is None where the home cannot even be read."""

    settings: Settings
    seen: Examination
    sources: Sources | None = None
    disks: tuple[Disk, ...] = ()
    open_paths: Mapping[str, int] = attrs.field(factory=dict)
    """What others than root may write, or read of records: path → mode."""
    leftovers: tuple[str, ...] = ()
    runner: str = ""
    """What is wrong with the runner's file, "" for nothing."""
    upgrade: UpgradeState = attrs.field(factory=UpgradeState)
    mounted: Mapping[str, str] = attrs.field(factory=dict)
    keys: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    gpus: tuple[str, ...] = ()
    is_port_taken: bool = False
    log_size: int = 0
    notes: tuple[Finding, ...] = ()
    """What a daemon that looks would have logged as trouble."""

    @property
    def holders(self) -> tuple[TaskRecord, ...]:
        """The tasks that may still hold something."""
        items = self.seen.plan.restore if self.seen.plan is not None else ()
        return tuple(item.task.record for item in items if not item.task.released)

    @property
    def shares_host(self) -> bool:
        """Whether the shim of another home has containers here: then not all marks are ours."""
        containers = (self.sources.containers if self.sources else None) or ()
        home = str(self.sources.home) if self.sources else ""
        return any(container.home not in (None, home) for container in containers)


async def gather(settings: Settings, engine: Engine) -> Facts:
    """Look at everything."""
    seen = await examine(settings, engine)
    try:
        sources = await look(settings, engine, deep=True)
    except ShimError:
        return Facts(settings, seen)
    notes = Notes()
    home = sources.home
    facts = Facts(
        settings,
        seen,
        sources,
        disks=_disks(home, sources.engine.root_dir if sources.engine else ""),
        open_paths=_open_paths(home),
        leftovers=_leftovers(home),
        runner=_runner_problem(Path(settings.runner_binary_path)),
        upgrade=UpgradeFile(home, event_log()).read(),
        gpus=await _gpus(notes),
        is_port_taken=_is_taken(settings.shim_http_port),
        log_size=_size(home / "shim.log"),
    )
    try:
        mounted = await Volumes(run_command, at_once, notes).census()
        keys = await HostKeys(at_once, notes).census(_users(facts.holders))
    except ResourceError as error:
        notes.warning("host", error=error)
        mounted, keys = {}, {}
    return attrs.evolve(facts, mounted=mounted, keys=keys, notes=tuple(notes.findings))


def _users(holders: Iterable[TaskRecord]) -> list[str]:
    """Whose keys are looked at: users that tasks name, and those of this host that have some."""
    named = {record.config.host_ssh_user for record in holders} - {""}
    return sorted(named | set(_with_keys()))


def _with_keys() -> Iterator[str]:
    for line in PASSWD.read_text(encoding="utf-8", errors="replace").splitlines():
        user, *_, home, _shell = [*line.split(":"), "", ""][:7]
        if user and home and os.path.lexists(f"{home}/.ssh/authorized_keys"):
            yield user


def _disks(home: Path, engine_root: str) -> tuple[Disk, ...]:
    found = []
    for what, path in (("home", str(home)), ("engine", engine_root)):
        try:
            fs = os.statvfs(path)
        except OSError:
            continue  # no engine, or one on another machine
        found.append(
            Disk(
                what,
                path,
                fs.f_bavail * fs.f_frsize,
                fs.f_bavail / fs.f_blocks if fs.f_blocks else 1.0,
                fs.f_favail / fs.f_files if fs.f_files else 1.0,
            )
        )
    return tuple(found)


def closed_to_others(path: Path) -> int:
    """The bits of a mode that nobody but root has with one of the home's files."""
    return 0o077 if path.name == RECORD else 0o022


def _open_paths(home: Path) -> dict[str, int]:
    """What is more open than the shim makes it. A record tells what a job is and who may log in."""
    wanted = [home, home / "runners", home / "upgrade.json", *home.glob(f"runners/*/{RECORD}")]
    found = {}
    for path in wanted:
        try:
            status = path.lstat()
        except OSError:
            continue
        if not stat.S_ISLNK(status.st_mode) and status.st_mode & closed_to_others(path):
            found[str(path)] = stat.S_IMODE(status.st_mode)
    return found


def _leftovers(home: Path) -> tuple[str, ...]:
    runners = home / "runners"
    found = [*runners.glob(".new-*"), *runners.glob(".trash-*")] if runners.is_dir() else []
    return tuple(sorted(path.name for path in found))


def _runner_problem(path: Path) -> str:
    if not path.exists():
        return f"{path} is missing"
    return "" if path.is_file() and os.access(path, os.X_OK) else f"{path} cannot be executed"


async def _gpus(log: EventLog) -> tuple[str, ...]:
    return tuple(gpu.id for gpu in (await detect_gpus(run_command, log)).gpus)


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
